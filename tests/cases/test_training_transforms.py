"""Fixed orders, torch.func and dropout: the cases by number."""

from __future__ import annotations

import pytest
import torch

import flexmod
from flexmod import masks, mods
from flexmod.kernels import dropout


@pytest.mark.parametrize(("backend", "runs"), [("cpu", 20), ("fa2", 2)])
def test_P091_twenty_runs_are_bitwise_equal(lanes, backend, runs):
    lane = lanes(backend, torch.float32)
    size, heads = (200, (8, 2)) if lane.device.type == "cuda" or backend == "cpu" else (20, (2, 1))
    given = [
        lane.randn(2, heads[0], size, 32), lane.randn(2, heads[1], size, 32),
        lane.randn(2, heads[1], size, 32), lane.randn(heads[0], 2 * size - 1),
    ]  # fmt: skip
    given = [x.requires_grad_() for x in given]

    def grads():
        out = flexmod.flex_attention(
            *given[:3], mods.relative_bias(given[3]), masks.causal(), enable_gqa=True,
            deterministic=True, backend=backend,
        )  # fmt: skip
        return torch.autograd.grad(out.square().sum(), given)

    first = grads()
    assert all(grad.any() for grad in first)
    for _ in range(runs - 1):
        assert all(torch.equal(a, b) for a, b in zip(grads(), first, strict=True))


@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (1, 2, 5, 8)], ids=str)
def test_P092_func_grad(engine, shape):
    given = engine.qkv(shape)
    loss = lambda *qkv: flexmod.flex_attention(
        *qkv, None, masks.causal(), backend=engine.backend
    ).sum()
    found = torch.func.grad(loss, argnums=(0, 1, 2))(*given)
    leaves = [x.clone().requires_grad_() for x in given]
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    if shape[2] == 1:
        torch.testing.assert_close(found[0], torch.zeros_like(found[0]), rtol=0, atol=1e-6)
        torch.testing.assert_close(found[1], torch.zeros_like(found[1]), rtol=0, atol=1e-6)
        torch.testing.assert_close(found[2], torch.ones_like(found[2]))


def test_P094_vmap_over_everything(engine):
    many = [engine.randn(3, 1, 2, 6, 8) for _ in range(3)] + [engine.randn(3, 2)]

    def call(q, k, v, bias):
        mod = lambda s, b, h, i, j: s * bias[h] + bias[h]
        return flexmod.flex_attention(q, k, v, mod, backend=engine.backend)

    loop = torch.stack([call(*(x[n] for x in many)) for n in range(3)])
    torch.testing.assert_close(torch.vmap(call)(*many), loop)


@pytest.mark.parametrize("tile", [16, 32])
@pytest.mark.parametrize("backend", ["reference", "cpu", "fa2"])
def test_P095_dropout_is_a_function_of_positions(lanes, backend, tile):
    lane = lanes(backend, torch.float32)
    query = torch.zeros(1, 1, 64, 4, device=lane.device)
    value = torch.eye(64, device=lane.device).expand(1, 1, -1, -1).clone().requires_grad_()
    out = flexmod.flex_attention(
        query, query, value, dropout_p=0.5, dropout_seed=12, backend=backend,
        kernel_options={"BLOCK_M": tile, "BLOCK_N": tile},
    )  # fmt: skip
    places = torch.arange(64)
    zero = torch.zeros((), dtype=torch.long)
    indices = {"b": zero, "h": zero, "q_idx": places[:, None], "kv_idx": places}
    kept = dropout.keep(12, 0.5, indices)
    # After the softmax: a kept weight is 2/64 whatever else is dropped.
    torch.testing.assert_close(out.detach().cpu()[0, 0], kept * (2 / 64))
    (d_value,) = torch.autograd.grad(out, value, torch.eye(64, device=lane.device)[None, None])
    torch.testing.assert_close(d_value, out.detach().mT)


def test_P095_the_mean_of_many_seeds_is_attention_without_dropout():
    runs, size = 4000, 8
    query, key = torch.randn(2, 1, 1, size, 4)
    value = torch.randn(1, 1, size, 1)
    places, zero = torch.arange(size), torch.zeros((), dtype=torch.long)
    indices = {"b": zero, "h": zero, "q_idx": places[:, None], "kv_idx": places}
    kept = torch.stack([dropout.keep(seed, 0.5, indices) for seed in range(runs)])
    weight = (query @ key.mT / 2).softmax(-1)
    outs = (weight * kept / 0.5 @ value).view(runs, size)
    for seed in (0, 1, runs - 1):
        out = flexmod.flex_attention(query, key, value, dropout_p=0.5, dropout_seed=seed)
        torch.testing.assert_close(out.flatten(), outs[seed])
    sigma = outs.std(0) / runs**0.5
    expected = flexmod.flex_attention(query, key, value).flatten()
    assert ((outs.mean(0) - expected).abs() < 3 * sigma).all()
