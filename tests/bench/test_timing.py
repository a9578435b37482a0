"""Interleaved timing, ratios, and the processes that build kernels before it."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest
import torch

from flexmod.bench import command, timing, workers
from flexmod.bench.rows import small_rows
from flexmod.bench.suites import SUITES, comparison
from flexmod.errors import ArgumentError

CPU = torch.device("cpu")


def test_ratios_say_how_many_times_faster_ours_is():
    record = {"row": "a", "failed": {}, "error": {}}
    more = {**record, "tflops": {"flexmod": 90.0, "flexmod cpu": 100.0, "p": 50.0, "q": 40.0}}
    less = {**record, "us": {"flexmod": 20.0, "p": 50.0, "q": 40.0}}
    assert comparison(SUITES["forward"], more) == ("flexmod cpu", "p", 2.0)
    assert comparison(SUITES["latency"], less) == ("flexmod", "q", 2.0)
    assert comparison(SUITES["latency"], {**record, "us": {"flexmod": 1.0}}) is None


def test_slow_candidates_get_fewer_rounds_and_all_are_in_each(monkeypatch):
    called, order = [], []  # all calls, and those that are timed
    costs = {"slow": 1500.0, "fast": 1.0}
    calls = {name: (lambda name=name: called.append(name)) for name in costs}

    def once(call, device, repeats=1):
        call()
        order.append(called[-1])
        return costs[order[-1]]

    monkeypatch.setattr(timing, "once", once)
    found = timing.interleaved(calls, 9, CPU, timing.Budget(None))
    assert found["slow"].rounds == 3 and found["fast"].rounds == 9
    assert found["fast"].median == 1.0 and found["fast"].spread == 0.0
    rounds = order[2:8]
    assert all({a, b} == {"slow", "fast"} for a, b in list(pairwise(rounds))[::2])
    warm = {name: called.count(name) - order.count(name) for name in costs}
    assert warm == {"slow": 0, "fast": 9}  # a short one is called untimed before each timing


def test_workers_share_all_rows(parse, monkeypatch):
    given = parse("--device=cpu", "--tokens=128", "--workers=2", "--seconds=100")
    setting = command.make_setting(given)
    line = workers._command(given, setting, "backward", ["dense", "softcap"])
    assert "--rows=dense,softcap" in line and "--rounds=0" in line and "--tokens=128" in line
    started, waited = [], []
    monkeypatch.setattr(workers, "_start", started.append)
    monkeypatch.setattr(workers, "_wait_for", lambda *given: waited.append(given[2].left))
    given.rows = setting.rows = "dense,alibi,softcap,512 x 1"
    with pytest.raises(ArgumentError, match="no row is called '512 x 1'"):
        workers.build(given, setting, [SUITES["forward"]])
    given.rows = setting.rows = ""
    workers.build(given, setting, [SUITES["small-backward"], SUITES["masks"]])
    assert len(waited) == 1 and waited[0] <= 50 and len(started) == 2
    shared = [part for line in started for part in line if part.startswith("--rows=")]
    shared = ",".join(part.removeprefix("--rows=") for part in shared).split(",")
    assert sorted(shared) == sorted({row.name for row in small_rows(128)})
    assert all("--suite=small-backward" in line for line in started)


def test_workers_end_when_there_is_no_time_left(parse):
    setting = command.make_setting(parse("--device=cpu"))
    endless = workers._start([sys.executable, "-c", "while True: pass"])
    workers._wait_for([endless], setting, timing.Budget(0))
    assert endless.returncode not in (None, 0)
