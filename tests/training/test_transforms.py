"""Double backward, torch.func and forward mode: the right number, from whatever engine."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.autograd import forward_ad

import flexmod
from flexmod import masks, mods

ENGINES = ("cpu", "reference")


def leaves(*shapes):
    return [torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes]


def inputs(heads=2, q=4, kv=5, dim=3):
    return leaves((1, heads, q, dim), (1, heads, kv, dim), (1, heads, kv, dim))


# A learnable mod with a curvature each: a scalar, per head, a diagonal.
MODS = {
    "scalar": (lambda t: lambda s, b, h, i, j: torch.tanh(s * t), ()),
    "per head": (lambda t: lambda s, b, h, i, j: s * t[h] * t[h], (2,)),
    "relative": (mods.relative_bias, (2, 5)),
}


def attention(make, engine, **arguments):
    """(query, key, value, table) -> out."""
    return lambda q, k, v, t: flexmod.flex_attention(
        q, k, v, make(t), masks.causal(), backend=engine, **arguments
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MODS)
def test_double_backward(engine, name):
    make, shape = MODS[name]
    tensors = [*inputs(), *leaves(shape)]
    assert torch.autograd.gradgradcheck(attention(make, engine), tensors, fast_mode=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_double_backward_of_lse_sink_and_dropout(engine):
    tensors = [*inputs(), *leaves((2,), (2,))]

    def call(q, k, v, sink, slopes):
        return flexmod.flex_attention(
            q, k, v, mods.alibi(slopes), masks.causal(), return_lse=True, backend=engine,
            sink=sink, dropout_p=0.4, dropout_seed=3,
        )  # fmt: skip

    assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)


def test_double_backward_through_a_non_leaf_table():
    tensors = [*inputs(), *leaves((2,))]
    make = lambda t: mods.alibi(torch.exp(t))
    assert torch.autograd.gradgradcheck(attention(make, "cpu"), tensors, fast_mode=True)


# How the tensors of a call may hang together -> query, key, value and table made of two leaves.
SHARED = {
    "one tensor for all": lambda x, t: (x, x, x, t),
    "one non-leaf for all": lambda x, t: (2 * x, 2 * x, x, t),
    "key made of query": lambda x, t: (x, x * x, x + 1, t),
    "table made of query": lambda x, t: (x, x, x, x[0, :, 0, 0] * t),
    "query made of table": lambda x, t: (x * t[:, None, None], x, x, t),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", SHARED)
def test_double_backward_of_inputs_that_share_a_graph(engine, name):
    x, t = leaves((1, 2, 4, 3), (2,))
    call = lambda x, t: attention(mods.alibi, engine)(*SHARED[name](x, t))
    seed = torch.randn_like(x)

    def grads(create_graph):
        return torch.autograd.grad(
            call(x, t), (x, t), seed, create_graph=create_graph, materialize_grads=True
        )

    for got, wanted in zip(grads(True), grads(False), strict=True):
        torch.testing.assert_close(got.detach(), wanted)
    assert torch.autograd.gradgradcheck(call, (x, t), fast_mode=True)


def test_double_backward_only_where_asked():
    query, key, value = inputs()
    table = torch.randn(2, dtype=torch.float64)
    out = attention(mods.alibi, "cpu")(query, key.detach(), value.detach(), table)
    (grad,) = torch.autograd.grad(out.sin().sum(), query, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), query)
    exact = attention(mods.alibi, "reference")(query, key.detach(), value.detach(), table)
    (grad,) = torch.autograd.grad(exact.sin().sum(), query, create_graph=True)
    torch.testing.assert_close(second, torch.autograd.grad(grad.square().sum(), query)[0])


@pytest.mark.parametrize("engine", [*ENGINES, "fa2"])
@pytest.mark.parametrize("name", MODS)
def test_func_grad_is_autograds(engine, name):
    make, shape = MODS[name]
    dtype = torch.float32 if engine == "fa2" else torch.float64
    tensors = [x.detach().to(dtype).requires_grad_() for x in (*inputs(), *leaves(shape))]
    loss = lambda *given: attention(make, engine)(*given).sin().sum()
    exact = lambda *given: attention(make, "reference")(*given).sin().sum()
    found = torch.func.grad(loss, argnums=(0, 1, 2, 3))(*(x.detach() for x in tensors))
    for got, wanted in zip(found, torch.autograd.grad(exact(*tensors), tensors), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("axis", range(4), ids=["query", "key", "value", "table"])
@pytest.mark.parametrize("name", MODS)
def test_jvp_is_a_finite_difference(name, axis):
    make, shape = MODS[name]
    tensors = [x.detach() for x in (*inputs(), *leaves(shape))]
    direction = torch.randn_like(tensors[axis])
    call = attention(make, "cpu")
    moved = lambda x: call(*tensors[:axis], x, *tensors[axis + 1 :])
    _, found = torch.func.jvp(moved, (tensors[axis],), (direction,))
    step = 1e-5 * direction
    wanted = (moved(tensors[axis] + step) - moved(tensors[axis] - step)) / 2e-5
    assert wanted.any()
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)
    with forward_ad.dual_level():
        dual = moved(forward_ad.make_dual(tensors[axis], direction))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, found)


@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("where", ["all", "inputs", "table"])
def test_vmap_is_a_loop(name, where):
    make, shape = MODS[name]
    many = [torch.stack([x.detach(), 2 * x.detach(), -x.detach()]) for x in
            (*inputs(), *leaves(shape))]  # fmt: skip
    mapped = {"all": (0, 0, 0, 0), "inputs": (0, 0, 0, None), "table": (None, None, None, 0)}[where]
    given = [x if axis == 0 else x[0] for x, axis in zip(many, mapped, strict=True)]
    call = attention(make, "cpu")
    found = torch.vmap(call, in_dims=mapped)(*given)
    loop = [
        call(*(x[n] if axis == 0 else x for x, axis in zip(given, mapped, strict=True)))
        for n in range(3)
    ]
    torch.testing.assert_close(found, torch.stack(loop))


def test_vmap_of_grad_is_a_loop():
    many = [torch.randn(3, *x.shape, dtype=torch.float64) for x in (*inputs(), *leaves((2,)))]
    loss = lambda *given: attention(mods.alibi, "cpu")(*given).sin().sum()
    found = torch.vmap(torch.func.grad(loss, argnums=(0, 3)))(*many)
    for n in range(3):
        one = [x[n].clone().requires_grad_() for x in many]
        wanted = torch.autograd.grad(loss(*one), (one[0], one[3]))
        for got, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(got[n], expected)


def test_vmap_over_an_int_table():
    query, key, value = (x.detach() for x in inputs())
    bias, tables = torch.randn(6, dtype=torch.float64), torch.tensor([[0, 1, 2, 5, 3], [1] * 5])
    call = lambda rows: flexmod.flex_attention(
        query, key, value, lambda s, b, h, i, j: s + bias[rows[j]], backend="cpu"
    )
    torch.testing.assert_close(torch.vmap(call)(tables), torch.stack([call(t) for t in tables]))


def test_jacobians_and_hessian():
    query, key, value = (x.detach() for x in inputs(1, 2, 3, 2))
    table = torch.randn(1, dtype=torch.float64)
    call = lambda q, t: attention(mods.alibi, "cpu")(q, key, value, t)
    for axis in (0, 1):
        backward = torch.func.jacrev(call, axis)(query, table)
        forward = torch.func.jacfwd(call, axis)(query, table)
        torch.testing.assert_close(backward, forward)
    hessian = torch.func.hessian(lambda t: call(query, t).sin().sum())(table)
    step = 1e-4
    at = lambda t: call(query, t).sin().sum()
    wanted = (at(table + step) - 2 * at(table) + at(table - step)) / step**2
    torch.testing.assert_close(hessian.squeeze(), wanted, rtol=1e-4, atol=1e-6)


def test_checkpointed_and_functional_calls():
    from torch.utils.checkpoint import checkpoint

    tensors = [*inputs(), *leaves((2,))]
    call = attention(mods.alibi, "cpu")
    wanted = torch.autograd.grad(call(*tensors).sum(), tensors)
    found = torch.autograd.grad(checkpoint(call, *tensors, use_reentrant=False).sum(), tensors)
    for got, expected in zip(found, wanted, strict=True):
        assert torch.equal(got, expected)


def test_a_note_says_that_the_reference_serves(caplog):
    tensors = [*inputs(), *leaves((2,))]
    call = attention(mods.alibi, "cpu")
    with caplog.at_level(logging.INFO, "flexmod"):
        torch.func.grad(lambda *given: call(*given).sum())(*tensors)
    assert "using the reference engine" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "flexmod"):
        torch.autograd.grad(call(*tensors).sum(), tensors, create_graph=True)
    assert "double backward" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "flexmod"):
        call(*tensors).sum().backward()
    assert not caplog.text


@pytest.mark.parametrize("engine", ENGINES)
def test_double_backward_of_rows_that_see_nothing(engine):
    query, key, value = inputs()

    def call(q, k, v):
        return flexmod.flex_attention(
            q, k, v, None, lambda b, h, i, j: (i < 2) & (j < 3), backend=engine
        )

    assert torch.autograd.gradgradcheck(call, (query, key, value), fast_mode=True)


@pytest.mark.parametrize("kv", [0, 3])
def test_transforms_of_short_calls(kv):
    query, key, value = (x.detach() for x in inputs(kv=kv))
    loss = lambda q: flexmod.flex_attention(q, key, value, backend="cpu").sin().sum()
    found = torch.func.grad(loss)(query)
    leaf = query.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    torch.testing.assert_close(found, wanted.detach())
    assert wanted.any() == (kv > 0)
