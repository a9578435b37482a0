"""`python -m flexmod bench` on tiny rows: figures, files, limits, and what it refuses."""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from flexmod.__main__ import main
from flexmod.bench import attention, command, files, masks, peers, report, timing, workers
from flexmod.bench.attention import operations
from flexmod.bench.case import BHSD, BSHD, PACKED, make_case
from flexmod.bench.errors import relative
from flexmod.bench.rows import MASKS, SCORES, document_lengths, rows, select, small_rows
from flexmod.bench.suites import SUITES, comparison
from flexmod.errors import ArgumentError
from flexmod.kernels.choose import BACKENDS
from flexmod.progress import Progress
from flexmod.testing import naive, visible

CPU = torch.device("cpu")
TINY = ["--device=cpu", "--tokens=128", "--width=64", "--rounds=2", "--head-dim=64"]


def bench(*arguments):
    return main(["bench", *TINY, *arguments])


def parse(*given):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(given)


def small_case(row, direction="forward"):
    sizes = {"tokens": 128, "width": 32, "device": CPU, "dtype": torch.float32}
    return make_case(row, direction, 16, **sizes)


def test_a_run_prints_lines_and_a_table_and_keeps_json_and_a_picture(tmp_path, capsys):
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


def test_a_peer_that_fails_becomes_a_footnote(monkeypatch, tmp_path, capsys):
    def broken(case):
        raise RuntimeError("no such shape\nsecond line")

    def never(*arguments):
        raise AssertionError("asked for a row that it does not serve")

    serves_none = peers.Candidate("narrow", lambda d: None, lambda row, direction: False, never)
    fails = peers.Candidate("fragile", lambda d: None, lambda row, direction: True, broken)
    gone = peers.Candidate("gone", lambda d: "it is not installed", lambda *_: True, never)
    monkeypatch.setattr(peers, "PEERS", (fails, serves_none, gone))
    assert bench("--rows=dense,causal", f"--out={tmp_path}") == 0
    shown = capsys.readouterr()
    assert "not here: gone (it is not installed)" in shown.err
    assert shown.out.count("[1] fragile: RuntimeError: no such shape\n") == 1
    assert re.search(r"^dense D64 +[\d.e-]+ +\[1\]", shown.out, re.M)
    row = json.loads((tmp_path / "cpu_forward.json").read_text())["rows"][0]
    assert row["failed"] == {"fragile": "RuntimeError: no such shape"}
    assert list(row["tflops"]) == ["flexmod"]


def test_a_run_out_of_time_keeps_what_it_has(monkeypatch, tmp_path, capsys):
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


def test_no_seconds_measure_nothing(capsys):
    assert bench("--seconds=0", "--rows=dense") == 0
    assert capsys.readouterr().out == "\nno time was left for: dense D64\n"


def test_an_interrupted_run_shows_its_table(monkeypatch, capsys):
    def interrupted(setting):
        yield {"row": "first", "us": {"flexmod": 10.0, "peer": 30.0}, "failed": {}}
        raise KeyboardInterrupt

    monkeypatch.setitem(SUITES, "latency", replace(SUITES["latency"], measure=interrupted))
    assert bench("--suite=latency") == 0
    shown = capsys.readouterr().out
    assert re.search(r"^first +10 +30 +3\.00$", shown, re.M)
    assert "the rest of latency (interrupted)" in shown


def test_an_error_that_breaks_the_process_ends_a_suite_with_its_table(monkeypatch, capsys):
    def broken(setting):
        yield {"row": "first", "us": {"flexmod": 10.0, "peer": 30.0}, "failed": {}}
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setitem(SUITES, "latency", replace(SUITES["latency"], measure=broken))
    assert bench("--suite=latency") == 0
    shown = capsys.readouterr().out
    assert re.search(r"^first +10 +30 +3\.00$", shown, re.M)
    assert "the rest of latency (RuntimeError: CUDA error: an illegal memory access" in shown


def test_without_memory_for_the_reference_there_are_figures(monkeypatch, tmp_path):
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


def test_forced_engines_are_columns(tmp_path, capsys):
    engines = "--engine=cpu,reference"
    assert bench("--peers=none", "--rows=causal 32", engines, f"--out={tmp_path}") == 0
    (row,) = json.loads((tmp_path / "cpu_forward.json").read_text())["rows"]
    assert list(row["tflops"]) == ["flexmod cpu", "flexmod reference"]


def test_no_rounds_only_build(capsys):
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
def test_wrong_arguments_are_named(arguments, message, capsys):
    assert bench(*arguments) == 2
    assert message in capsys.readouterr().err


def test_without_matplotlib_the_command_to_draw_is_shown(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bench("--peers=none", "--rows=dense", f"--out={tmp_path}") == 0
    path = tmp_path / "cpu_forward.json"
    assert f"python -m flexmod bench --picture {path}" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.png"))


def test_only_whole_suites_are_kept_in_the_checkout():
    folder = lambda *given: command._folder(parse(*given))
    assert folder() == files.results_folder()
    parts = ("--rows=a", "--quick", "--peers=x", "--engine=cpu", "--tokens=9", "--rounds=0",
             "--head-dim=64")  # fmt: skip
    assert [folder(part) for part in parts] == [None] * len(parts)


def test_every_row_runs_as_flexmod_and_by_its_definition():
    """The mods are usable by the oracle, so that every row's error can be worked out."""
    for row in (*rows(128), *small_rows(128)):
        case = small_case(row)
        shown = naive(*case.tensors, case.score_mod, case.mask_mod, rows=torch.tensor([3]))[0]
        own = peers.candidates([], "none")[0].make(case).attend()
        assert relative(own[:, :, [3]], shown) < 2e-6, row.name
        assert row.mask in MASKS and row.score in SCORES
        assert row.learns == bool(case.learned)
        assert case.query.shape[0] == (row.batch or 128 // row.seqlen)


def test_operations_count_visible_pairs():
    for row in rows(128):
        seen = visible(small_case(row).mask_mod, 1, 1, row.seqlen, row.seqlen).sum()
        batch = 128 // row.seqlen
        assert operations(small_case(row)) == pytest.approx(4 * batch * 2 * 16 * float(seen))
    dense = rows(128)[0]
    forward, backward = (operations(small_case(dense, d)) for d in ("forward", "backward"))
    assert backward == 2.5 * forward


def test_rows_are_selected_by_name_or_part():
    found = rows()
    names = lambda wanted: [row.name for row in select(found, wanted)]
    assert names("causal") == ["causal"]
    assert names("relative") == ["relative bias", "learned relative bias"]
    assert names("causal 512,dense") == ["dense", "causal 512"]
    assert names("") == [row.name for row in found]


def test_documents_fill_the_sequence():
    lengths = document_lengths(16, 16384)
    assert len(lengths) == 16 and sum(lengths) == 16384 and min(lengths) > 0


@pytest.mark.parametrize("layout", [BHSD, BSHD, PACKED], ids=["BHSD", "BSHD", "PACKED"])
def test_layouts_lead_back(layout):
    x = torch.randn(1, 2, 5, 3)
    assert torch.equal(layout.back(layout.to(x)), x)


def test_ratios_say_how_many_times_faster_ours_is():
    record = {"row": "a", "failed": {}, "error": {}}
    more = {**record, "tflops": {"flexmod": 90.0, "flexmod cpu": 100.0, "p": 50.0, "q": 40.0}}
    less = {**record, "us": {"flexmod": 20.0, "p": 50.0, "q": 40.0}}
    assert comparison(SUITES["forward"], more) == ("flexmod cpu", "p", 2.0)
    assert comparison(SUITES["latency"], less) == ("flexmod", "q", 2.0)
    assert comparison(SUITES["latency"], {**record, "us": {"flexmod": 1.0}}) is None


def test_slow_candidates_get_fewer_rounds_and_all_are_in_each(monkeypatch):
    order = []
    costs = {"slow": 1500.0, "fast": 1.0}
    calls = {name: (lambda name=name: order.append(name)) for name in costs}

    def once(call, device, repeats=1):
        call()
        return costs[order[-1]]

    monkeypatch.setattr(timing, "once", once)
    found = timing.interleaved(calls, 9, CPU, timing.Budget(None))
    assert found["slow"].rounds == 3 and found["fast"].rounds == 9
    assert found["fast"].median == 1.0 and found["fast"].spread == 0.0
    rounds = order[2:8]
    assert all({a, b} == {"slow", "fast"} for a, b in list(pairwise(rounds))[::2])


def test_workers_share_all_rows(monkeypatch):
    given = parse(*TINY, "--workers=2")
    setting = command.make_setting(given)
    line = workers._command(given, setting, "backward", ["dense", "softcap"])
    assert "--rows=dense,softcap" in line and "--rounds=0" in line and "--tokens=128" in line
    started, waited = [], []
    monkeypatch.setattr(workers, "_start", started.append)
    monkeypatch.setattr(workers, "_wait_for", lambda running, setting: waited.append(running))
    given.rows = setting.rows = "dense,alibi,softcap,512 x 1"
    with pytest.raises(ArgumentError, match="no row is called '512 x 1'"):
        workers.build(given, setting, [SUITES["forward"]])
    given.rows = setting.rows = ""
    workers.build(given, setting, [SUITES["small-backward"], SUITES["masks"]])
    assert len(waited) == 1 and len(started) == 2
    shared = [part for line in started for part in line if part.startswith("--rows=")]
    shared = ",".join(part.removeprefix("--rows=") for part in shared).split(",")
    assert sorted(shared) == sorted({row.name for row in small_rows(128)})
    assert all("--suite=small-backward" in line for line in started)


def test_workers_end_when_there_is_no_time_left():
    setting = command.make_setting(parse(*TINY, "--seconds=0"))
    endless = workers._start([sys.executable, "-c", "while True: pass"])
    workers._wait_for([endless], setting)
    assert endless.returncode not in (None, 0)


def test_masks_suite_measures_one_map():
    figures = masks.figures_of("flexmod", "causal", 512, "cpu")
    assert figures["ms"] > 0 and figures["mib"] >= 0


def test_a_map_that_cannot_be_built_ends_its_process():
    setting = command.make_setting(parse("--suite=masks", "--device=cpu", "--seconds=100"))
    with pytest.raises(RuntimeError, match="nothing"):
        masks.in_own_process("flexmod", "nothing", 64, setting)
    with pytest.raises(ZeroDivisionError):
        masks.peak(lambda: 1 // 0, "cpu")
    assert not [thread for thread in threading.enumerate() if "watch" in thread.name]


def test_masks_suite_has_every_row_at_both_lengths(monkeypatch):
    setting = command.make_setting(parse("--suite=masks", "--tokens=64", "--device=cpu"))
    names = list(masks.rows(128, "cpu"))
    figures = {"ms": 1.0, "mib": 0.5}

    def some(builder, row, length, _):
        if builder != "flexmod" and length > 64:
            raise RuntimeError("you tried to allocate 16 bytes\nat a place")
        return figures

    monkeypatch.setattr(masks, "figures", some)
    window, *records = masks.measure(setting)
    assert window["error"]["flexmod"] < 1e-5 and window["ms"]["flexmod"] > 0
    assert [r["row"] for r in records] == [f"{n} {t}" for t in (32768, 64) for n in names]
    assert all(r["ms"]["flexmod"] == 1.0 for r in records)
    if any("flex" in c.name for c in setting.candidates if not c.is_ours):
        assert all(set(r["ms"]) == set(masks.BUILDERS) for r in records if r["tokens"] == 64)
        assert records[0]["failed"] == {"torch eager": "you tried to allocate 16 bytes"}
    assert report.table(SUITES["masks"], [window, *records])


def test_a_wrong_window_is_no_figure(monkeypatch):
    from flexmod.bench import window

    setting = command.make_setting(parse("--suite=masks", "--tokens=64", "--device=cpu"))
    monkeypatch.setattr(window, "flex_attention", lambda q, k, v, block_mask: q * 0)
    record = window.measure(setting, 3000)
    assert not record["ms"] and "wrong" in record["failed"]["flexmod"]


def test_committed_results_can_be_read():
    folder = files.results_folder()
    assert folder is not None
    for path in folder.glob("*.json"):
        suite, found = files.read(path)
        assert len(report.table(suite, found["rows"]).splitlines()) > len(found["rows"])


def test_tuning_writes_the_fastest_tiles_with_where_they_were_measured(
    monkeypatch, tmp_path, capsys
):
    pytest.importorskip("triton")
    from flexmod.bench import tune
    from flexmod.kernels import fa2, tuned

    if isinstance(fa2.target(CPU), str):
        pytest.skip("needs Triton's interpreter")
    for name, values in (
        ("_QUERIES", (16,)),
        ("_KEYS", (16,)),
        ("_WARPS", (4,)),
        ("_STAGES", (1,)),
    ):
        monkeypatch.setattr(tune, name, values)
    rest = ["--rows=dense,softcap,relative bias", "--tokens=32", "--width=16", "--head-dim=16"]
    assert bench("--tune", "--suite=forward,backward", *rest, f"--out={tmp_path}") == 0
    shown = capsys.readouterr().out
    assert shown.endswith(f"kept in {tmp_path / 'interpreter.json'}\n")
    found = tuned.read(tmp_path / "interpreter.json")
    classes = [(row.kernel, row.mods) for row in found]
    assert classes == [
        ("backward", ""),
        ("backward", "gather"),
        ("forward", ""),
        ("forward", "gather"),
    ]
    for row in found:
        assert row.dim == 16 and row.itemsize == 4 and row.arch == "interpreter"
        assert dict(row.measured)["torch"] == torch.__version__
        assert f"{row.kernel:<9} {row.mods:<7} D16: {tune.Tiles(*row.tiles)}" in shown


def test_tiles_tried_begin_with_the_planned_ones_and_fit():
    from flexmod.bench import tune
    from flexmod.kernels import tuning

    _, problem = tune._problem(small_case(rows(128)[1]))
    target = tuning.Target("sm_90", 227 << 10)
    tried = tune.candidates(problem, "forward", target)
    assert tried[0] == tuning.plan(problem, target, "forward")
    assert len(set(tried)) == len(tried) == tune._MOST
    assert tried[1] in [tried[0]._replace(stages=n) for n in (2, 4)] + [
        tried[0]._replace(**{name: size})
        for name in ("q", "kv", "warps")
        for size in (8, 32, 64, 128)
    ]
    assert all(tune._fits(tiles, problem, "forward", target) for tiles in tried)


def test_reasons_are_one_line_without_folders():
    first = RuntimeError("no such shape\nmore")
    assert attention.reason(first) == "RuntimeError: no such shape"
    named = ValueError("a\nTypeError: in '/opt/some/lib/module.py' 3/4 of it\nb")
    assert attention.reason(named) == "TypeError: in 'module.py' 3/4 of it"
    assert attention.reason(ValueError()) == "ValueError: "
