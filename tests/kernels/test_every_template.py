"""The script that runs every template: it covers them all, and notices a wrong result."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = runpy.run_path(str(Path(__file__).with_name("every_template.py")))
main, chosen = SCRIPT["main"], SCRIPT["chosen"]


def test_a_case_is_right(capsys):
    assert main(["fa2", "float32", "diagonal"]) == 0
    *cases, summary = capsys.readouterr().out.splitlines()
    assert cases and all(line.startswith("ok ") for line in cases)
    assert summary == f"{len(cases)} ok, 0 refused, 0 wrong"


def test_a_wrong_result_fails(monkeypatch, capsys):
    import flexmod

    attend = flexmod.flex_attention

    def wrong(*given, backend, **options):
        out, lse = attend(*given, backend="reference", **options)
        return (out * 1.001 if backend != "reference" else out), lse

    monkeypatch.setattr(flexmod, "flex_attention", wrong)
    assert main(["fa2", "float32", "plain"]) == 1
    assert "wrong" in capsys.readouterr().out


def test_no_case_is_no_success():
    assert main(["nothing"]) == 1


def test_shares_are_all_cases():
    shares = [case for n in range(3) for case in chosen([], f"{n}/3")]
    assert sorted(case.name for case in shares) == sorted(case.name for case in chosen([]))


def test_every_engine_with_kernels_is_run_on_a_gpu():
    assert {lane.engine for lane in SCRIPT["GPU_LANES"]} == {"hopper", "fa2"}
