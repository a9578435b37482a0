"""Block maps of random masks against looking at every element."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flexmod
from flexmod import masks
from flexmod.blocks import classify
from flexmod.blocks.elements import look

GRAMMAR = runpy.run_path(str(Path(__file__).parents[1] / "program/mask_grammar.py"))
EMPTY, PARTIAL, FULL = 0, 1, 2
SIDES = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16, 32])
SHAPES = st.tuples(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 50), st.integers(1, 50), SIDES, SIDES
)


def by_hand(dense, block):
    """Kinds of blocks [B, H, rows, columns] from the mask itself; one cut short is never full."""
    q_len, kv_len = dense.shape[2:]
    rows, columns = -(-q_len // block[0]), -(-kv_len // block[1])
    padding = (0, columns * block[1] - kv_len, 0, rows * block[0] - q_len)
    counts = torch.nn.functional.pad(dense.int(), padding)
    counts = counts.unflatten(3, (columns, block[1])).unflatten(2, (rows, block[0])).sum((3, 5))
    kinds = torch.where(counts == block[0] * block[1], FULL, PARTIAL)
    return torch.where(counts == 0, EMPTY, kinds)


@settings(max_examples=200, deadline=None)
@given(mask=GRAMMAR["MASKS"], shape=SHAPES)
def test_random_masks_are_classified_exactly(mask, shape):
    *extents, block_q, block_kv = shape
    made = flexmod.create_block_mask(mask, *extents, BLOCK_SIZE=(block_q, block_kv))
    dense = mask.dense(*extents)
    assert torch.equal(made.dense(), dense)
    assert torch.equal(made.tiles().int(), by_hand(dense, (block_q, block_kv)).int()), repr(mask)


IDS = torch.tensor([[0] * 11 + [1] * 20 + [2] * 26, [0] * 30 + [1] * 27])
KEEP = torch.rand(3, 57, 57) < 0.7
BATCHED = {
    "documents of each batch": (masks.document(IDS), 2, None),
    "lengths of each batch": (masks.padding([40, 7], [57, 9]), 2, None),
    "heads": (lambda b, h, q, k: q - k <= 8 * h, None, 3),
    "batches and heads": (lambda b, h, q, k: (q + k) % (b + 2 * h + 2) < h + 1, 2, 3),
    "the other axis broadcasts": (lambda b, h, q, k: q >= k + 3 * h, 2, 3),
    "a table for each head": (lambda b, h, q, k: KEEP[h, q, k], None, 3),
}


@pytest.mark.parametrize("block", [8, 16, 57, 64, (5, 9), (64, 4)], ids=str)
@pytest.mark.parametrize("name", BATCHED)
def test_batches_and_heads(name, block):
    mask, batch, heads = BATCHED[name]
    made = flexmod.create_block_mask(mask, batch, heads, 57, 57, BLOCK_SIZE=block)
    dense = flexmod.create_mask(mask, batch, heads, 57, 57)
    assert dense.shape == made.shape == (batch or 1, heads or 1, 57, 57)
    pair = (block, block) if isinstance(block, int) else block
    assert torch.equal(made.tiles().int(), by_hand(dense, pair).int())


PATTERNS = {
    "causal": masks.causal(),
    "sliding_window": masks.sliding_window(9),
    "symmetric_window": masks.symmetric_window(5),
    "dilated_window": masks.dilated_window(12, 3),
    "sink_window": masks.sink_window(8, 3),
    "strided": masks.strided(6),
    "chunked": masks.chunked(10),
    "block_causal": masks.block_causal(7),
    "prefix_lm": masks.prefix_lm(13),
    "global_tokens": masks.global_tokens(4),
    "natten_2d": masks.natten_2d(7, 8, 3),
    "bigbird": masks.bigbird(56, 8, 1, 1, 2),
    "noop": flexmod.noop_mask,
    "nothing": masks.nothing_mask,
    "not causal": flexmod.not_mask(masks.causal()),
    "shifted": flexmod.shift(masks.causal(), 20),
}


@pytest.mark.parametrize("lengths", [(56, 56), (33, 56), (56, 20), (1, 56)], ids=str)
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name, lengths):
    made = flexmod.create_block_mask(PATTERNS[name], None, None, *lengths, BLOCK_SIZE=8)
    dense = flexmod.create_mask(PATTERNS[name], None, None, *lengths)
    assert torch.equal(made.tiles().int(), by_hand(dense, (8, 8)).int())


def test_a_long_map_is_not_looked_at_element_by_element():
    """10**12 positions; what is visible is known in closed form."""
    length, window, block = 1 << 20, 1000, 128
    made = flexmod.create_block_mask(
        masks.sliding_window(window), None, None, length, length, BLOCK_SIZE=block
    )
    rows = length // block
    empty, partial, full = made.counts()
    # Row n shows n - 8 (cut at the back), n - 7 .. n - 1 and n (cut at the front).
    assert full == sum(min(n, 6) for n in range(rows))
    assert full + partial == sum(min(n, 8) + 1 for n in range(rows))
    assert empty + partial + full == rows * rows


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_no_tokens(lengths):
    made = flexmod.create_block_mask(masks.causal(), 2, None, *lengths, BLOCK_SIZE=4)
    rows, columns = (-(-n // 4) for n in lengths)
    assert made.tiles().shape == (2, 1, rows, columns) and made.dense().shape == (2, 1, *lengths)
    assert not made.tiles().any() and made.numel() == 0


def test_full_blocks_need_not_be_told_apart():
    made = flexmod.create_block_mask(
        masks.causal(), None, None, 64, 64, BLOCK_SIZE=16, separate_full_blocks=False
    )
    assert made.counts() == (6, 10, 0)


@pytest.mark.parametrize("block", [8, 128])
def test_an_index_past_a_table_is_an_error(block):
    """At the latest when the elements of its block are looked at."""
    table = torch.arange(40)
    mask = lambda b, h, q, k: table[q] > k
    with pytest.raises(flexmod.IndexRangeError, match=r"shape \[40\]"):
        flexmod.create_block_mask(mask, None, None, 41, 41, BLOCK_SIZE=block).dense()
    flexmod.create_block_mask(mask, None, None, 40, 41, BLOCK_SIZE=block).dense()


PAIRS = torch.zeros(2, 3, 200, 300)
PAIRS[:, 1, :90] = 2.0
PAIRS[1, :, :, 150:] = -1.0
PAIRS[0, 2, 10, 10] = float("nan")
PAIRS[1, 2, 100, 7] = 1.0 + 1e-6  # nearer to 1 than what an interval may decide
TABLES_OF_PAIRS = {
    "bool": (PAIRS > 1, lambda x: x),
    "int8": (PAIRS.nan_to_num().to(torch.int8), lambda x: x >= 0),
    "int64": (PAIRS.nan_to_num().long(), lambda x: x != 2),
    "float32": (PAIRS, lambda x: x > 1.0),
    "float64": (PAIRS.double(), lambda x: x <= 1.0),
    "bfloat16": (PAIRS.bfloat16(), lambda x: ~(x > -0.5)),
}


@pytest.mark.parametrize("block", [16, 128, (8, 32), (24, 10)], ids=str)
@pytest.mark.parametrize("name", TABLES_OF_PAIRS)
def test_tables_of_pairs(name, block):
    table, compare = TABLES_OF_PAIRS[name]
    pair = (block, block) if isinstance(block, int) else block
    for mask in (
        lambda b, h, q, k: compare(table[b, h, q, k]),
        lambda b, h, q, k: compare(table[0, 2][q, k]) & (q >= k),
        lambda b, h, q, k: compare(table[b, h, q % 7 + 80, k]),
    ):
        made = flexmod.create_block_mask(mask, 2, 3, 200, 300, "cpu", pair)
        dense = flexmod.create_mask(mask, 2, 3, 200, 300, "cpu")
        assert torch.equal(made.tiles().int(), by_hand(dense, pair).int())


def test_whole_blocks_of_a_table_of_pairs_are_not_looked_at(monkeypatch):
    looked = []
    monkeypatch.setattr(
        classify,
        "look",
        lambda p, grid, cells: looked.append(len(cells.row)) or look(p, grid, cells),
    )
    table = torch.zeros(512, 512, dtype=torch.bool)
    table[:256], table[300, 300] = True, True
    made = flexmod.create_block_mask(
        lambda b, h, q, k: table[q, k], None, None, 512, 512, "cpu", 16
    )
    assert made.counts() == (511, 1, 512) and looked == [1]
