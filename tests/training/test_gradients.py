"""Gradients of the engines by finite differences in float64: mods, learnable forms, shapes."""

from __future__ import annotations

import pytest
import torch

import flexmod
from flexmod import masks, mods

B, HQ, HKV, Q, KV, E = 2, 4, 2, 5, 6, 3
ENGINES = ("cpu", "reference")


def learn(*shape, low=None):
    """A float64 leaf; positive and away from 0 with `low`."""
    values = torch.randn(shape, dtype=torch.float64)
    values = values if low is None else values.abs() + low
    return values.requires_grad_()


def inputs(batch=B, heads=HQ, kv_heads=HKV, q=Q, kv=KV, dim=E, value_dim=E, kv_batch=None):
    kv_batch = batch if kv_batch is None else kv_batch
    return (
        learn(batch, heads, q, dim),
        learn(kv_batch, kv_heads, kv, dim),
        learn(kv_batch, kv_heads, kv, value_dim),
    )


def check(engine, tensors, make=None, block_mask=None, fast=True, sink=False, **arguments):
    """gradcheck of out and lse (where it is finite) in all `tensors`.

    After query, key and value: the sink if there is one, and what `make` makes a score_mod of.
    """
    learned = 3 + sink
    gqa = tensors[0].shape[1] != tensors[1].shape[1]

    def call(*given):
        out, lse = flexmod.flex_attention(
            *given[:3], make(*given[learned:]) if make else None, block_mask, enable_gqa=gqa,
            return_lse=True, backend=engine, sink=given[3] if sink else None, **arguments,
        )  # fmt: skip
        return out, lse[torch.isfinite(lse)]

    assert torch.autograd.gradcheck(call, tensors, fast_mode=fast)


# Each mod of the library -> how it is made, and the learnable tensors that it is made of.
MODS = {
    "alibi": (lambda t: mods.alibi(t), [(HQ,)]),
    "alibi fixed": (lambda: mods.alibi(HQ), []),
    "alibi_slopes": (lambda t: mods.alibi(mods.alibi_slopes(HQ).double() * t, True), [(1,)]),
    "bias": (lambda t: mods.bias(t), [(B, 1, Q, KV)]),
    "distance_penalty": (lambda r, s: mods.distance_penalty("linear", r, s), [(HQ,), ()]),
    "distance_penalty log": (lambda r, s: mods.distance_penalty("log", r, s), [(), (HQ,)]),
    "distance_penalty power": (lambda r, s: mods.distance_penalty("power", r, s), [(HQ,), (HQ,)]),
    "gaussian_window": (lambda t: mods.gaussian_window(t), [(HQ,)]),
    "head_bias": (lambda t: mods.head_bias(t), [(HQ,)]),
    "head_scale": (lambda t: mods.head_scale(t), [(HQ,)]),
    "identity": (lambda: mods.identity, []),
    "log_length": (lambda t: mods.log_length(t), [()]),
    "position_scale": (lambda: mods.position_scale(3), []),
    "relative_bias": (lambda t: mods.relative_bias(t), [(HQ, 5)]),
    "relative_bias exact": (lambda t: mods.relative_bias(t, clamp=False), [(2 * KV - 1,)]),
    "softcap": (lambda: mods.softcap(1.5), []),
    "swin_2d_bias": (lambda t: mods.swin_2d_bias(2, 3, t), [(3 * 5, HQ)]),
    "t5_bias": (lambda t: mods.t5_bias(t, max_distance=4), [(8, HQ)]),
    "t5_buckets": (lambda t: mods.t5_bias(t, bidirectional=False, max_distance=3), [(4, HQ)]),
    "temperature": (lambda t: mods.temperature(t), [(HQ,)]),
}


def test_every_mod_of_the_library_is_here():
    assert set(mods.__all__) == {name.split()[0] for name in MODS}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MODS)
def test_mod_of_the_library(engine, name):
    make, shapes = MODS[name]
    learned = [learn(*shape, low=0.3) for shape in shapes]
    check(engine, [*inputs(), *learned], make, masks.causal())


TABLE_OF_ROWS = torch.tensor([3, 0, 3, 1, 4, 0])
FORMS = {
    "scalar": (lambda t: lambda s, b, h, i, j: s * t + t, [()]),
    "one element": (lambda t: lambda s, b, h, i, j: s + torch.exp(t[0] * (i - j)), [(1,)]),
    "per head": (lambda t: lambda s, b, h, i, j: s * t[h], [(HQ,)]),
    "per batch and head": (lambda t: lambda s, b, h, i, j: torch.tanh(s) * t[b, h], [(B, HQ)]),
    "row": (lambda t: lambda s, b, h, i, j: s * t[i], [(Q,)]),
    "row of a head": (lambda t: lambda s, b, h, i, j: s * t[h, i], [(HQ, Q)]),
    "column": (lambda t: lambda s, b, h, i, j: s + t[j] * t[j], [(KV,)]),
    "column of a batch": (lambda t: lambda s, b, h, i, j: s + t[b, j], [(B, KV)]),
    "diagonal": (lambda t: lambda s, b, h, i, j: s + t[h, j - i + Q - 1], [(HQ, Q + KV - 1)]),
    "clamped diagonal": (lambda t: lambda s, b, h, i, j: s * t[(i - j).clamp(-1, 2) + 1], [(4,)]),
    "negative index": (lambda t: lambda s, b, h, i, j: s + t[-1 - j], [(KV,)]),
    "full": (lambda t: lambda s, b, h, i, j: s + t[b, h, i, j], [(B, HQ, Q, KV)]),
    "elements": (lambda t: lambda s, b, h, i, j: s + t[i + j], [(Q + KV - 1,)]),
    "twice": (lambda t: lambda s, b, h, i, j: s * t[i] + t[j], [(KV,)]),
    "row, column and diagonal": (
        lambda t: lambda s, b, h, i, j: s + t[i] * t[j] - t[(j - i) % 3], [(KV,)],
    ),
    "three tables": (
        lambda t, u, w: lambda s, b, h, i, j: s * t[h] + u[i] * w[j, h], [(HQ,), (Q,), (KV, HQ)],
    ),
    "int table": (lambda t: lambda s, b, h, i, j: s + t[TABLE_OF_ROWS[j], h], [(5, HQ)]),
    "embeddings": (
        lambda t, u: lambda s, b, h, i, j: s + t[i, 0] * u[0, j] + t[i, 1] * u[1, j],
        [(Q, 2), (2, KV)],
    ),
    "non-leaf": (lambda t: _captured(torch.exp(t) * 2), [(Q, KV)]),
    "transposed": (lambda t: _captured(t.T), [(KV, Q)]),
    "expanded": (lambda t: _captured(t.expand(Q, KV)), [(1, KV)]),
    "sliced": (lambda t: _captured(t[1::2, :KV]), [(2 * Q + 1, KV + 2)]),
    "view made in the mod": (lambda t: lambda s, b, h, i, j: s + (2 * t).T[i, j], [(KV, Q)]),
    "score not used": (lambda t: lambda s, b, h, i, j: t[h] * (i - j), [(HQ,)]),
    "chosen": (lambda t: lambda s, b, h, i, j: torch.where(i > j, s + t[i], s - t[j]), [(KV,)]),
}  # fmt: skip


def _captured(table):
    return lambda s, b, h, i, j: s + table[i, j]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", FORMS)
def test_learnable_form(engine, name):
    make, shapes = FORMS[name]
    tensors = [*inputs(), *(learn(*shape) for shape in shapes)]
    check(engine, tensors, make, masks.sliding_window(3))


@pytest.mark.parametrize("engine", ENGINES)
def test_captured_query(engine):
    """A tensor that is both an argument and captured receives both gradients."""
    query, key, value = inputs(kv_heads=HQ)

    def call(query, key, value):
        mod = lambda s, b, h, i, j: s + query[b, h, i, 0] * key[b, h, j, 1]
        return flexmod.flex_attention(query, key, value, mod, backend=engine)

    assert torch.autograd.gradcheck(call, (query, key, value), fast_mode=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_entry_without_shortcuts(engine):
    check(engine, [*inputs(1, 2, 1, 3, 4, 2), learn(2)], mods.alibi, masks.causal(), fast=False)


SHAPES = {
    "plain": {},
    "one kv head": {"kv_heads": 1},
    "own kv heads": {"kv_heads": HQ},
    "kv batch 1": {"kv_batch": 1},
    "wide values": {"value_dim": 5},
    "narrow values": {"value_dim": 1},
    "one query": {"q": 1},
    "one key": {"kv": 1},
    "no keys": {"kv": 0},
    "no queries": {"q": 0},
    "no batch": {"batch": 0},
}
MASKS = {
    "none": None,
    "causal": masks.causal(),
    "empty rows": lambda b, h, i, j: (i < 2) & (j < 3),
    "nothing": lambda b, h, i, j: i < 0,
    "by batch and head": lambda b, h, i, j: (i >= j) & ((b + h) % 2 == 0) | (j == 0),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_and_masks(engine, shape, mask):
    tensors = inputs(**SHAPES[shape])
    if not tensors[0].numel() or not tensors[1].numel():
        results = flexmod.flex_attention(
            *tensors, mods.softcap(2.0), MASKS[mask], enable_gqa=True, return_lse=True,
            backend=engine,
        )  # fmt: skip
        grads = torch.autograd.grad(results, tensors, [torch.ones_like(r) for r in results])
        for grad, x in zip(grads, tensors, strict=True):
            assert grad.shape == x.shape and not grad.any()
        return
    check(engine, [*tensors, learn(HQ)], lambda t: lambda s, b, h, i, j: s * t[h], MASKS[mask])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mask", ["causal", "empty rows"])
def test_sink_and_dropout(engine, mask):
    tensors = [*inputs(), learn(HQ), learn(HQ, Q + KV - 1)]
    make, mask = FORMS["diagonal"][0], MASKS[mask]
    check(engine, tensors, make, mask, sink=True)
    check(engine, tensors, make, mask, sink=True, dropout_p=0.4, dropout_seed=5)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", [{"kv": 0}, {"q": 0}, {"batch": 0}], ids=str)
def test_sink_of_an_empty_call(engine, shape):
    tensors = inputs(**shape)
    sink = learn(HQ)
    out, lse = flexmod.flex_attention(
        *tensors, enable_gqa=True, return_lse=True, sink=sink, backend=engine
    )
    assert torch.equal(lse, sink.view(-1, 1).expand_as(lse)) and not out.any()
    (grad,) = torch.autograd.grad((out, lse), sink, (torch.ones_like(out), torch.ones_like(lse)))
    torch.testing.assert_close(grad, torch.full_like(sink, lse[:, 0].numel()))


@pytest.mark.parametrize("engine", ENGINES)
def test_longer_than_one_block(engine):
    """Rows of blocks, runs of full and partial blocks, ragged ends; sums across all of them."""
    tensors = [*inputs(1, 2, 1, 300, 331, 2), learn(2, 9), learn(2), learn(300)]
    make = lambda t, u, w: flexmod.compose(
        mods.relative_bias(t), mods.alibi(u), lambda s, b, h, i, j: s + w[i]
    )
    check(engine, tensors, make, masks.sliding_window(150))


WANTED = ["q", "k", "v", "t", "q t", "k v", "q k v"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("wanted", WANTED)
def test_gradients_only_where_asked(engine, wanted):
    named = dict(zip("qkvt", [*inputs(), learn(HQ, Q + KV - 1)], strict=True))
    make = FORMS["diagonal"][0]

    def grads(names):
        given = {n: x.detach().requires_grad_(n in names) for n, x in named.items()}
        query, key, value, table = given.values()
        out = flexmod.flex_attention(
            query, key, value, make(table), masks.causal(), enable_gqa=True, backend=engine
        )
        out.square().sum().backward()
        return {n: x.grad for n, x in given.items()}

    everything, found = grads("qkvt"), grads(wanted.split())
    for name, grad in found.items():
        assert (grad is not None) == (name in wanted.split())
        if grad is not None:
            torch.testing.assert_close(grad, everything[name], rtol=1e-12, atol=1e-12)


class Biased(torch.nn.Module):
    """A mod with parameters."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(HQ, dtype=torch.float64))
        self.slope = torch.nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, score, b, h, q_idx, kv_idx):
        return torch.tanh(score) * self.table[h] - self.slope * (q_idx - kv_idx).abs()


@pytest.mark.parametrize("engine", ENGINES)
def test_parameters_of_a_module(engine):
    module = Biased()
    tensors = inputs()

    def call(*given):
        return flexmod.flex_attention(*given[:3], module, enable_gqa=True, backend=engine)

    assert torch.autograd.gradcheck(call, (*tensors, *module.parameters()), fast_mode=True)
    call(*tensors).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in module.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_tables_are_summed_in_float32(dtype):
    """4096 equal contributions: in bfloat16 the sum would stop growing at 256."""
    table = torch.zeros(1, dtype=dtype, requires_grad=True)
    query = torch.zeros(1, 1, 4096, 1)
    key = torch.zeros(1, 1, 2, 1)
    _, lse = flexmod.flex_attention(
        query, key, key, lambda s, b, h, i, j: s + table[0], return_lse=True, backend="cpu"
    )
    lse.sum().backward()
    assert table.grad.dtype == dtype
    assert table.grad.item() == 4096


def test_max_scores_have_no_gradient():
    tensors = inputs()
    request = flexmod.AuxRequest(lse=True, max_scores=True)
    _, aux = flexmod.flex_attention(*tensors, enable_gqa=True, return_aux=request, backend="cpu")
    assert aux.lse.requires_grad and not aux.max_scores.requires_grad


def test_changed_in_place_before_backward_is_an_error():
    query, key, value = inputs()
    table = torch.ones(HQ, dtype=torch.float64)
    out = flexmod.flex_attention(query, key, value, mods.head_scale(table), enable_gqa=True)
    table.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
