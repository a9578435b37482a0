"""What an expression means, and what a number comes to."""

from __future__ import annotations

import math

import pytest
import torch

import flexmod
from flexmod.errors import ArgumentError
from flexmod.testing import assert_matches, naive, visible


def precedence(b, h, i, j):
    return (i >= j) & b % 2 == 0  # Python reads ((i >= j) & (b % 2)) == 0


def test_P028_precedence_is_that_of_python(lane, check):
    block_mask = flexmod.create_block_mask(
        precedence, 2, None, 32, 32, device=lane.device, BLOCK_SIZE=16
    )
    dense = block_mask.dense()
    assert dense[0].all()
    assert dense[1, 0].tolist() == [[j > i for j in range(32)] for i in range(32)]
    check(lane, *lane.qkv((2, 1, 32, 16)), None, precedence, tile=16, batches=2)


@pytest.mark.parametrize("tile", [None, 16])
def test_P029_a_literal_among_the_indices(lane, check, tile):
    table = torch.rand(2, 1, 5, 5).gt(0.4).to(lane.device)
    table[:, :, :, 2] = True
    table[:, :, 1] = False

    def mask_mod(b, h, i, j):
        return table[b, 0, i, j]

    out, lse = check(lane, *lane.qkv((2, 1, 5, 16)), None, mask_mod, tile=tile, batches=2)
    assert (out[:, :, 1] == 0).all() and (lse[:, :, 1] == -math.inf).all()


@pytest.mark.parametrize("tile", [None, 16])
def test_P031_python_bools_in_nested_where(lane, check, tile):
    lengths = lane.tensor([0, 3, 7, 16])

    def mask_mod(b, h, i, j):
        return torch.where(i < lengths[b], torch.where(j < lengths[b], True, False), False)

    out, lse = check(lane, *lane.qkv((4, 1, 16, 16)), None, mask_mod, tile=tile, batches=4)
    assert (out[0] == 0).all() and (lse[0] == -math.inf).all()


def _one_column(lane, values):
    # Queries and keys whose product, with scale 1, is `values` for each key.
    x = torch.zeros(1, 1, len(values), 16, dtype=torch.float64)
    x[..., 0] = torch.tensor(values, dtype=torch.float64)
    return x.to(lane.device, lane.dtype)


SCORES = [-100.0, -60.0, -20.0, -1.0, 0.0, 0.5, 20.0, 60.0, 100.0]


def _softcap(cap):
    return lambda s, b, h, i, j: cap * torch.tanh(s / cap)


SOFTCAPS = {"own": _softcap(20.0), "mods": flexmod.mods.softcap(20.0)}


@pytest.mark.parametrize("softcap", SOFTCAPS.values(), ids=SOFTCAPS)
def test_P067_softcap_is_bounded(lane, softcap):
    q, k = _one_column(lane, SCORES), _one_column(lane, [1.0])
    _, lse = flexmod.flex_attention(
        q, k, k, softcap, scale=1.0, return_lse=True, backend=lane.backend
    )
    # One key: the lse is its score.
    expected = torch.tensor([20 * math.tanh(s / 20) for s in SCORES], dtype=torch.float64)
    assert_matches(lse[0, 0], expected)
    assert abs(float(lse[0, 0, -1]) - 19.998184) < 5e-6


def test_P067_no_score_is_above_the_cap(lane):
    q, k = _one_column(lane, [*SCORES, 1e4]), _one_column(lane, [1.0, -1.0, 30.0])
    _, aux = flexmod.flex_attention(
        q, k, k, _softcap(20.0), scale=1.0, backend=lane.backend,
        return_aux=flexmod.AuxRequest(max_scores=True),
    )  # fmt: skip
    assert float(aux.max_scores.max()) <= 20.0
    assert_matches(aux.max_scores, naive(q, k, k, _softcap(20.0), scale=1.0)[2])


@pytest.mark.parametrize("tile", [16, None])
def test_P068_cap_and_window_together(lane, check, tile):
    q, k, v = lane.qkv((1, 4, 32, 16))
    window = flexmod.masks.sliding_window(5)
    out, _ = check(lane, q * 12, k, v, _softcap(8.0), window, tile=tile)
    for other in (naive(q * 12, k, v, None, window), naive(q * 12, k, v, _softcap(8.0))):
        assert float((out - other[0]).norm() / other[0].norm()) > 0.2
    check(lane, q * 12, k, v, _softcap(3.0), window, tile=tile)


def test_P068_an_unknown_keyword_is_refused(engine):
    q, k, v = engine.qkv((1, 4, 32, 16))
    with pytest.raises(TypeError):
        flexmod.flex_attention(q, k, v, softcap=8.0, backend=engine.backend)
    with pytest.raises(ArgumentError, match="softcap"):
        flexmod.flex_attention(q, k, v, kernel_options={"softcap": 8.0}, backend=engine.backend)


def test_P071_lse_is_the_natural_logarithm(lane):
    q, k, v = lane.qkv((1, 1, 3, 16), (1, 1, 8, 16))
    _, aux = flexmod.flex_attention(
        q * 0, k, v, backend=lane.backend,
        return_aux=flexmod.AuxRequest(lse=True, max_scores=True),
    )  # fmt: skip
    assert_matches(aux.lse, torch.full((1, 1, 3), math.log(8), dtype=torch.float64))
    assert_matches(aux.max_scores, torch.zeros(1, 1, 3, dtype=torch.float64))


def test_P071_in_half_precision_too(half_lane):
    q, k, v = half_lane.qkv((1, 1, 3, 16), (1, 1, 8, 16))
    _, lse = flexmod.flex_attention(q * 0, k, v, return_lse=True, backend=half_lane.backend)
    assert lse.dtype == torch.float32
    assert_matches(lse, torch.full((1, 1, 3), math.log(8), dtype=torch.float64))


def test_P028_the_oracle_reads_it_so_too():
    assert visible(precedence, 2, 1, 2, 2)[:, 0].tolist() == [
        [[True, True], [True, True]],
        [[False, True], [False, False]],
    ]
