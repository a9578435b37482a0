"""Processes that build the kernels of a run before it is timed: caches on disk do the rest."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from flexmod.bench.attention import jobs
from flexmod.bench.setting import Setting
from flexmod.bench.suites import Suite
from flexmod.bench.timing import Budget


def build(options: argparse.Namespace, setting: Setting, suites: list[Suite]) -> None:
    """Share the rows of each suite among `options.workers` processes, and wait for them: at most
    half of the time that is left. What is not built then is built when its turn comes.
    """
    left = setting.budget.left
    budget = Budget(None if left is None else left / 2)
    for suite in suites:
        if suite.table is not None:
            names = list(dict.fromkeys(row.name for row, _ in jobs(suite.table, setting)))
            shares = [names[n :: options.workers] for n in range(options.workers)]
            lines = [_command(options, setting, suite.name, share) for share in shares if share]
            _wait_for([_start(line) for line in lines], setting, budget)


def _start(line: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _wait_for(running: list[subprocess.Popen[bytes]], setting: Setting, budget: Budget) -> None:
    """Until all have ended or there is no time left."""
    try:
        while any(process.poll() is None for process in running) and not budget.is_spent:
            ready = sum(process.poll() is not None for process in running)
            setting.progress.show("building kernels", ready / len(running))
            time.sleep(0.1)
    finally:
        for process in running:
            process.kill()
            process.wait()


def _command(
    options: argparse.Namespace, setting: Setting, suite: str, rows: list[str]
) -> list[str]:
    """Some rows, with every candidate called once."""
    given = {
        "--suite": suite, "--rows": ",".join(rows), "--head-dim": options.head_dim,
        "--rounds": 0, "--tokens": setting.tokens, "--width": setting.width,
        "--device": setting.device, "--peers": options.peers, "--engine": options.engine,
    }  # fmt: skip
    arguments = [f"{name}={value}" for name, value in given.items()]
    return [sys.executable, "-m", "flexmod", "bench", *arguments]
