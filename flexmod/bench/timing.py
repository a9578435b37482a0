"""Interleaved timing: every candidate in turn, round after round, in one process."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

_ROUND = 4.0  # ms that a candidate is repeated for in a round, on a GPU
_SPENT = 3000.0  # ms a candidate; slower ones get fewer rounds, at least three


class Times(NamedTuple):
    """Milliseconds a call over the rounds."""

    median: float
    fastest: float
    slowest: float
    spread: float  # interquartile range over median
    rounds: int


class Budget:
    """Seconds that a run may take. What is begun is finished; nothing is begun afterwards."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def is_spent(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end

    @property
    def left(self) -> float | None:
        """Seconds, at least one; None: no limit."""
        return None if self._end is None else max(self._end - time.monotonic(), 1.0)


def summary(times: list[float]) -> Times:
    low, median, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    spread = (high - low) / median if median else 0.0
    return Times(median, min(times), max(times), spread, len(times))


def interleaved(
    calls: Mapping[str, Callable[[], Any]], rounds: int, device: torch.device, budget: Budget
) -> dict[str, Times]:
    """Times of each call. A round runs all calls, in an order of its own."""
    repeats = {name: _repeats(once(call, device)) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    order, shuffle = list(calls), random.Random(0).shuffle
    for _ in range(rounds):
        if budget.is_spent and all(times.values()):
            break
        shuffle(order)
        for name in order:
            if sum(times[name]) * repeats[name] < _SPENT or len(times[name]) < 3:
                if repeats[name] > 1:  # short: the one before may have left the host's caches cold
                    calls[name]()
                times[name].append(once(calls[name], device, repeats[name]))
    return {name: summary(found) for name, found in times.items() if found}


def _repeats(milliseconds: float) -> int:
    return max(1, min(32, round(_ROUND / max(milliseconds, 1e-3))))


def once(call: Callable[[], Any], device: torch.device, repeats: int = 1) -> float:
    """Milliseconds a call, of `repeats` behind each other; on a GPU by its own clock."""
    if device.type == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / repeats
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - began) * 1e3 / repeats


def wait(device: torch.device) -> None:
    """Until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
