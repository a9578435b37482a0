"""Dropout that is a function of positions, and gradients in one fixed order."""

from __future__ import annotations

import importlib

import pytest
import torch

import flexmod
from flexmod import masks, mods
from flexmod.kernels import dropout
from flexmod.kernels.problem import Problem

SIZE, HEADS, BATCH = 64, 2, 2


def indices(batch=BATCH, heads=HEADS, size=SIZE):
    names = ("b", "h", "q_idx", "kv_idx")
    lengths = (batch, heads, size, size)
    return {
        name: torch.arange(n).view([-1] + [1] * (3 - axis))
        for axis, (name, n) in enumerate(zip(names, lengths, strict=True))
    }


def kept(seed, p=0.5, **shape):
    return dropout.keep(seed, p, indices(**shape))


def forward_and_backward_masks(backend, seed, p=0.5, size=SIZE, **options):
    """What the forward kept, and what the backward kept: both [b, h, size, size] bool.

    Equal scores and one-hot values show the weights in out; one-hot d_out shows them in d_value.
    """
    query = torch.zeros(BATCH, HEADS, size, 4)
    value = torch.eye(size).expand(BATCH, HEADS, -1, -1).clone().requires_grad_()
    out = flexmod.flex_attention(
        query, query, value, dropout_p=p, dropout_seed=seed, backend=backend,
        kernel_options=options or None,
    )  # fmt: skip
    weight = 1 / (size * (1 - p))
    torch.testing.assert_close(out.detach(), (out.detach() > 0) * weight)
    (d_value,) = torch.autograd.grad(out, value, torch.eye(size).expand_as(out))
    torch.testing.assert_close(d_value, out.detach().mT)
    return out.detach() > 0, d_value.mT > 0


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_mask_is_a_function_of_seed_and_position(backend, p):
    forward, backward = forward_and_backward_masks(backend, 17, p)
    assert torch.equal(forward, kept(17, p))
    assert torch.equal(backward, forward)


@pytest.mark.parametrize("tile", [16, 32])
def test_tiles_of_the_kernel_do_not_matter(tile):
    seed = 2**45 + 17
    forward, backward = forward_and_backward_masks("fa2", seed, size=32, BLOCK_M=tile, BLOCK_N=tile)
    assert torch.equal(forward, kept(seed, size=32))
    assert torch.equal(backward, forward)


@pytest.mark.parametrize("block", [16, 128])
def test_blocks_of_a_map_do_not_matter(block):
    query, key, value = (torch.randn(1, HEADS, 200, 4) for _ in range(3))
    mask = flexmod.create_block_mask(masks.causal(), None, None, 200, 200, BLOCK_SIZE=block)
    run = lambda backend: flexmod.flex_attention(
        query, key, value, block_mask=mask, dropout_p=0.3, dropout_seed=1, backend=backend
    )
    torch.testing.assert_close(run("cpu"), run("reference"))


def test_seeds_batches_and_heads_have_masks_of_their_own():
    whole = kept(3)
    planes = [whole[b, h] for b in range(BATCH) for h in range(HEADS)]
    planes += [kept(seed, batch=1, heads=1)[0, 0] for seed in (4, 3 + 2**32, -1)]
    for n, one in enumerate(planes):
        assert 0.45 < one.float().mean() < 0.55
        for other in planes[:n]:
            # Two independent masks agree on half: 4096 positions, 5 sigma.
            assert abs((one == other).float().mean() - 0.5) < 5 * 0.5 / SIZE


@pytest.mark.parametrize(("down", "right"), [(0, 1), (1, 0), (1, 1), (1, -1), (0, 2), (16, 0)])
def test_neighbours_are_independent(down, right):
    mask = kept(5, batch=8, heads=8)
    agree = (mask == mask.roll((down, right), (2, 3))).float().mean()
    assert abs(agree - 0.5) < 5 * 0.5 / mask.numel() ** 0.5


def test_extreme_probabilities():
    assert kept(0, 0.0).all()
    assert kept(0, 1e-12).all()
    assert kept(0, 1 - 1e-12).sum() == 0


def test_torchs_generator_gives_the_seed():
    query = torch.randn(1, 1, 16, 4)
    run = lambda **a: flexmod.flex_attention(query, query, query, dropout_p=0.5, **a)
    torch.manual_seed(1)
    first, second = run(), run()
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(run(), first) and torch.equal(run(), second)
    state = torch.get_rng_state()
    assert torch.equal(run(dropout_seed=3), run(dropout_seed=3))
    flexmod.flex_attention(query, query, query)
    assert torch.equal(torch.get_rng_state(), state)  # drawn only where it is used


TABLES = {
    "relative": (mods.relative_bias, (8, 31)),
    "element": (lambda t: lambda s, b, h, i, j: s + t[(i * j) % 61], (61,)),
    "scalar": (lambda t: lambda s, b, h, i, j: s * t, ()),
    "full": (lambda t: lambda s, b, h, i, j: s + t[b, h, i, j], (2, 8, 200, 200)),
}


@pytest.mark.parametrize("name", TABLES)
def test_cpu_gradients_are_equal_from_run_to_run(name):
    make, shape = TABLES[name]
    given = [torch.randn(2, 8, 200, 8), *(torch.randn(2, 2, 200, 8) for _ in range(2))]
    given = [x.requires_grad_() for x in (*given, torch.randn(shape))]

    def grads():
        out = flexmod.flex_attention(
            *given[:3], make(given[3]), masks.causal(), enable_gqa=True, deterministic=True
        )
        return torch.autograd.grad(out.square().sum(), given)

    first = grads()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(grads(), first, strict=True))


@pytest.mark.parametrize("name", ["relative", "element"])
def test_kernels_add_in_a_fixed_order_if_asked(monkeypatch, name):
    """With deterministic=True no kernel that adds atomically is launched."""
    from flexmod.kernels.fa2 import sums

    backward = importlib.import_module("flexmod.kernels.fa2.backward")
    plans = []
    plain = backward.Backward
    monkeypatch.setattr(backward, "Backward", lambda *a: (plans.append(a[3]), plain(*a))[1])
    make, shape = TABLES[name]
    given = [torch.randn(1, 2, 20, 4), *(torch.randn(1, 1, 20, 4) for _ in range(2))]
    given = [x.requires_grad_() for x in (*given, torch.randn(shape))]

    def grads(deterministic):
        out = flexmod.flex_attention(
            *given[:3], make(given[3]), masks.causal(), enable_gqa=True, backend="fa2",
            deterministic=deterministic,
        )  # fmt: skip
        return torch.autograd.grad(out.square().sum(), given)

    free, fixed = grads(False), grads(True)
    assert [plan.uses_atomics for plan in plans] == [True, False]
    assert plans[1] == sums.NOTHING
    for a, b in zip(free, fixed, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(grads(True), fixed, strict=True))


@pytest.mark.parametrize("setting", [True, False])
def test_torchs_setting_is_the_default(monkeypatch, setting):
    from flexmod import attention

    seen: list[Problem] = []
    plain = attention.attend

    def spy(problem, *rest):
        seen.append(problem)
        return plain(problem, *rest)

    monkeypatch.setattr(attention, "attend", spy)
    query = torch.randn(1, 1, 8, 4)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(setting)
        flexmod.flex_attention(query, query, query)
        flexmod.flex_attention(query, query, query, deterministic=not setting)
    finally:
        torch.use_deterministic_algorithms(before)
    assert [p.deterministic for p in seen] == [setting, not setting]


# What is wrong with a call -> its arguments, and what the error says.
BAD = {
    "dropout of 1": ({"dropout_p": 1.0}, r"dropout_p must be in \[0, 1\), not 1\.0"),
    "negative dropout": ({"dropout_p": -0.1}, r"dropout_p must be in \[0, 1\), not -0\.1"),
    "dropout NaN": ({"dropout_p": float("nan")}, r"dropout_p must be in \[0, 1\)"),
    "dropout None": ({"dropout_p": None}, r"dropout_p must be in \[0, 1\), not None"),
    "dropout True": ({"dropout_p": True}, r"dropout_p must be in \[0, 1\), not True"),
    "seed of a wrong type": (
        {"dropout_p": 0.5, "dropout_seed": 1.5}, r"dropout_seed must be an int",
    ),
    "sink of kv heads": ({"sink": torch.zeros(1)}, r"sink must have shape \[2\] \(query heads\)"),
    "sink a number": ({"sink": 0.5}, r"sink must have shape \[2\] \(query heads\), not float"),
    "sink of integers": ({"sink": torch.zeros(2, dtype=torch.long)}, "floating-point tensor"),
    "sink with an axis more": ({"sink": torch.zeros(1, 2)}, r"not \[1, 2\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name):
    arguments, message = BAD[name]
    query, key = torch.randn(1, 2, 4, 4), torch.randn(1, 1, 4, 4)
    with pytest.raises(flexmod.errors.ArgumentError, match=message):
        flexmod.flex_attention(query, key, key, enable_gqa=True, **arguments)


def test_sink_on_another_device_is_named():
    query = torch.randn(1, 2, 4, 4)
    with pytest.raises(flexmod.errors.DeviceError, match="sink is on meta, but query is on cpu"):
        flexmod.flex_attention(query, query, query, sink=torch.zeros(2, device="meta"))


@pytest.mark.parametrize("as_map", [False, True])
def test_a_mask_that_would_need_a_gradient_is_refused(as_map):
    query = torch.randn(1, 2, 4, 4, requires_grad=True)
    limit = torch.full((2,), 2.0, requires_grad=True)
    mask = lambda b, h, i, j: j < limit[h]

    def run():
        given = flexmod.create_block_mask(mask, None, 2, 4, 4) if as_map else mask
        return flexmod.flex_attention(query, query, query, block_mask=given)

    with pytest.raises(flexmod.errors.ArgumentError, match=r"use tensor\.detach\(\) in the mask"):
        run()
    with torch.no_grad():
        run()
    limit = limit.detach()
    run().sum().backward()


def test_mixed_dtypes_are_refused_before_any_backward():
    query = torch.randn(1, 2, 4, 4, requires_grad=True)
    with pytest.raises(flexmod.errors.ArgumentError, match="must have one dtype"):
        flexmod.flex_attention(query, query.half(), query.half())


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_sink_of_another_dtype_gets_its_gradient_in_that_dtype(backend):
    query = torch.randn(1, 2, 4, 4)
    sink = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    flexmod.flex_attention(query, query, query, sink=sink, backend=backend).sum().backward()
    assert sink.grad.dtype == torch.bfloat16 and sink.grad.any()
