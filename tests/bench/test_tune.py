"""`python -m flexmod bench --tune`."""

from __future__ import annotations

import pytest
import torch

from flexmod.bench.rows import rows

CPU = torch.device("cpu")


def test_tuning_writes_the_fastest_tiles_with_where_they_were_measured(
    bench, monkeypatch, tmp_path, capsys
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


def test_tiles_tried_begin_with_the_planned_ones_and_fit(small_case):
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
