"""`python -m flexmod bench` on tiny rows: what it prints and keeps, and what it refuses."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import pytest
import torch

from flexmod.__main__ import main
from flexmod.bench import attention, command, files, report, timing
from flexmod.bench.suites import SUITES
from flexmod.kernels.choose import BACKENDS
from flexmod.progress import Progress


def test_a_run_prints_lines_and_a_table_and_keeps_json_and_a_picture(bench, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = f"--out={tmp_path}"
    chosen = "--rows=dense,window,learned relative bias"
    assert bench("--suite=forward,backward", "--peers=sdpa", chosen, out) == 0
    shown = capsys.readouterr().out
    for suite in ("forward", "backward"):
        assert re.search(rf"^{suite} dense D64 +flexmod [\d.e-]+ ±\d+ %  SDPA CPU", shown, re.M)
        table = shown.split(f"\n{suite} ")[-1]
        assert re.search(r"^learned relative bias D64 +[\d.e-]+ +- +\de-07|\d\.\de-07", table, re.M)
        found = json.loads((tmp_path / f"cpu_{suite}.json").read_text())
        assert found["suite"] == suite and found["left"] == []
        assert found["environment"]["torch"] == torch.__version__
        assert [row["row"] for row in found["rows"]] == [
            "dense", "window 16", "learned relative bias"
        ]  # fmt: skip
        for row in found["rows"]:
            served = {"flexmod"} if "relative" in row["row"] else {"flexmod", "SDPA CPU"}
            assert set(row["tflops"]) == set(row["error"]) == set(row["ms"]) == served
            assert all(0 < error < 2e-6 for error in row["error"].values())
            assert all(times["rounds"] == 2 for times in row["ms"].values())
        picture = tmp_path / f"cpu_{suite}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")
        picture.unlink()
        assert main(["bench", "--picture", str(tmp_path / f"cpu_{suite}.json")]) == 0
        assert picture.exists()


def test_a_run_out_of_time_keeps_what_it_has(bench, monkeypatch, tmp_path, capsys):
    spent = iter([False] * 6 + [True] * 100)
    monkeypatch.setattr(timing.Budget, "is_spent", property(lambda self: next(spent)))
    assert bench("--peers=none", "--rows=dense,causal,alibi", f"--out={tmp_path}") == 0
    found = json.loads((tmp_path / "cpu_forward.json").read_text())
    measured = [row["row"] for row in found["rows"]]
    assert measured[0] == "dense" and len(measured) < 3
    assert (
        found["left"] == [f"{name} D64" for name in ("dense", "causal", "alibi")][len(measured) :]
    )
    assert f"no time was left for: {', '.join(found['left'])}" in capsys.readouterr().out


def test_no_seconds_measure_nothing(bench, capsys):
    assert bench("--seconds=0", "--rows=dense") == 0
    assert capsys.readouterr().out == "\nno time was left for: dense D64\n"


ENDS = [
    (KeyboardInterrupt(), "the rest of latency (interrupted)"),
    (
        RuntimeError("CUDA error: an illegal memory access was encountered\nmore"),
        "the rest of latency (RuntimeError: CUDA error: an illegal memory access",
    ),
]


@pytest.mark.parametrize(("error", "left"), ENDS, ids=["interrupted", "broken"])
def test_a_suite_that_ends_early_shows_its_table(bench, monkeypatch, capsys, error, left):
    def ends(setting):
        yield {"row": "first", "us": {"flexmod": 10.0, "peer": 30.0}, "failed": {}}
        raise error

    monkeypatch.setitem(SUITES, "latency", replace(SUITES["latency"], measure=ends))
    assert bench("--suite=latency") == 0
    shown = capsys.readouterr().out
    assert re.search(r"^first +10 +30 +3\.00$", shown, re.M)
    assert left in shown


def test_without_memory_for_the_reference_there_are_figures(bench, monkeypatch, tmp_path):
    def no_memory(case):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(attention, "reference", no_memory)
    assert bench("--peers=none", "--rows=dense", f"--out={tmp_path}") == 0
    (row,) = json.loads((tmp_path / "cpu_forward.json").read_text())["rows"]
    assert list(row["tflops"]) == ["flexmod"] and row["error"] == {}
    assert row["failed"] == {"float64 reference": "OutOfMemoryError: no memory"}


def test_progress_is_a_bar_on_a_terminal_and_nothing_elsewhere(monkeypatch, capsys):
    Progress().show("half", 0.5)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    Progress().show("half", 0.5)
    Progress().show("")
    assert capsys.readouterr().err == f"\r\033[K{'█' * 12}{'░' * 12}  50 % half\r\033[K"


def test_forced_engines_are_columns(bench, tmp_path, capsys):
    engines = "--engine=cpu,reference"
    assert bench("--peers=none", "--rows=causal 32", engines, f"--out={tmp_path}") == 0
    (row,) = json.loads((tmp_path / "cpu_forward.json").read_text())["rows"]
    assert list(row["tflops"]) == ["flexmod cpu", "flexmod reference"]


def test_no_rounds_only_build(bench, capsys):
    assert bench("--peers=none", "--rows=dense", "--rounds=0") == 0
    assert "flexmod" not in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--suite=speed"],
            "'speed' is none of forward, backward, small-forward, small-backward, masks",
        ),
        (["--engine=warp"], f"'warp' is none of {', '.join(BACKENDS)}"),
        (["--head-dim=64,x"], "'x' is not a number"),
        (["--rows=causal 16"], "--rows causal 16 are not measured with this --head-dim"),
        (["--rows=potato"], "no row is called 'potato'; there are dense, causal, prefix"),
        (["--device=potato"], "'potato' cannot be used"),
        (["--picture=nowhere.json"], "nowhere.json is no result file"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_arguments_are_named(bench, arguments, message, capsys):
    assert bench(*arguments) == 2
    assert message in capsys.readouterr().err


def test_without_matplotlib_the_command_to_draw_is_shown(bench, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bench("--peers=none", "--rows=dense", f"--out={tmp_path}") == 0
    path = tmp_path / "cpu_forward.json"
    assert f"python -m flexmod bench --picture {path}" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.png"))


def test_only_whole_suites_are_kept_in_the_checkout(parse):
    folder = lambda *given: command._folder(parse(*given))
    assert folder() == files.results_folder()
    parts = ("--rows=a", "--quick", "--peers=x", "--engine=cpu", "--tokens=9", "--rounds=0",
             "--head-dim=64")  # fmt: skip
    assert [folder(part) for part in parts] == [None] * len(parts)


def test_committed_results_can_be_read():
    folder = files.results_folder()
    assert folder is not None
    for path in folder.glob("*.json"):
        suite, found = files.read(path)
        assert len(report.table(suite, found["rows"]).splitlines()) > len(found["rows"])


def test_reasons_are_one_line_without_folders():
    first = RuntimeError("no such shape\nmore")
    assert attention.reason(first) == "RuntimeError: no such shape"
    named = ValueError("a\nTypeError: in '/opt/some/lib/module.py' 3/4 of it\nb")
    assert attention.reason(named) == "TypeError: in 'module.py' 3/4 of it"
    assert attention.reason(ValueError()) == "ValueError: "
