"""Memory layouts and head dims."""

from __future__ import annotations

import pytest
import torch

import flexmod
from flexmod.testing import assert_matches

BATCH, HEADS, SEQLEN, DIM = 2, 3, 40, 16
SHAPE = (BATCH, HEADS, SEQLEN, DIM)


def _bshd(lane):
    return tuple(lane.randn(BATCH, SEQLEN, HEADS, DIM).transpose(1, 2) for _ in range(3))


def _fused(lane):
    return lane.randn(BATCH, SEQLEN, 3, HEADS, DIM).permute(2, 0, 3, 1, 4).unbind(0)


def _packed_last_axis(lane):
    return lane.randn(BATCH, SEQLEN, HEADS, 3 * DIM).transpose(1, 2).split(DIM, dim=-1)


def _expanded_heads(lane):
    q = lane.randn(*SHAPE)
    return q, *(lane.randn(BATCH, 1, SEQLEN, DIM).expand(SHAPE) for _ in range(2))


def _expanded_batch(lane):
    q = lane.randn(*SHAPE)
    return q, *(lane.randn(1, HEADS, SEQLEN, DIM).expand(SHAPE) for _ in range(2))


def _one_key_expanded(lane):
    q, v = lane.randn(*SHAPE), lane.randn(*SHAPE)
    return q, lane.randn(BATCH, HEADS, 1, DIM).expand(SHAPE), v


def _last_axis_strided(lane):
    return tuple(lane.randn(BATCH, HEADS, DIM, SEQLEN).mT for _ in range(3))


def _every_other_value(lane):
    return tuple(lane.randn(BATCH, HEADS, SEQLEN, 2 * DIM)[..., 1::2] for _ in range(3))


def _every_other_row(lane):
    return tuple(lane.randn(BATCH, HEADS, 2 * SEQLEN, DIM)[:, :, 1::2] for _ in range(3))


def _all_different(lane):
    return _bshd(lane)[0], _last_axis_strided(lane)[1], _expanded_heads(lane)[2]


LAYOUTS = [
    _bshd, _fused, _packed_last_axis, _expanded_heads, _expanded_batch, _one_key_expanded,
    _last_axis_strided, _every_other_value, _every_other_row, _all_different,
]  # fmt: skip


def _alibi(lane):
    slopes = lane.floats([0.5, 0.25, 0.125])
    return lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda make: make.__name__.strip("_"))
def test_P040_layouts(lane, check, layout):
    q, k, v = layout(lane)
    assert not all(x.is_contiguous() for x in (q, k, v))
    out, lse = check(lane, q, k, v, _alibi(lane), tile=None)
    same, same_lse = check(lane, *(x.contiguous() for x in (q, k, v)), _alibi(lane))
    assert_matches(out, same.double())
    assert_matches(lse, same_lse.double())


@pytest.mark.parametrize("layout", [_fused, _all_different], ids=["fused", "all_different"])
def test_P040_layouts_with_a_map(lane, check, layout):
    check(lane, *layout(lane), _alibi(lane), lambda b, h, i, j: i >= j, tile=16)


def test_P040_the_output_is_laid_out_as_the_query(engine):
    q, k, v = _bshd(engine)
    out = flexmod.flex_attention(q, k, v, backend=engine.backend)
    assert out.transpose(1, 2).is_contiguous()
    contiguous = [x.contiguous() for x in (q, k, v)]
    assert flexmod.flex_attention(*contiguous, backend=engine.backend).is_contiguous()


def test_P040_a_strided_captured_table(lane, check):
    table = lane.randn(2 * SEQLEN, HEADS, SEQLEN)
    table = table.to(torch.float64 if lane.dtype == torch.float64 else torch.float32)
    view = table[::2].permute(1, 2, 0)  # (H, KV, Q), no axis contiguous
    spread = table[:1, :, :1].expand(BATCH, HEADS, SEQLEN)

    def score_mod(s, b, h, i, j):
        return s + view[h, j, i] + spread[b, h, i]

    check(lane, *lane.qkv(SHAPE), score_mod)


@pytest.mark.parametrize("q_len", [1, 24])
@pytest.mark.parametrize("head_dim", [1, 7, 31, 33, 80, 96])
def test_P043_head_dims(lane, check, head_dim, q_len):
    def relative(s, b, h, i, j):
        return s + 0.125 * (i - j)

    check(lane, *lane.qkv((1, 2, q_len, head_dim), (1, 2, 24, head_dim)), relative)


@pytest.mark.parametrize("head_dim,value_dim", [(16, 7), (33, 80), (96, 1)])
def test_P043_values_of_another_dim(lane, check, head_dim, value_dim):
    q, k, _ = lane.qkv((1, 2, 24, head_dim))
    out, _ = check(lane, q, k, lane.randn(1, 2, 24, value_dim))
    assert out.shape == (1, 2, 24, value_dim)
