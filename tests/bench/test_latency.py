"""The suite `latency`: steady calls, first calls of new mods and of new processes."""

from __future__ import annotations

import subprocess
import types

import pytest

from flexmod.bench import command, latency, peers, report
from flexmod.bench.suites import SUITES


@pytest.fixture
def setting(parse, monkeypatch):
    monkeypatch.setattr(latency, "CALLS", 2)
    given = ("--suite=latency", "--device=cpu", "--peers=sdpa", "--rounds=1")
    return command.make_setting(parse(*given))


def test_every_row_has_a_figure(setting, monkeypatch, capsys):
    def in_this_process(line, **options):
        latency.main(*line[3:])
        return types.SimpleNamespace(returncode=0, stdout=capsys.readouterr().out)

    monkeypatch.setattr(subprocess, "run", in_this_process)
    records = list(latency.measure(setting))
    assert [record["row"] for record in records] == [
        "no mod, a call", "alibi + causal, a call", "a new mod, first call",
        "a new process, first call",
    ]  # fmt: skip
    served = [["flexmod", "flexmod traced", "SDPA CPU"], ["flexmod", "flexmod traced"],
              ["flexmod"], ["flexmod"]]  # fmt: skip
    assert [list(record["us"]) for record in records] == served
    assert all(x > 0 for record in records for x in record["us"].values())
    assert not any(record["failed"] for record in records)
    assert len(report.table(SUITES["latency"], records).splitlines()) == 6


def test_a_process_that_fails_says_why(setting, monkeypatch):
    failed = types.SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nValueError: no")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: failed)
    *_, record = latency.measure(setting)
    assert record["us"] == {} and record["failed"] == {"flexmod": "ValueError: no"}


def test_what_there_is_no_time_for_is_named(setting, monkeypatch):
    monkeypatch.setattr(type(setting.budget), "is_spent", True)
    assert list(latency.measure(setting)) == [] and len(setting.left) == 4


def test_names_lead_back_to_candidates():
    for name in ("flexmod", "flexmod cpu", *(peer.name for peer in peers.PEERS)):
        engine = name.removeprefix("flexmod").strip()
        assert sum(c.name == name for c in peers.candidates([engine], "")) == 1
