"""Sums of the cpu engine hold whatever scores come, in whatever order the steps meet them."""

from __future__ import annotations

import itertools

import pytest
import torch

import flexmod
from flexmod import masks
from flexmod.kernels.cpu import forward, walk
from flexmod.testing import naive

STEP = 16  # keys of a step
LEVELS = [0.0, 31.0, -700.0, 3e4]


def rows_of(levels, dtype, mask=None, sink=None):
    """flexmod and the oracle on scores near one level after the other, a step each."""
    length = STEP * len(levels)
    query, key, value = torch.randn(3, 1, 2, length, 8, dtype=dtype)
    table = torch.tensor(levels, dtype=dtype).repeat_interleave(STEP)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[kv_idx]

    found = flexmod.flex_attention(
        query, key, value, score_mod, mask, backend="cpu", sink=sink,
        return_aux=flexmod.AuxRequest(lse=True, max_scores=True),
    )  # fmt: skip
    out, lse, top = naive(query, key, value, score_mod, mask)
    if sink is not None:
        joined = torch.logaddexp(lse, sink.double()[:, None])
        out, lse = out * (lse - joined).exp()[..., None], joined
    return found, (out, lse, top)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("sink", [None, 0.0, 500.0, -500.0])
def test_scores_of_any_level_in_any_order(dtype, sink, monkeypatch):
    monkeypatch.setattr(walk, "_KEYS", STEP)
    torch.manual_seed(0)
    sinks = None if sink is None else torch.full((2,), sink, dtype=dtype)
    tolerance = 2e-5 if dtype == torch.float32 else 1e-12  # scores of 3e4 are rounded to 2e-3
    for levels in itertools.permutations(LEVELS, 3):
        for mask in (None, masks.causal()):
            (out, aux), (wanted, lse, top) = rows_of(levels, dtype, mask, sinks)
            scale = max(1.0, max(map(abs, levels)) / 30)
            torch.testing.assert_close(out.double(), wanted, rtol=0, atol=tolerance * scale)
            torch.testing.assert_close(aux.lse.double(), lse, rtol=1e-6, atol=tolerance)
            torch.testing.assert_close(aux.max_scores.double(), top, rtol=1e-6, atol=tolerance)


def test_the_origin_stays_where_scores_are_small(monkeypatch):
    """Nothing is subtracted from scores then: `exponential` is given no origin."""
    origins = []
    plain = walk.exponential

    def spy(problem, score, origin):
        origins.append(origin)
        return plain(problem, score, origin)

    monkeypatch.setattr(walk, "exponential", spy)
    monkeypatch.setattr(walk, "_KEYS", STEP)
    reach = forward.__globals__["_REACH"]
    rows_of([0.0, -reach / 2, reach / 2], torch.float64, masks.causal())
    assert len(origins) == 3 and all(origin is None for origin in origins)
    rows_of([0.0, 2 * reach], torch.float64)
    assert origins[-1] is not None


def test_a_row_that_sees_nothing_but_a_low_sink():
    late = lambda b, h, q_idx, kv_idx: q_idx > 3
    (out, aux), (wanted, lse, _) = rows_of([0.0], torch.float64, late, torch.full((2,), -2000.0))
    assert not out[:, :, :4].any() and torch.equal(aux.lse[:, :, :4], lse[:, :, :4])
    torch.testing.assert_close(out[:, :, 4:], wanted[:, :, 4:], rtol=0, atol=1e-12)
