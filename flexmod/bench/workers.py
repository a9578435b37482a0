"""Processes that build the kernels of a run before it is timed: caches on disk do the rest."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from flexmod.bench.attention import jobs
from flexmod.bench.setting import Setting


def build(options: argparse.Namespace, setting: Setting) -> None:
    """Share the rows among `options.workers` processes, and wait for them."""
    names = list(dict.fromkeys(row.name for row, _ in jobs(setting)))
    shares = [share for n in range(options.workers) if (share := names[n :: options.workers])]
    running = [
        subprocess.Popen(
            _command(options, setting, share),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for share in shares
    ]
    try:
        while any(process.poll() is None for process in running) and not setting.budget.is_spent:
            ready = sum(process.poll() is not None for process in running)
            setting.progress.show("building kernels", ready / len(running))
            time.sleep(0.1)
    finally:
        for process in running:
            process.kill()
            process.wait()


def _command(options: argparse.Namespace, setting: Setting, rows: list[str]) -> list[str]:
    """Some rows, with every candidate called once."""
    given = {
        "--suite": options.suite, "--rows": ",".join(rows), "--head-dim": options.head_dim,
        "--rounds": 0, "--tokens": setting.tokens, "--width": setting.width,
        "--device": setting.device, "--peers": options.peers, "--engine": options.engine,
    }  # fmt: skip
    arguments = [f"{name}={value}" for name, value in given.items()]
    return [sys.executable, "-m", "flexmod", "bench", *arguments]
