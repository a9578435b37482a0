"""The oracle against torch's own attention, and against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.functional import scaled_dot_product_attention

from flexmod.testing import assert_matches, naive, naive_same_dtype, visible


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("q_len,kv_len", [(7, 7), (5, 9), (1, 4)])
def test_dense_equals_torch(q_len, kv_len, scale):
    q, k, v = randn(2, 3, q_len, 8), randn(2, 3, kv_len, 8), randn(2, 3, kv_len, 5)
    out, lse, top = naive(q, k, v, scale=scale)
    score = q @ k.mT * (scale or 8**-0.5)
    assert_matches(out, scaled_dot_product_attention(q, k, v, scale=scale))
    assert_matches(lse, score.logsumexp(-1))
    assert_matches(top, score.amax(-1))


def test_causal_equals_torch():
    q, k, v = randn(2, 2, 6, 4), randn(2, 2, 6, 4), randn(2, 2, 6, 4)
    expected = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_matches(naive(q, k, v, mask_mod=causal)[0], expected)


def test_float_bias_equals_torch():
    q, k, v, bias = randn(2, 3, 6, 4), randn(2, 3, 7, 4), randn(2, 3, 7, 4), randn(2, 3, 6, 7)
    out = naive(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[b, h, i, j])[0]
    assert_matches(out, scaled_dot_product_attention(q, k, v, attn_mask=bias))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:return_lse is deprecated")
def test_mods_equal_those_of_torch():
    q, k, v = randn(2, 4, 6, 8), randn(2, 2, 9, 8), randn(2, 2, 9, 8)
    slope, ids = randn(4), torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2])

    def score_mod(s, b, h, i, j):
        return 4 * torch.tanh(s / 4) - slope[h] * (i - j).abs() + 0.5 * b

    def mask_mod(b, h, i, j):
        return (ids[i] >= ids[j]) & (j != i + b + h)

    block_mask = torch_flex.create_block_mask(mask_mod, 2, 4, 6, 9, device="cpu")
    expected, lse = torch_flex.flex_attention(
        q, k, v, score_mod, block_mask, enable_gqa=True, return_lse=True
    )
    out, mine, _ = naive(q, k, v, score_mod, mask_mod)
    assert_matches(out, expected)
    assert_matches(mine, lse)


def test_grouped_heads_and_one_kv_batch_equal_torch():
    q, k, v = randn(3, 6, 5, 4), randn(1, 2, 7, 4), randn(1, 2, 7, 4)
    wide = k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1)
    expected = scaled_dot_product_attention(q, *wide, enable_gqa=True)
    assert_matches(naive(q, k, v)[0], expected)


def test_works_in_float64_whatever_comes_in():
    q, k, v = (randn(1, 1, 4, 8).bfloat16() for _ in range(3))
    expected = scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert_matches(naive(q, k, v)[0], expected)
    assert naive_same_dtype(q, k, v)[0].dtype == torch.bfloat16


def test_rows_are_rows_of_the_whole():
    q, k, v = randn(2, 2, 9, 4), randn(2, 2, 9, 4), randn(2, 2, 9, 4)
    rows = torch.tensor([7, 0, 3])

    def bias(s, b, h, i, j):
        return s + 0.1 * (i - j) * h

    for part, whole in zip(
        naive(q, k, v, bias, causal, rows=rows), naive(q, k, v, bias, causal), strict=True
    ):
        assert_matches(part, whole[:, :, rows])
    mask = visible(causal, 1, 1, 9, 9)
    assert torch.equal(visible(causal, 1, 1, 9, 9, rows=rows), mask[:, :, rows])


TABLE = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
INDEXING = {
    "whole": (lambda b, h, i, j: TABLE[b, h, i, j], lambda b, h, i, j: (b, h, i, j)),
    "chain": (lambda b, h, i, j: TABLE[b][h][i][j], lambda b, h, i, j: (b, h, i, j)),
    "literal": (lambda b, h, i, j: TABLE[b, 0, i, j], lambda b, h, i, j: (b, 0, i, j)),
    "negative": (lambda b, h, i, j: TABLE[b, -1, i - 4, j], lambda b, h, i, j: (b, 2, i, j)),
    "slice": (lambda b, h, i, j: TABLE[b, :, i][h][j], lambda b, h, i, j: (b, h, i, j)),
    "ellipsis": (lambda b, h, i, j: TABLE[..., i, j][b, h], lambda b, h, i, j: (b, h, i, j)),
    "last literal": (lambda b, h, i, j: TABLE[..., 2, j][b, h], lambda b, h, i, j: (b, h, 2, j)),
    "none": (lambda b, h, i, j: TABLE[b, None, h, i][0][j], lambda b, h, i, j: (b, h, i, j)),
    "permuted": (lambda b, h, i, j: TABLE[b, h % 3, 3 - i, j], lambda b, h, i, j: (b, h, 3 - i, j)),
}


@pytest.mark.parametrize("name", INDEXING)
def test_captured_tables(name):
    read, where = INDEXING[name]
    got = visible(lambda b, h, i, j: read(b, h, i, j) % 7 < 3, 2, 3, 4, 5)
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(n) for n in (2, 3, 4, 5))).tolist():
        assert bool(got[b, h, i, j]) == (int(TABLE[where(b, h, i, j)]) % 7 < 3), (b, h, i, j)


def test_a_table_that_is_too_short_is_an_error():
    table = torch.ones(3, dtype=torch.bool)
    with pytest.raises(IndexError):
        visible(lambda b, h, i, j: table[i], 1, 1, 4, 4)


@pytest.mark.parametrize("constant", [True, torch.tensor(True)])
def test_a_constant_mask(constant):
    assert visible(lambda b, h, i, j: constant, 2, 1, 3, 4).shape == (2, 1, 3, 4)


def test_literals_are_float64():
    q, k, v = (torch.zeros(1, 1, 2, 4, dtype=torch.float64) for _ in range(3))
    top = naive(q, k, v, score_mod=lambda s, b, h, i, j: s + (i + 1) / 3 + j * 0.0)[2]
    assert_matches(top[0, 0], torch.tensor([1 / 3, 2 / 3], dtype=torch.float64))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["key", "value", "score"])
def test_what_is_masked_never_counts(where, poison):
    q, k, v = randn(1, 2, 4, 8), randn(1, 2, 6, 8), randn(1, 2, 6, 8)
    expected = naive(q, k[:, :, :4], v[:, :, :4])
    inputs = {"key": k.clone(), "value": v.clone()}
    if where in inputs:
        inputs[where][:, :, 4:] = poison

    def mod(s, b, h, i, j):
        return torch.where(j >= 4, poison, s) if where == "score" else s

    leaves = [x.requires_grad_() for x in (q, inputs["key"], inputs["value"])]
    got = naive(*leaves, mod, lambda b, h, i, j: j < 4)
    for mine, theirs in zip(got, expected, strict=True):
        assert_matches(mine, theirs)
    for grad in torch.autograd.grad(got[0].sum() + got[1].sum(), leaves):
        assert torch.isfinite(grad).all()


def test_what_is_visible_does_count():
    q, k, v = randn(1, 1, 3, 4), randn(1, 1, 3, 4), randn(1, 1, 3, 4)
    v[0, 0, 2, 1] = math.nan
    out = naive(q, k, v, mask_mod=causal)[0]
    assert torch.isnan(out).nonzero().tolist() == [[0, 0, 2, 1]]

    def infinite_row(s, b, h, i, j):
        return torch.where(i == 1, math.inf, s)

    out, lse, _ = naive(q, k, v.nan_to_num(), infinite_row)
    assert torch.isnan(out).all(-1).tolist() == [[[False, True, False]]]
    assert torch.isnan(lse).tolist() == [[[False, True, False]]]


def test_empty_rows():
    q, k, v = (randn(1, 2, 5, 4).requires_grad_() for _ in range(3))
    out, lse, top = naive(q, k, v, mask_mod=lambda b, h, i, j: (i < 3) & (j < 2))
    assert (out[:, :, 3:] == 0).all() and (lse[:, :, 3:] == -math.inf).all()
    assert (top[:, :, 3:] == -math.inf).all()
    dq, dk, dv = torch.autograd.grad(out.sum() + lse[:, :, :3].sum(), (q, k, v))
    assert (dq[:, :, 3:] == 0).all() and (dk[:, :, 2:] == 0).all() and (dv[:, :, 2:] == 0).all()


@pytest.mark.parametrize("shape", [(0, 2, 4, 5), (2, 2, 0, 5), (2, 2, 4, 0)])
def test_empty_extents(shape):
    batch, heads, q_len, kv_len = shape
    q, k, v = (randn(batch, heads, n, 8) for n in (q_len, kv_len, kv_len))
    out, lse, top = naive(q, k, v, lambda s, b, h, i, j: s * 2, causal)
    assert out.shape == (batch, heads, q_len, 8) and lse.shape == top.shape == out.shape[:3]
    assert (out == 0).all() and (lse == -math.inf).all()


def test_gradients_by_central_differences():
    q, k, v = randn(1, 2, 3, 4), randn(1, 1, 5, 4), randn(1, 1, 5, 4)
    slope = randn(2)

    def run(q, k, v, slope):
        return naive(q, k, v, lambda s, b, h, i, j: torch.tanh(s) + slope[h] * (i - j), causal)[:2]

    leaves = [x.requires_grad_() for x in (q, k, v, slope)]
    assert torch.autograd.gradcheck(run, leaves)


HALF_UNIT = torch.finfo(torch.bfloat16).eps / 2
JUDGED = [
    (torch.float64, 0.9e-10, None, True),
    (torch.float64, 1.1e-10, None, False),
    (torch.float32, 1.5e-6, None, True),
    (torch.float32, 2.5e-6, None, False),
    (torch.bfloat16, 2 * HALF_UNIT, 1 + 2 * HALF_UNIT, True),
    (torch.bfloat16, 2 * HALF_UNIT, 1.0, False),
]


@pytest.mark.parametrize("dtype,error,yardstick,passes", JUDGED)
def test_tolerances(dtype, error, yardstick, passes):
    expected = torch.ones(3, dtype=torch.float64)
    actual = (expected + error * torch.tensor([0, 1, 0])).to(dtype)
    naive_out = None if yardstick is None else torch.full((3,), yardstick, dtype=dtype)
    if passes:
        assert_matches(actual, expected, naive_out)
    else:
        with pytest.raises(AssertionError, match="is above"):
            assert_matches(actual, expected, naive_out)


@pytest.mark.parametrize("got,expected", [(math.nan, 0), (0, math.nan), (math.inf, -math.inf)])
def test_special_values_must_agree(got, expected):
    with pytest.raises(AssertionError, match="finite"):
        assert_matches(torch.tensor([got, 1.0]), torch.tensor([expected, 1.0], dtype=torch.float64))
    assert_matches(torch.tensor([math.nan]), torch.tensor([math.nan], dtype=torch.float64))


def test_half_precision_needs_a_yardstick():
    with pytest.raises(ValueError, match="naive_same_dtype"):
        assert_matches(torch.ones(2).half(), torch.ones(2).double())
