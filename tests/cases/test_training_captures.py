"""Gradients of what a mod captures: the cases by number."""

from __future__ import annotations

import pytest
import torch

import flexmod
from flexmod import masks
from flexmod.testing import naive


@pytest.fixture(params=["reference", "cpu"])
def exact(request, lanes):
    return lanes(request.param, torch.float64)


@pytest.fixture(params=["reference", "cpu", "fa2"])
def single(request, lanes):
    return lanes(request.param, torch.float32)


def learn(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def same_gradients(lane, call, parameters):
    """`call(attend)` through the engine and through the naive form: equal gradients."""

    def attend(q, k, v, score_mod=None, mask_mod=None):
        return flexmod.flex_attention(q, k, v, score_mod, mask_mod, backend=lane.backend)

    found, wanted = (
        torch.autograd.grad(call(run).square().sum(), parameters)
        for run in (attend, lambda *given: naive(*given)[0])
    )
    for got, expected in zip(found, wanted, strict=True):
        assert expected.any()
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-10)


def test_P041_a_fused_projection_gets_its_gradient(exact):
    linear = torch.nn.Linear(32, 96, dtype=torch.float64)
    x = torch.randn(1, 20, 32, dtype=torch.float64)

    def call(attend):
        parts = linear(x).split(32, -1)
        q, k, v = (part.reshape(1, 20, 4, 8).transpose(1, 2) for part in parts)
        return attend(q, k, v, None, masks.causal()).transpose(1, 2).reshape(1, 20, 32)

    same_gradients(exact, call, list(linear.parameters()))


def swin_index(i, j, side=8):
    down, right = i // side - j // side + side - 1, i % side - j % side + side - 1
    return down * (2 * side - 1) + right


def test_P052_a_learned_table_of_a_small_window(lanes, check_gradients):
    lane = lanes("cpu", torch.float64)
    given = [*lane.qkv((16, 4, 64, 8)), lane.randn(15 * 15, 4)]
    make = lambda t: lambda s, b, h, i, j: s + t[swin_index(i, j), h]
    check_gradients(lane, given, make)


@pytest.mark.parametrize("backend", ["reference", "fa2"])
def test_P052_on_other_engines(lanes, check_gradients, backend):
    lane = lanes(backend, torch.float32)
    given = [*lane.qkv((1, 2, 64, 8)), lane.randn(15 * 15, 2)]
    make = lambda t: lambda s, b, h, i, j: s + t[swin_index(i, j), h]
    check_gradients(lane, given, make)


def test_P055_a_scalar_gets_its_gradient_in_its_own_dtype(engine):
    query, key, value = (torch.randn(1, 2, 16, 16).half().to(engine.device) for _ in range(3))
    t = torch.tensor(0.7, device=engine.device, requires_grad=True)
    other = torch.tensor(0.7, device=engine.device, requires_grad=True)
    run = lambda mod: flexmod.flex_attention(query, key, value, mod, backend=engine.backend)
    run(lambda s, b, h, i, j: s * t + t).float().square().sum().backward()
    run(lambda s, b, h, i, j: s * other).float().square().sum().backward()
    assert t.grad.dtype == torch.float32 and t.grad.shape == ()
    # Adding t to a whole row changes nothing; fp16 outputs make the sums rough.
    torch.testing.assert_close(t.grad, other.grad, rtol=2e-2, atol=2e-3)
    exact = torch.tensor(0.7, dtype=torch.float64, device=engine.device, requires_grad=True)
    out = naive(query, key, value, lambda s, b, h, i, j: s * exact)[0]
    out.square().sum().backward()
    torch.testing.assert_close(t.grad.double(), exact.grad, rtol=2e-2, atol=2e-3)


def test_P056_a_mod_that_does_not_use_the_score(single, check_gradients):
    given = [*single.qkv((1, 2, 12, 8)), single.randn(2)]
    make = lambda t: lambda s, b, h, i, j: -t[h] * (i - j).abs()
    found = check_gradients(single, given, make)
    assert not found["query"].any() and not found["key"].any()
    assert found["value"].any() and found["learned 0"].any()


def test_P058_a_bias_made_of_the_query(exact):
    query, relation = learn(1, 2, 6, 8), learn(6, 9, 8)
    key, value = learn(1, 2, 9, 8), learn(1, 2, 9, 8)

    def call(attend):
        bias = torch.einsum("bhid,ijd->bhij", query, relation)
        return attend(query, key, value, lambda s, b, h, i, j: s + bias[b, h, i, j])

    same_gradients(exact, call, [query, relation, key, value])


def test_P059_a_bias_from_a_linear_layer(exact):
    linear = torch.nn.Linear(256, 4 * 64 * 64, dtype=torch.float64)
    x = torch.randn(2, 64, 256, dtype=torch.float64)
    heads = x.view(2, 64, 4, 64).transpose(1, 2)

    def call(attend):
        bias = linear(x[:, 0]).view(2, 4, 64, 64)
        return attend(heads, heads, heads, lambda s, b, h, i, j: s + bias[b, h, i, j])

    same_gradients(exact, call, [linear.weight, linear.bias])


PICKED = torch.tensor([0, 3, 3, 1, 4, 0] * 4)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_P061_two_tables_and_an_int_table(lanes, backend):
    tables = [learn(24), learn(5)]
    query, key, value = (learn(1, 1, 24, 4) for _ in range(3))

    def call(query, one, two):
        mod = lambda s, b, h, i, j: s + one[i] * two[PICKED[j]]
        return flexmod.flex_attention(query, key, value, mod, backend=backend, return_lse=True)

    assert torch.autograd.gradcheck(call, (query, *tables), fast_mode=True)


def test_P061_on_every_engine(single, check_gradients):
    given = [*single.qkv((1, 1, 24, 4)), single.randn(24), single.randn(5)]
    picked = PICKED.to(single.device)
    check_gradients(single, given, lambda t, u: lambda s, b, h, i, j: s + t[i] * u[picked[j]])


def test_P062_one_key_and_a_non_leaf(single):
    query, key, value = (x.requires_grad_() for x in single.qkv((1, 1, 1, 32)))
    a = single.randn(1).requires_grad_()
    decay = torch.exp(a * 0.5)
    out = flexmod.flex_attention(
        query, key, value, lambda s, b, h, i, j: s + decay[0], backend=single.backend
    )
    torch.testing.assert_close(out, value)
    grads = torch.autograd.grad(out.sum(), (query, key, value, a))
    for grad in (grads[0], grads[1], grads[3]):
        torch.testing.assert_close(grad, torch.zeros_like(grad), rtol=0, atol=1e-5)
    torch.testing.assert_close(grads[2], torch.ones_like(value))


def test_P064_a_bias_from_a_small_network(exact):
    mlp = torch.nn.Sequential(
        torch.nn.Linear(2, 8), torch.nn.GELU(), torch.nn.Linear(8, 2)
    ).double()
    place = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"), -1)
    place = place.view(16, 2).double()
    offset = place[:, None] - place
    offset = offset.sign() * torch.log1p(offset.abs())
    query, key, value = (learn(1, 2, 16, 4) for _ in range(3))

    def call(attend):
        bias = mlp(offset)  # [16, 16, 2]
        return attend(query, key, value, lambda s, b, h, i, j: s + bias[i, j, h])

    # The last layer's own bias moves whole rows: no gradient through out.
    parameters = [mlp[0].weight, mlp[0].bias, mlp[2].weight]
    same_gradients(exact, call, [query, key, value, *parameters])


@pytest.mark.parametrize("axes", [(0, 3, 1, 2), (0, 3, 2, 1)], ids=["view", "transposed"])
def test_P065_a_view_of_a_computed_bias(exact, axes):
    x = learn(3, 8, 8, 2)
    query, key, value = (learn(3, 2, 8, 4) for _ in range(3))

    def call(attend):
        view = (2 * x).permute(axes)
        assert not view.is_contiguous()
        return attend(query, key, value, lambda s, b, h, i, j: s + view[b, h, i, j])

    same_gradients(exact, call, [x, query, key, value])
