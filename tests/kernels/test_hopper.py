"""The hopper engine: what it serves, how it cuts a problem, and, on a GPU, what it computes."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

import flexmod
from flexmod import masks, mods
from flexmod.attention import make_problem
from flexmod.kernels import hopper
from flexmod.kernels.fa2.target import target
from flexmod.kernels.hopper import tiles
from flexmod.kernels.hopper.backward import Backward
from flexmod.kernels.problem import Inputs, Saved
from flexmod.kernels.tuning import Target

pytest.importorskip("triton")
TARGET = Target("sm_90", 227 << 10)
CUDA = torch.device("cuda")


def problem_of(q_len=256, kv_len=256, heads=4, kv_heads=2, dim=64, batch=2, kv_batch=2, mask=None):
    query = torch.zeros(batch, heads, q_len, dim, dtype=torch.bfloat16)
    key, value = (torch.zeros(kv_batch, kv_heads, kv_len, dim, dtype=torch.bfloat16) for _ in "kv")
    inputs = Inputs(query, key, value)
    return make_problem(inputs, None, mask), inputs


LIMITS = [
    ({}, None),
    ({"dtype": torch.float32}, "float32"),
    ({"head_dim": 256, "value_dim": 192}, None),
    ({"head_dim": 24}, "head dimensions"),
    ({"value_dim": 264}, "head dimensions"),
    ({"value_dim": 136}, "wider than keys"),
    ({"head_dim": 100}, "head dimensions"),
    ({"q_len": 1}, "queries"),
    ({"kv_len": 1 << 29}, "queries"),
    ({"dropout_p": 0.1}, "dropout"),
    ({"scale": 0.0}, "scale"),
    ({"scale": 1e-46}, "scale"),
    ({"scale": -1.0}, "scale"),
    ({"scale": float("nan")}, "scale"),
]


@pytest.mark.parametrize(("change", "reason"), LIMITS)
def test_it_says_what_it_does_not_serve(change, reason):
    problem, _ = problem_of()
    found = hopper.limits(replace(problem, **change))
    assert found is None if reason is None else reason in found


def test_maps_of_small_blocks_are_not_served():
    mask = flexmod.create_block_mask(masks.causal(), None, None, 256, 256, BLOCK_SIZE=64)
    assert "128" in hopper.limits(problem_of(mask=mask)[0])


def test_other_devices_are_refused_with_a_reason():
    problem, _ = problem_of()
    assert hopper.refuses(problem)
    with pytest.raises(flexmod.errors.BackendError, match="hopper"):
        flexmod.flex_attention(*problem_of()[1], enable_gqa=True, backend="hopper")


COPIES = [
    (torch.zeros(2, 4, 8, 64), True),
    (torch.zeros(2, 8, 4, 64).transpose(1, 2), True),
    (torch.zeros(2, 4, 8, 65)[..., 1:], False),  # rows begin between multiples of 16 bytes
    (torch.zeros(2, 4, 64, 8).transpose(2, 3), False),
    (torch.zeros(2, 1, 8, 64).expand(2, 4, 8, 64), False),
]


@pytest.mark.parametrize(("x", "expected"), COPIES)
def test_what_the_copy_engine_can_read(x, expected):
    assert tiles.can_be_copied(x.to(torch.bfloat16) if expected else x) is expected


@pytest.mark.parametrize("kv_batch", [1, 2])
@pytest.mark.parametrize("kv_len", [256, 128 * 1000])
def test_the_passes_of_a_backward_serve_every_head_once(kv_batch, kv_len):
    problem, inputs = problem_of(kv_len=kv_len, kv_batch=kv_batch)
    lse = torch.zeros(2, 4, 256)
    back = Backward(problem, inputs, Saved(inputs.query, lse, inputs.query, None), TARGET)
    kernel = back.passes[0].over_keys.kernel
    names = [p.name for p in kernel.params if not p.is_constexpr]
    place = names.index("first_plane") - (len(names) - len(back.passes[0].over_keys.fixed))
    served = []
    for launch in back.passes:
        first, planes = launch.over_keys.fixed[place : place + 2]
        served += range(first, first + planes)
        assert planes * problem.q_len * problem.head_dim <= back.new_totals().numel()
    assert served == list(range(problem.batch * problem.heads))
    assert len(back.passes) == (2 if kv_len > 256 and kv_batch == 2 else 1)


@pytest.mark.parametrize(
    ("lengths", "even"), [((256, 384), True), ((192, 256), False), ((256, 320), False)]
)
def test_no_tile_sticks_out_of_even_lengths(lengths, even):
    assert tiles.is_even(problem_of(*lengths)[0]) is even


@pytest.mark.parametrize("dim", [32, 128, 192, 256])
def test_wide_heads_have_the_gradients_of_fa2(dim, monkeypatch):
    module = importlib.import_module("flexmod.kernels.hopper.backward")  # beside a function
    monkeypatch.setattr(module, "target", lambda device: TARGET)
    monkeypatch.setattr("flexmod.kernels.fa2.prepare_backward", lambda *_: None)
    problem, inputs = problem_of(dim=dim)
    saved = Saved(inputs.query, torch.zeros(2, 4, 256), inputs.query, None)
    assert isinstance(hopper.prepare_backward(problem, inputs, saved), Backward) == (dim <= 128)


def cut_of(mask_mod, length, dim=64, score_mod=None):
    query, key, value = torch.zeros(3, 1, 1, length, dim, dtype=torch.bfloat16)
    score = flexmod.trace(score_mod, "score") if score_mod else None
    return tiles.forward(make_problem(Inputs(query, key, value), score, mask_mod))


def test_long_rows_without_a_score_mod_have_three_consumers():
    ids = torch.zeros(16384, dtype=torch.int32)
    assert cut_of(masks.causal(), 16384).consumers == 3
    assert cut_of(masks.prefix_lm(1024), 16384, 48).consumers == 3
    assert cut_of(masks.causal(), 4096).consumers == 2
    assert cut_of(masks.sliding_window(1024), 16384).consumers == 2
    assert cut_of(masks.document(ids), 16384).consumers == 2
    assert cut_of(masks.causal(), 16384, 128).consumers == 2
    assert cut_of(masks.causal(), 16384, 64, mods.softcap(20.0)).consumers == 2


def is_hopper():
    found = target(CUDA) if torch.cuda.is_available() else ""
    return isinstance(found, Target) and found.arch == "sm_90"


def variants(length, heads):
    ids = torch.arange(length, device=CUDA) * 4 // length
    table = torch.randn(heads, 2 * length - 1, device=CUDA)
    bias, flags = table[:, :length], torch.arange(length, device=CUDA) % 5 > 0
    pairs = torch.randn(4, 4, device=CUDA)
    return {
        "plain": (None, None),
        "causal": (None, masks.causal()),
        "window": (None, masks.sliding_window(100)),
        "documents": (None, masks.and_masks(masks.causal(), masks.document(ids))),
        "blind rows": (None, lambda b, h, q_idx, kv_idx: (q_idx > 99) & (kv_idx < 77)),
        "alibi": (mods.alibi(heads, device=CUDA), masks.causal()),
        "softcap": (mods.softcap(20.0), masks.causal()),
        "relative bias": (mods.relative_bias(table), masks.causal()),
        "bias of keys and queries": (
            lambda s, b, h, q, kv: s + bias[h, kv] * bias[h, q] + pairs[ids[q], ids[kv]], None,
        ),
        "conditions": (
            None,
            lambda b, h, q, kv: (ids[q] == ids[kv]) & flags[kv] & (q // 16 >= kv // 16) & flags[q],
        ),
        "by head": (None, lambda b, h, q, kv: flags[h]),
        "joined": (
            None, lambda b, h, q, kv: ((h < 1) | (q >= kv)) & ((kv < 250) | (b == 0)) & (q != 9),
        ),
    }  # fmt: skip


SHAPES = [  # (batch, kv_batch, heads, kv_heads, q_len, kv_len, head_dim)
    (2, 2, 4, 2, 333, 517, 64),
    (2, 1, 2, 2, 300, 200, 96),
    (1, 1, 8, 4, 3000, 3000, 128),
    (1, 1, 4, 2, 512, 768, 128),  # no tile sticks out
    (1, 1, 2, 2, 192, 256, 64),  # half a tile of queries does
    (1, 1, 4, 2, 300, 500, 32),
]
WIDE = [(1, 1, 4, 2, 333, 517, 192), (1, 1, 2, 1, 512, 768, 256)]
WIDTHS = [(192, 128), (256, 192), (160, 136), (128, 64), (64, 128), (40, 32)]  # of keys, of values


def learned(length, heads):
    """How a mod is made, and the shapes of what it learns."""
    table = (heads, 2 * length - 1)
    return {
        "relative bias": (lambda t: mods.relative_bias(t), [table]),
        "head scale": (lambda t: lambda s, b, h, i, j: s * t[h], [(heads,)]),
        "column": (lambda t: lambda s, b, h, i, j: s + t[h, j], [(heads, length)]),
        "softcap": (lambda t: flexmod.compose(mods.relative_bias(t), mods.softcap(9.0)), [table]),
        "all": (
            lambda t, u, v: lambda s, b, h, i, j: s * t[b] + u[h, j - i] + v[i - j] * t[b],
            [(2,), table, (2 * length,)],
        ),
    }  # fmt: skip


@pytest.mark.skipif(not is_hopper(), reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES + WIDE, ids=str)
@pytest.mark.parametrize("name", variants(8, 2) if is_hopper() else ["any"])
def test_it_computes_what_the_reference_does(name, shape, dtype):
    score_mod, mask_mod = variants(max(shape[4:6]), shape[2])[name]
    _compare(shape, dtype, lambda: score_mod, mask_mod, [])


@pytest.mark.skipif(not is_hopper(), reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[-1] <= 64], ids=str)
@pytest.mark.parametrize("name", ["causal", "window", "blind rows"])
def test_three_consumers(name, shape, monkeypatch):
    monkeypatch.setattr(tiles, "_LONG", 0)
    _compare(shape, torch.bfloat16, lambda: None, variants(shape[4], shape[2])[name][1], [])


@pytest.mark.skipif(not is_hopper(), reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_values_of_another_width(widths):
    shape = (1, 1, 24, 12, 1100, 1300, widths[0])  # more tiles than multiprocessors
    _compare(shape, torch.bfloat16, lambda: mods.softcap(20.0), masks.causal(), [], widths[1])


READS_NO_SCORE = {
    "keys": lambda s, b, h, q, kv: (kv + 1).rsqrt(),
    "queries": lambda s, b, h, q, kv: (q + 1).rsqrt(),
    "heads": lambda s, b, h, q, kv: h / 2,
}


@pytest.mark.skipif(not is_hopper(), reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("name", READS_NO_SCORE)
def test_a_mod_that_reads_no_score(name):
    inputs = torch.randn(3, 1, 2, 300, 64, device=CUDA)
    found, exact = (
        flexmod.flex_attention(*inputs.to(dtype), READS_NO_SCORE[name], masks.causal(), backend=b)
        for b, dtype in (("hopper", torch.float16), ("reference", torch.float64))
    )
    assert (found.double() - exact).norm() <= 1e-3 * exact.norm()


@pytest.mark.skipif(not is_hopper(), reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("dim", [64, 128, 192])
def test_blocks_that_nothing_sees_may_hold_nan(dim):
    mask_mod = lambda b, h, q, kv: (q >= 256) & (kv >= 128)
    query, key, value = torch.randn(3, 1, 2, 600, dim, device=CUDA, dtype=torch.bfloat16)
    clean = flexmod.flex_attention(query, key, value, None, mask_mod, backend="hopper")
    for x in (key, value):
        x[:, :, :128] = torch.nan
    out = flexmod.flex_attention(query, key, value, None, mask_mod, backend="hopper")
    assert torch.equal(out, clean)
    assert not out[:, :, :256].any()
    assert out[:, :, 256:].any()


@pytest.mark.skipif(not is_hopper(), reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("mask", ["plain", "causal", "window", "blind rows"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", learned(8, 2))
def test_gradients_of_captured_tensors(name, shape, mask, monkeypatch):
    monkeypatch.setattr("flexmod.kernels.fa2.prepare_backward", None)  # all by its own kernels
    length, heads = max(shape[4:6]), shape[2]
    make, shapes = learned(length, heads)[name]
    mask_mod = variants(length, heads)[mask][1]
    _compare(shape, torch.bfloat16, make, mask_mod, [torch.randn(s, device=CUDA) for s in shapes])


def _compare(shape, dtype, make, mask_mod, tables, value_dim=None):
    batch, kv_batch, heads, kv_heads, q_len, kv_len, dim = shape
    width = value_dim or dim
    generator = torch.Generator(CUDA).manual_seed(0)
    draw = lambda *size: torch.randn(size, generator=generator, device=CUDA).to(dtype)
    query = draw(batch, q_len, heads, dim).transpose(1, 2)
    key, value = (draw(kv_batch, kv_heads, kv_len, n) for n in (dim, width))
    d_out = draw(batch, heads, q_len, width)
    found, exact = (
        _run(backend, to, [query, key, value, d_out], make, mask_mod, tables)
        for backend, to in (("hopper", dtype), ("reference", torch.float64))
    )
    tolerance = 4e-3 if dtype == torch.bfloat16 else 5e-4
    for mine, its in zip(found, exact, strict=True):
        assert (mine.double() - its).norm() <= tolerance * its.norm()


def _run(backend, dtype, tensors, make, mask_mod, tables):
    *inputs, d_out = (x.detach().to(dtype) for x in tensors)
    inputs += [x.to(torch.promote_types(dtype, torch.float32)) for x in tables]
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out, lse = flexmod.flex_attention(
        *inputs[:3], make(*inputs[3:]), mask_mod, enable_gqa=True, return_lse=True, backend=backend
    )
    seen = torch.where(lse == -torch.inf, 0.0, lse)
    return [out, seen, *torch.autograd.grad([out, seen], inputs, [d_out, torch.ones_like(seen)])]
