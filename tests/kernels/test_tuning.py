"""Tiles are always found where any can fit, and rows are data that can be read and written."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from itertools import product

import pytest
import torch

from flexmod import mods, trace
from flexmod.errors import BackendError
from flexmod.kernels import choose, fa2, tuned, tuning
from flexmod.kernels.memory import Work, shared_bytes
from flexmod.kernels.problem import Problem
from flexmod.kernels.tuning import Target, Tiles

KERNELS = ("forward", "backward_query", "backward_key")
# (KiB, bytes an element, backward): head dimensions of which not even 16 rows and keys fit.
TOO_LARGE = {
    (48, 2, True): (512,),  # no GPU from sm_80 on has as little as 48
    (48, 4, False): (256, 512),
    (48, 4, True): (128, 256, 512),
    (48, 8, False): (256, 512),
    (48, 8, True): (128, 256, 512),
    (64, 8, False): (512,),
    (64, 8, True): (512,),
    (99, 4, True): (512,),
    (99, 8, False): (512,),
    (99, 8, True): (256, 512),
    (163, 4, True): (512,),
    (163, 8, True): (512,),
    (227, 8, True): (512,),
}
SCORES = {
    "none": None,
    "gather": mods.relative_bias(torch.zeros(2, 2 * 1024 - 1)),
    "long": lambda score, b, h, q_idx, kv_idx: score + (q_idx - kv_idx) // 7 % 3 * score.expm1(),
}
DIMS = (32, 64, 96, 128, 192, 256, 512)
TARGETS = (
    Target("sm_80", 48 << 10),
    Target("gfx942", 64 << 10),
    Target("sm_86", 99 << 10),
    Target("sm_80", 163 << 10),
    Target("sm_90", 227 << 10),
    Target("sm_100", 227 << 10),
)


def problem_of(dtype=torch.bfloat16, head_dim=64, mod="none", **others):
    score = trace(SCORES[mod], "score") if SCORES[mod] else None
    sizes = {"batch": 1, "heads": 2, "kv_heads": 2, "q_len": 1024, "kv_len": 1024}
    return Problem(
        **sizes, head_dim=head_dim, value_dim=head_dim, dtype=dtype, scale=1.0,
        device=torch.device("cpu"), score=score, **others,
    )  # fmt: skip


def test_problems_are_of_the_class_of_their_mods():
    assert [tuning.mods_class(problem_of(mod=mod)) for mod in SCORES] == ["", "gather", "long"]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mod", SCORES)
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: f"{t.arch}-{t.shared >> 10}KiB")
def test_tiles_that_fit_are_always_found(target, mod, kernel):
    for dtype, dim in product((torch.bfloat16, torch.float32, torch.float64), DIMS):
        problem = problem_of(dtype, dim, mod)
        tiles = tuning.plan(problem, target, kernel)
        work = tuning.work_of(problem, target, kernel)
        key = (target.shared >> 10, dtype.itemsize, kernel != "forward")
        if tuning.padded(dim) in TOO_LARGE.get(key, ()):
            assert tiles is None and shared_bytes(work, 16, 16, 1) > target.shared
            continue
        assert shared_bytes(work, tiles.q, tiles.kv, tiles.stages) <= target.shared
        assert min(tiles.q, tiles.kv) >= 16 and tiles.stages >= 1


def test_more_of_anything_takes_more_memory():
    for kernel, arch in product(KERNELS, ("sm_80", "sm_90", "sm_100", "gfx942")):
        work = Work(kernel, arch, (64, 64), 2)
        small = shared_bytes(work, 64, 32, 1)
        assert small < shared_bytes(work, 128, 32, 1)
        assert small < shared_bytes(work, 64, 64, 1)
        assert small < shared_bytes(work, 64, 32, 3)
        assert small < shared_bytes(work._replace(dims=(128, 64)), 64, 32, 1)
        assert small <= shared_bytes(work._replace(gathers=True, captures=3), 64, 32, 1)


def test_the_most_special_row_is_taken(monkeypatch):
    rows = [
        tuned.Row("forward", 8, 512, (16, 16, 4, 1)),
        tuned.Row("forward", 2, 128, (32, 16, 4, 1)),
        tuned.Row("forward", 2, 64, (64, 16, 4, 1)),
        tuned.Row("forward", 2, 64, (64, 32, 4, 1), mods="gather"),
        tuned.Row("forward", 2, 128, (128, 64, 4, 1), arch="sm_90"),
        tuned.Row("backward", 2, 128, (32, 64, 4, 1)),
        tuned.Row("backward_key", 2, 128, (32, 128, 4, 1)),
    ]
    monkeypatch.setattr(tuned, "rows", lambda: tuple(rows))
    find = lambda *given: tuned.find(*given).tiles[:2]
    assert find("forward", "", "sm_80", 2, 64) == (64, 16)
    assert find("forward", "gather", "sm_80", 2, 64) == (64, 32)
    assert find("forward", "long", "sm_80", 2, 64) == (64, 16)
    assert find("forward", "", "sm_80", 2, 128) == (32, 16)
    assert find("forward", "", "sm_80", 4, 128) == (16, 16)
    assert find("forward", "gather", "sm_90", 2, 64) == (128, 64)
    assert find("backward_query", "", "sm_90", 2, 64) == (32, 64)
    assert find("backward_key", "", "sm_90", 2, 64) == (32, 128)
    assert tuned.find("forward", "", "sm_90", 2, 1024) is None
    assert tuned.largest_dim("sm_90", 2) == 512 and tuned.largest_dim("sm_90", 4) == 512


def test_files_hold_one_row_a_key_and_say_where_it_was_measured():
    rows = tuned.rows()
    assert len({row.key for row in rows}) == len(rows) > 20
    for row in rows:
        q, kv, warps, stages = row.tiles
        assert {n & (n - 1) for n in (q, kv, warps)} == {0} and min(q, kv) >= 16 and stages >= 1
        assert {name for name, _ in row.measured} in (
            set(), {"device", "torch", "triton", "date"}
        )  # fmt: skip
    assert any(row.arch == "sm_90" and row.measured for row in rows)


def test_rows_are_written_in_place_of_their_like(tmp_path):
    first = tuned.Row("forward", 2, 64, (64, 32, 4, 2), "gather", "sm_90")
    second = replace(first, tiles=(128, 64, 8, 3), measured=(("device", "a GPU"),))
    other = tuned.Row("backward", 2, 64, (64, 64, 4, 2))
    assert tuned.write(tmp_path, [first]) == [tmp_path / "sm_90.json"]
    paths = tuned.write(tmp_path, [second, other])
    assert paths == [tmp_path / "any.json", tmp_path / "sm_90.json"]
    assert tuned.read(paths[1]) == [second] and tuned.read(paths[0]) == [other]
    assert len(json.loads(paths[1].read_text())) == 1
    assert tuned.write(tmp_path, [first, first])  # reading what was written, again


def test_hints_steer_the_direction_they_name():
    options = {"BLOCK_M": 32, "bwd_BLOCK_M": 16, "fwd_num_warps": 2, "num_stages": 1}
    problem = problem_of(options=options)
    forward = tuning.plan(problem, TARGETS[-2], "forward")
    backward = tuning.plan(problem, TARGETS[-2], "backward_key")
    assert (forward.q, forward.warps, forward.stages) == (32, 2, 1)
    assert (backward.q, backward.warps, backward.stages) == (16, 4, 1)


def test_refused_tiles_are_not_planned_again(monkeypatch):
    monkeypatch.setattr(tuning, "_refused", {})
    problem, target = problem_of(), TARGETS[-2]
    work = tuning.work_of(problem, target, "forward")
    seen = []
    while (tiles := tuning.plan(problem, target, "forward")) is not None:
        assert tiles not in seen
        seen.append(tiles)
        # A map's blocks may have cut the tiles down before they were launched.
        tuning.refuse(work, tiles._replace(kv=min(tiles.kv, 32)))
    assert seen[0] == Tiles(128, 64, 4, 3) and len(seen) > 3
    assert tuning.plan(problem, target, "backward_key") is not None
    tuning._plan.cache_clear()


def test_what_no_engine_of_a_gpu_serves_warns_once(monkeypatch, caplog):
    monkeypatch.setattr(choose, "_warned", set())
    monkeypatch.setattr(choose, "BACKENDS", ("fa2", "cpu", "reference"))
    small = Target("sm_86", 24 << 10)
    on_gpu = replace(problem_of(head_dim=512), device=torch.device("cuda"))
    expected = (
        "fa2 refuses: no tile of head_dim 512 and 512 in torch.bfloat16 fits into the 24 KiB of "
        "shared memory of sm_86; using the slower cpu engine instead"
    )
    with caplog.at_level(logging.WARNING, "flexmod"):
        monkeypatch.setattr(fa2, "target", lambda device: small)
        assert choose.choose(on_gpu).name == "cpu"
        assert choose.choose(on_gpu).name == "cpu"
        assert [record.getMessage() for record in caplog.records] == [expected]
        monkeypatch.setattr(fa2, "target", lambda device: TARGETS[-2])
        assert choose.choose(replace(on_gpu, head_dim=600)).name == "cpu"
        assert "head_dim 600 is above 512" in caplog.records[1].getMessage()
        assert choose.choose(on_gpu).name == "fa2" and len(caplog.records) == 2
        old = "it needs compute capability 8.0, this GPU has 7.5"
        monkeypatch.setattr(fa2, "target", lambda device: old)
        assert choose.choose(on_gpu).name == "cpu"
        assert caplog.records.pop().getMessage().startswith(f"fa2 refuses: {old}; using")
        assert choose.choose(problem_of()).name == "cpu" and len(caplog.records) == 2
    with pytest.raises(BackendError, match=r"'fa2' cannot serve this call: .* has 7\.5"):
        choose.choose(on_gpu, "fa2")
