"""Interleaved timing: every candidate in turn, round after round, in one process."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import date
from typing import Any

import torch


def interleaved(
    calls: Mapping[str, Callable[[], Any]], rounds: int = 9, device: str = "cuda"
) -> dict[str, dict[str, float]]:
    """Milliseconds of each call: median, fastest and slowest round. Each round runs all calls."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(_once(call, device))
    return {
        name: {"median": statistics.median(t), "fastest": min(t), "slowest": max(t)}
        for name, t in times.items()
    }


def _once(call: Callable[[], Any], device: str) -> float:
    """One call in ms; on a GPU several behind each other, as launches would hide."""
    if device == "cpu":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    repeats = 4
    start.record()
    for _ in range(repeats):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / repeats


def environment(device: str) -> dict[str, str]:
    """What a result depends on beside the code."""
    try:
        import triton

        versions = triton.__version__
    except ImportError:
        versions = "none"
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    return {
        "device": name or platform.machine(),
        "torch": torch.__version__,
        "triton": versions,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }
