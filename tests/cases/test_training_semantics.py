"""Gradients of attention itself, its statistics, sinks and masks: the cases by number."""

from __future__ import annotations

import math

import pytest
import torch

import flexmod
from flexmod import masks, mods
from flexmod.kernels import choose
from flexmod.kernels.problem import Inputs, Saved
from flexmod.testing import naive, naive_same_dtype


@pytest.fixture(params=["reference", "cpu", "fa2"])
def single(request, lanes):
    return lanes(request.param, torch.float32)


@pytest.fixture(params=["reference", "cpu"])
def exact(request, lanes):
    return lanes(request.param, torch.float64)


def test_P026_rows_without_keys(single, check_gradients, monkeypatch):
    plain, like = torch.empty, torch.empty_like
    new = torch.Tensor.new_empty
    spoil = lambda x: x.fill_(math.nan) if x.is_floating_point() else x
    monkeypatch.setattr(torch, "empty", lambda *a, **k: spoil(plain(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: spoil(like(*a, **k)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: spoil(new(*a, **k)))
    given = single.qkv((1, 2, 32, 16))
    mask = lambda b, h, i, j: (i < 16) & (j < 9)
    tile = flexmod.create_block_mask(mask, None, None, 32, 32, single.device, BLOCK_SIZE=16)
    found = check_gradients(single, given, None, mask, block_mask=tile)
    assert not found["query"][:, :, 16:].any()
    out, lse = flexmod.flex_attention(
        *given, block_mask=tile, return_lse=True, backend=single.backend
    )
    assert not out[:, :, 16:].any() and (lse[:, :, 16:] == -math.inf).all()


@pytest.mark.parametrize("size", [17, 257])
def test_P053_mask_and_score_mod_on_a_ragged_length(single, check_gradients, size):
    if single.backend == "fa2" and size == 257 and not torch.cuda.is_available():
        size = 33  # the interpreter's time; ragged as well
    given = single.qkv((1, 1, size, 64))
    mod = lambda s, b, h, i, j: s + (i - j)
    check_gradients(single, given, lambda: mod, masks.causal())


@pytest.mark.parametrize("size", [17, 257])
def test_P053_in_bfloat16(size):
    given = [torch.randn(1, 1, size, 64).bfloat16() for _ in range(3)]
    mod = lambda s, b, h, i, j: s + (i - j)
    runs = {
        "exact": (lambda *a: naive(*a)[0], [x.double() for x in given]),
        "naive": (lambda *a: naive_same_dtype(*a)[0], given),
        "flexmod": (flexmod.flex_attention, given),
    }
    grads = {}
    for name, (run, tensors) in runs.items():
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = run(*leaves, mod, masks.causal())
        grads[name] = torch.autograd.grad(out.double().square().sum(), leaves)
    for got, rough, wanted in zip(grads["flexmod"], grads["naive"], grads["exact"], strict=True):
        assert torch.isfinite(got).all()
        error, bound = ((x.double() - wanted).abs().max() for x in (got, rough))
        assert error <= 2 * bound


def test_P070_a_sink_and_no_key(single):
    query, key, value = (x.requires_grad_() for x in single.qkv((1, 1, 4, 8)))
    sink = single.tensor([0.5], single.dtype).requires_grad_()
    out, lse = flexmod.flex_attention(
        query, key, value, None, lambda b, h, i, j: i < 0, sink=sink, return_lse=True,
        backend=single.backend,
    )  # fmt: skip
    assert not out.any()
    assert torch.equal(lse, torch.full_like(lse, 0.5))
    through_out = torch.autograd.grad(
        out, (sink, query, key, value), torch.ones_like(out), retain_graph=True
    )
    assert not any(grad.any() for grad in through_out)
    (through_lse,) = torch.autograd.grad(lse, sink, torch.ones_like(lse))
    assert through_lse.item() == lse.numel()


def test_P070_a_sink_above_everything(exact):
    query, key, value = (x.requires_grad_() for x in exact.qkv((1, 1, 4, 8)))
    sink = torch.tensor([100.0], dtype=exact.dtype, requires_grad=True)
    out, lse = flexmod.flex_attention(
        query, key, value, sink=sink, return_lse=True, backend=exact.backend
    )
    assert float((lse - 100).abs().max()) < 1e-9 and float(out.abs().max()) < 1e-30
    grads = torch.autograd.grad((out, lse), (query, key, value, sink), (out, torch.ones_like(lse)))
    assert all(torch.isfinite(grad).all() for grad in grads)
    torch.testing.assert_close(grads[3], torch.full_like(sink, 4.0))


def test_P073_gradient_of_lse(exact):
    query, key, value = exact.randn(1, 1, 4, 3), exact.randn(1, 1, 5, 3), exact.randn(1, 1, 5, 3)
    leaves = [x.requires_grad_() for x in (query, key, value)]

    def call(*given):
        return flexmod.flex_attention(
            *given, None, masks.causal(), return_lse=True, backend=exact.backend
        )

    lse = call(*leaves)[1]
    d_query, d_value = torch.autograd.grad(lse.sum(), (query, value), materialize_grads=True)
    scale = 3**-0.5
    scores = (query @ key.mT * scale).masked_fill(~torch.ones(4, 5).tril().bool(), -math.inf)
    torch.testing.assert_close(d_query, scale * scores.softmax(-1) @ key)
    assert not d_value.any()
    assert torch.autograd.gradcheck(call, leaves)


def test_P074_two_parts_merged_by_lse(single):
    given = [x.requires_grad_() for x in single.qkv((1, 2, 10, 8))]
    near = lambda b, h, i, j: (i >= j) & (i - j <= 2)
    far = lambda b, h, i, j: i - j > 2
    run = lambda mask: flexmod.flex_attention(
        *given, None, mask, return_lse=True, backend=single.backend
    )
    (out1, lse1), (out2, lse2) = run(near), run(far)
    assert (lse2[:, :, :3] == -math.inf).all()
    lse = torch.logaddexp(lse1, lse2)
    merged = torch.exp(lse1 - lse)[..., None] * out1 + torch.exp(lse2 - lse)[..., None] * out2
    out, whole = run(masks.causal())
    torch.testing.assert_close(merged, out)
    torch.testing.assert_close(lse, whole)
    seed = torch.randn_like(out)
    found = torch.autograd.grad((merged, lse), given, (seed, lse.detach()))
    wanted = torch.autograd.grad((out, whole), given, (seed, lse.detach()))
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_P076_an_incoming_gradient_of_another_dtype(engine):
    given = [torch.randn(1, 1, 16, 8, device=engine.device).half() for _ in range(3)]
    given = [x.requires_grad_() for x in given]
    out = flexmod.flex_attention(*given, None, masks.causal(), backend=engine.backend)
    seed = torch.randn(out.shape, device=engine.device)
    found = torch.autograd.grad(out.float(), given, seed)
    assert [g.dtype for g in found] == [torch.float16] * 3
    leaves = [x.detach().double().requires_grad_() for x in given]
    exact = naive(*leaves, None, masks.causal())[0]
    wanted = torch.autograd.grad(exact, leaves, seed.double())
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-2, atol=5e-3)


@pytest.mark.parametrize("backend", ["cpu", "fa2"])
def test_P086_the_backward_has_the_mask(lanes, check_gradients, backend):
    """By autograd, and by the backward function itself."""
    lane = lanes(backend, torch.float32)
    ids = masks.document_ids([7, 12, 5], lane.device)
    mask = masks.document(ids)
    given = lane.qkv((1, 2, 24, 16))
    tile = flexmod.create_block_mask(mask, None, None, 24, 24, lane.device, BLOCK_SIZE=16)
    found = check_gradients(lane, given, None, mask, block_mask=tile, with_lse=False)

    inputs = Inputs(*given)
    problem = flexmod.attention.make_problem(inputs, None, tile)
    choice = choose.choose(problem, backend)
    out, lse, _ = choose.forward(problem, inputs, choice)
    d_out = torch.zeros_like(out)
    d_out[:, :, 7:19] = 1.0  # the middle document alone
    direct = choose.backward(problem, inputs, Saved(out, lse, d_out, None), choice)
    outside = torch.cat([torch.arange(7), torch.arange(19, 24)])
    assert not direct.key[:, :, outside].any() and not direct.value[:, :, outside].any()
    leaves = [x.clone().requires_grad_() for x in given]
    out = flexmod.flex_attention(*leaves, None, tile, backend=backend)
    again = torch.autograd.grad(out, leaves, d_out)
    for got, wanted in zip(direct[:3], again, strict=True):
        torch.testing.assert_close(got.to(wanted.dtype), wanted)
    assert found["value"].any()


@pytest.mark.parametrize("dim", [1, 7, 31, 33, 80, 96])
@pytest.mark.parametrize("size", [1, 24])
def test_P043_gradients_of_any_head_dimension(lanes, check_gradients, dim, size):
    lane = lanes("cpu", torch.float64)
    shapes = (1, 2, size, dim), (1, 2, 24, dim), (1, 2, 24, dim)
    given = [*(lane.randn(*shape) for shape in shapes), lane.randn(2, 31)]
    check_gradients(lane, given, mods.relative_bias)


def test_P043_in_a_kernel(lanes, check_gradients):
    lane = lanes("fa2", torch.float32)
    given = [*lane.qkv((1, 1, 17, 33)), lane.randn(1, 31)]
    check_gradients(lane, given, mods.relative_bias)


def test_P046_the_head_of_a_bias_is_the_query_head(single, check_gradients):
    given = [single.randn(1, 6, 20, 8), *(single.randn(1, 2, 20, 8) for _ in range(2))]
    make = lambda t: lambda s, b, h, i, j: s + t[h] * j
    check_gradients(single, [*given, single.randn(6) / 10], make)


def test_P047_one_key_batch_for_all(single, check_gradients):
    given = [single.randn(3, 2, 8, 16), *(single.randn(1, 2, 12, 16) for _ in range(2))]
    make = lambda t: lambda s, b, h, i, j: s + t[b] * j
    found = check_gradients(single, [*given, single.randn(3) / 10], make)
    assert found["key"].shape == (1, 2, 12, 16)


def test_P049_a_segment_without_queries(single, check_gradients):
    queries, keys = torch.tensor([15, 0, 15]), torch.tensor([10, 10, 10])
    of_query = torch.repeat_interleave(torch.arange(3), queries).to(single.device)
    of_key = torch.repeat_interleave(torch.arange(3), keys).to(single.device)
    mask = lambda b, h, i, j: of_query[i] == of_key[j]
    given = [single.randn(1, 2, 30, 16), *(single.randn(1, 2, 30, 16) for _ in range(2))]
    found = check_gradients(single, given, None, mask)
    assert not found["key"][:, :, 10:20].any() and not found["value"][:, :, 10:20].any()
