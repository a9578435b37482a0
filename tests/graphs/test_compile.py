"""torch.compile(fullgraph=True): one graph, the numbers and gradients of eager, few compiles."""

from __future__ import annotations

import functools

import pytest
import torch

import flexmod
from flexmod import ArgumentError, BlockMaskError, TraceError, masks, mods

HEADS, LENGTH = 2, 24  # of `qkv`


def learn(*shape):
    return torch.randn(shape).requires_grad_()


class Block(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.cap = heads, 20.0
        self.project = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.slopes = torch.nn.Parameter(torch.rand(heads))

    def forward(self, x, block_mask):
        batch, length, width = x.shape
        heads = self.project(x).view(batch, length, 3, self.heads, -1)

        def capped_alibi(score, b, h, q_idx, kv_idx):
            return self.cap * torch.tanh(score / self.cap) - self.slopes[h] * (q_idx - kv_idx)

        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()
        seen = flexmod.flex_attention(query, key, value, capped_alibi, block_mask)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + torch.nn.functional.gelu(x)


class TwoBlocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(16, HEADS), Block(16, HEADS)])

    def forward(self, x, block_mask):
        for block in self.blocks:
            x = block(x, block_mask)
        return x


def test_two_blocks_at_seven_lengths_compile_at_most_twice(agrees):
    net = TwoBlocks()
    calls = []
    for length in (32, 50, 19, 64, 100, 17, 45):
        block_mask = flexmod.create_block_mask(
            masks.sliding_window(20), None, None, length, length, BLOCK_SIZE=16
        )
        calls.append((torch.randn(2, length, 16), block_mask))
    assert agrees(net, *calls, learned=list(net.parameters())) <= 2


class Slopes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.rand(HEADS))

    def forward(self, score, b, h, q_idx, kv_idx):
        return score - self.slope[h] * (q_idx - kv_idx)

    def shared(self, score, b, h, q_idx, kv_idx):
        return score * self.slope[h]


def scaled(factor, score, b, h, q_idx, kv_idx):
    return score * factor


SLOPES = Slopes()
TABLE = torch.randn(HEADS, LENGTH, LENGTH)
MODS = {
    "a module": (SLOPES, [SLOPES.slope]),
    "a bound method": (SLOPES.shared, [SLOPES.slope]),
    "a partial": (functools.partial(scaled, 3.0), []),
    "a library mod": (flexmod.compose(mods.softcap(4.0), mods.alibi(HEADS)), []),
    "chained indices": (lambda s, b, h, i, j: s + TABLE[h][i, j] + TABLE[0, i][j], []),
    "the score's dtype": (lambda s, b, h, i, j: s + TABLE[0, i, j].to(s.dtype), []),
}


@pytest.mark.parametrize("name", MODS)
def test_kinds_of_mods(agrees, qkv, name):
    score_mod, learned = MODS[name]
    call = lambda q, k, v: flexmod.flex_attention(q, k, v, score_mod, masks.causal())
    assert agrees(call, qkv, learned=learned) == 1


def test_captured_tensors_learn_whatever_their_rank(agrees, qkv):
    def call(q, k, v, whole, one, row):
        bias = row.sin()  # not a leaf
        mod = lambda s, b, h, i, j: s * whole + one[0] * j / 9 + bias[i] * bias[j]
        return flexmod.flex_attention(q, k, v, mod, return_lse=True)

    assert agrees(call, (*qkv, learn(), learn(1), learn(LENGTH))) == 1


def test_P059_a_bias_from_a_linear_layer(agrees):
    linear = torch.nn.Linear(32, 4 * 64 * 64)

    def call(x):
        heads = x.view(2, 64, 4, 8).transpose(1, 2)
        bias = linear(x[:, 0]).view(2, 4, 64, 64)
        mod = lambda s, b, h, i, j: s + bias[b, h, i, j]
        return flexmod.flex_attention(heads, heads, heads, mod)

    assert agrees(call, (learn(2, 64, 32),), learned=list(linear.parameters())) == 1


def test_P064_a_bias_from_a_small_network(agrees):
    mlp = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    place = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"), -1)
    offset = (place.view(16, 1, 2) - place.view(16, 2)).float()

    def call(q, k, v):
        bias = mlp(offset.sign() * torch.log1p(offset.abs()))
        return flexmod.flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[i, j, h])

    given = [learn(1, 2, 16, 8) for _ in range(3)]
    assert agrees(call, given, learned=list(mlp.parameters())) == 1


def test_numbers_that_change_are_met_with_their_new_value(agrees, qkv):
    """Scale, and numbers in closures: two compiles for any number of values."""

    def call(q, k, v, scale, slope, window):
        mod = lambda s, b, h, i, j: s - slope * (i - j).abs()
        mask = lambda b, h, i, j: (i - j).abs() < window
        return flexmod.flex_attention(q, k, v, mod, mask, scale=scale)

    values = [(0.1, 0.5, 3), (0.2, 0.25, 5), (0.3, 2.0, 40), (0.4, 1.5, 6), (0.5, 0.125, 9)]
    assert agrees(call, *((*qkv, *each) for each in values)) == 2


def test_a_number_or_tensor_that_changes_in_place_is_not_stale(qkv):
    held = {"factor": 1.0}
    table = torch.zeros(LENGTH)
    call = lambda q, k, v: flexmod.flex_attention(
        q, k, v, lambda s, b, h, i, j: s * held["factor"] + table[j]
    )
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for factor in (1.0, 2.0, 3.0):
        held["factor"] = factor
        table.copy_(torch.randn(LENGTH))
        torch.testing.assert_close(compiled(*qkv), call(*qkv))


def test_the_other_arguments(agrees, qkv):
    def call(q, k, v, sink):
        return flexmod.flex_attention(
            q, k[:, :1], v[:, :1], None, masks.causal(), enable_gqa=True, sink=sink, dropout_p=0.3,
            dropout_seed=2**63 + 5, return_aux=flexmod.AuxRequest(lse=True, max_scores=True),
        )  # fmt: skip

    turned = qkv[0].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    assert agrees(call, (turned, *qkv[1:], learn(HEADS))) == 1


def test_dropout_of_another_seed_and_probability(agrees, qkv):
    def call(q, k, v, seed, p):
        return flexmod.flex_attention(q, k, v, dropout_p=p, dropout_seed=seed)

    assert agrees(call, *((*qkv, seed, 0.3) for seed in (1, 20, 300, 4000))) == 2
    agrees(call, *((*qkv, 5, p) for p in (0.0, 0.25, 0.5)))


def test_dropout_is_drawn_anew_on_each_run(qkv):
    call = lambda q, k, v: flexmod.flex_attention(q, k, v, dropout_p=0.3)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    first, second = compiled(*qkv), compiled(*qkv)
    torch.manual_seed(3)
    assert not torch.equal(first, second) and torch.equal(compiled(*qkv), first)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_without_gradients(agrees, qkv, around):
    with around():
        given = [x.detach().clone() for x in qkv]
        call = lambda q, k, v: flexmod.flex_attention(q, k, v, mods.softcap(3.0), masks.causal())
        assert agrees(call, given) == 1


def test_autocast_inside(agrees, qkv):
    def call(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            out = flexmod.flex_attention(q, k.bfloat16(), v, mods.softcap(3.0), masks.causal())
        assert out.dtype == torch.bfloat16
        return out

    assert agrees(call, qkv) == 1


def test_autocast_around(qkv):
    call = lambda q, k, v: flexmod.flex_attention(q, k, v, mods.softcap(3.0))
    with torch.autocast("cpu", torch.bfloat16):
        out = torch.compile(call, fullgraph=True, backend="aot_eager")(*qkv)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, call(*qkv))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_other_compilers(agrees, qkv, backend):
    """With inductor the graph is the operation alone, so that nothing is built with C++."""
    call = lambda q, k, v: flexmod.flex_attention(q, k, v, mods.alibi(HEADS), masks.causal())
    assert agrees(call, qkv, backend=backend) == 1


def test_the_reference_engine(agrees, qkv):
    call = lambda q, k, v: flexmod.flex_attention(q, k, v, mods.softcap(3.0), backend="reference")
    assert agrees(call, qkv) == 1


BLOCK_MASK = flexmod.create_block_mask(masks.causal(), None, None, 16, 16)
REFUSED = {
    "heads": (lambda q, k, v: flexmod.flex_attention(q, k[:, :1], v), ArgumentError, "heads"),
    "options": (
        lambda q, k, v: flexmod.flex_attention(q, k, v, kernel_options={"BLOCK": 1}),
        ArgumentError,
        "'BLOCK'",
    ),
    "lengths": (
        lambda q, k, v: flexmod.flex_attention(q, k, v, None, BLOCK_MASK),
        BlockMaskError,
        r"\(16, 16\)",
    ),
    "a mod": (
        lambda q, k, v: flexmod.flex_attention(q, k, v, lambda s, b, h, i, j: torch.erfinv(s)),
        TraceError,
        r"(?s)test_compile.py:\d+: .*erfinv is not supported",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(qkv, name):
    """Without fullgraph the error is the eager one; with it, Dynamo's, with the same text."""
    call, kind, text = REFUSED[name]
    torch._dynamo.reset()
    with pytest.raises(kind, match=text):
        torch.compile(call, backend="aot_eager")(*qkv)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=text):
        torch.compile(call, backend="aot_eager", fullgraph=True)(*qkv)


def test_eager_calls_go_around_the_operation(qkv, monkeypatch):
    monkeypatch.setattr(torch.ops.flexmod, "attention", None)
    assert flexmod.flex_attention(*qkv).shape == qkv[0].shape
