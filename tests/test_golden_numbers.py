"""The numbers that pin the algorithm down: a softmax by hand, tiles counted, values moved."""

from __future__ import annotations

import math

import pytest
import torch

import flexmod
from flexmod import traffic
from flexmod.errors import ArgumentError
from flexmod.testing import assert_matches, naive

QUERY = [[1, 0], [0, 1], [1, 1], [2, 0]]
KEY = [[1, 0], [0, 2], [1, 1], [3, 0]]
VALUE = [[1, 0], [0, 1], [2, 2], [1, 3]]
# The third query's scores are 1, 2 | 2, 3: the running maximum rises between the blocks.
SUM = math.exp(-2) + 2 * math.exp(-1) + 1
OUT = [1.0, (3 + 3 * math.exp(-1)) / SUM]


def _rows(lane, data):
    return torch.tensor(data, device=lane.device, dtype=lane.dtype)[None, None]


@pytest.mark.parametrize("block_q", [1, 2, 4])
def test_softmax_by_hand_in_blocks_of_two(lane, block_q):
    q, k, v = (_rows(lane, data) for data in (QUERY, KEY, VALUE))
    block_mask = flexmod.create_block_mask(
        flexmod.noop_mask, None, None, 4, 4, device=lane.device, BLOCK_SIZE=(block_q, 2)
    )
    assert block_mask.counts() == (0, 0, 4 // block_q * 2)
    out, lse = flexmod.flex_attention(
        q, k, v, block_mask=block_mask, scale=1.0, return_lse=True, backend=lane.backend
    )
    assert out[0, 0, 2].tolist() == pytest.approx([1.0, 2.1932], abs=1e-4)
    assert float(lse[0, 0, 2]) == pytest.approx(3 + math.log(1.8711), abs=1e-4)
    assert out[0, 0, 2].tolist() == pytest.approx(OUT, abs=1e-6)
    assert float(lse[0, 0, 2]) == pytest.approx(3 + math.log(SUM), abs=1e-6)
    assert_matches(out, naive(q, k, v, scale=1.0)[0])


def test_the_numbers_by_hand_are_those_of_the_text():
    assert (SUM, *OUT) == pytest.approx((1.8711, 1.0, 2.1932), abs=1e-4)


def test_a_maximum_that_rises_with_every_block(lane):
    # Without the rescale of sum and output, early keys keep weights of up to e^30 too much.
    q, k, v = lane.qkv((1, 2, 40, 16))

    def rising(s, b, h, i, j):
        return s + 0.75 * j

    block_mask = flexmod.create_block_mask(
        flexmod.noop_mask, None, None, 40, 40, device=lane.device, BLOCK_SIZE=16
    )
    for score_mod in (rising, lambda s, b, h, i, j: s - 0.75 * j):
        out, lse = flexmod.flex_attention(
            q, k, v, score_mod, block_mask, return_lse=True, backend=lane.backend
        )
        expected, expected_lse, _ = naive(q, k, v, score_mod)
        assert_matches(out, expected)
        assert_matches(lse, expected_lse)


def causal(b, h, i, j):
    return i >= j


def test_tiles_of_causal_attention():
    block_mask = flexmod.create_block_mask(
        causal, None, None, 1024, 1024, device="cpu", BLOCK_SIZE=(128, 64)
    )
    assert block_mask.tiles().shape == (1, 1, 8, 16)
    empty, partial, full = block_mask.counts()
    assert (empty, partial + full) == (56, 72)
    assert partial == 16  # two tiles a row meet the diagonal


@pytest.mark.parametrize("blocks", [1, 2, 3, 8, 33])
def test_square_blocks_of_causal_attention(blocks):
    block_mask = flexmod.create_block_mask(
        causal, None, None, 16 * blocks, 16 * blocks, device="cpu", BLOCK_SIZE=16
    )
    below = blocks * (blocks - 1) // 2
    assert block_mask.counts() == (below, blocks, below)
    assert sum(block_mask.counts()[1:]) == blocks * (blocks + 1) // 2


TRAFFIC = [
    (traffic.standard(1024, 64), 4_456_448),
    (traffic.flash2(1024, 64, block_q=128), 1_180_672),
    # All 8 x 16 tiles spelled out are the same as none left out.
    (traffic.flash2(1024, 64, block_q=128, block_kv=64, visited=128), 1_180_672),
    (traffic.flash2(1024, 64, block_q=128, block_kv=64, visited=72), 721_920),
    (traffic.flash2(1024, 64, block_q=128, block_kv=64, visited=0), 132_096),
    (traffic.flash1(1024, 64, block_kv=64), 3_342_336),
    # 1000 tokens are 8 blocks of 128 and 16 of 64, the last ones short.
    (traffic.flash2(1000, 64, block_q=128), 1_153_000),
    (traffic.flash1(1000, 64, block_kv=64), 3_264_000),
    (traffic.tile_sizes(25_600, 64), (64, 100)),
    (traffic.tile_sizes(25_601, 64), (64, 101)),
    (traffic.tile_sizes(8_192, 64), (32, 32)),
    (traffic.score_matrix_bytes(2048), 8 * 2**20),
    (traffic.score_matrix_bytes(8192), 128 * 2**20),
    (traffic.score_matrix_bytes(32768), 2048 * 2**20),
    (traffic.score_matrix_bytes(8192, heads=32), 4 * 2**30),
    (traffic.lse_bytes(8192, heads=32), 2**20),
]


@pytest.mark.parametrize("got,expected", TRAFFIC)
def test_traffic(got, expected):
    assert got == expected


REFUSED = [
    lambda: traffic.standard(0, 64),
    lambda: traffic.flash1(1024, 64, 0),
    lambda: traffic.flash2(1024, 64, 128, visited=3),
    lambda: traffic.flash2(1024, 64, 128, 64, visited=129),
    lambda: traffic.flash2(1024, 64, 128, 64, visited=-1),
    lambda: traffic.tile_sizes(0, 64),
]


@pytest.mark.parametrize("call", REFUSED)
def test_traffic_refuses(call):
    with pytest.raises(ArgumentError):
        call()
