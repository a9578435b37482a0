"""Block maps as torch's lists, as runs and as text, and what they refuse."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as torchs

import flexmod
from flexmod import ArgumentError, BlockMask, BlockMaskError, masks
from flexmod.blocks.memory import in_blocks_of
from flexmod.blocks.runs import Runs
from flexmod.testing import check_block_mask

VIEWS = """kv_num_blocks kv_indices full_kv_num_blocks full_kv_indices q_num_blocks q_indices
full_q_num_blocks full_q_indices""".split()
IDS = torch.arange(96) // 30
MASKS = {
    "causal": (masks.causal(), None, None, 96, 96),
    "window": (masks.sliding_window(20), None, None, 96, 96),
    "documents": (lambda b, h, q, k: IDS[q] == IDS[k], None, None, 96, 96),
    "heads": (lambda b, h, q, k: q - k >= 16 * h, None, 3, 96, 64),
    "batches": (lambda b, h, q, k: k < 32 * (b + 1), 2, None, 64, 96),
    "everything": (flexmod.noop_mask, None, None, 64, 32),
    "nothing": (masks.nothing_mask, None, None, 64, 64),
    "ragged": (masks.causal(), None, None, 90, 75),
}
TILES = st.integers(1, 6).flatmap(
    lambda columns: st.lists(
        st.lists(st.integers(0, 2), min_size=columns, max_size=columns), min_size=1, max_size=6
    )
)


@pytest.mark.parametrize("name", MASKS)
def test_lists_are_those_of_torch(name):
    mask, batch, heads, *lengths = MASKS[name]
    ours = flexmod.create_block_mask(mask, batch, heads, *lengths, BLOCK_SIZE=16)
    theirs = torchs.create_block_mask(mask, batch, heads, *lengths, device="cpu", BLOCK_SIZE=16)
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE and ours.seq_lengths == theirs.seq_lengths
    for view in VIEWS:
        mine, other = getattr(ours, view), getattr(theirs, view)
        assert mine.dtype == torch.int32 and mine.shape == other.shape, view
        if view.endswith("num_blocks"):
            assert torch.equal(mine, other), view
            continue
        counts = getattr(ours, view.replace("indices", "num_blocks"))
        chosen = torch.arange(mine.shape[-1]) < counts[..., None]
        assert torch.equal(mine[chosen], other[chosen]), view
        assert torch.equal(mine.sort(-1).values, torch.arange(mine.shape[-1]).expand(mine.shape))
    assert torch.equal(ours.to_dense(), theirs.to_dense())


def test_as_tuple_has_torchs_order():
    made = flexmod.create_block_mask(masks.causal(), None, None, 64, 48, BLOCK_SIZE=16)
    q_len, kv_len, *lists, block_q, block_kv, mod = made.as_tuple()
    assert (q_len, kv_len, block_q, block_kv) == (64, 48, 16, 16) and mod is made.mask_mod
    lengths, *_, block, _ = made.as_tuple(flatten=False)
    assert (lengths, block) == ((64, 48), (16, 16))
    assert all(torch.equal(a, getattr(made, v)) for a, v in zip(lists, VIEWS, strict=True))
    with pytest.raises(AttributeError, match="no attribute 'kv_blocks'"):
        _ = made.kv_blocks


@settings(max_examples=100, deadline=None)
@given(table=TILES)
def test_runs_keep_every_tile(table):
    tiles = torch.tensor(table, dtype=torch.int8)
    runs = Runs.from_tiles(tiles)
    assert torch.equal(runs.tiles(tiles.shape[1]), tiles)
    assert runs.counts() == (int((tiles == 1).sum()), int((tiles == 2).sum()))
    assert runs.rows == len(tiles) and runs.spans.dtype == runs.table.dtype == torch.int32
    for row, spans in zip(table, runs.host, strict=True):
        rebuilt = [0] * len(row)
        for start, stop, full in spans:
            assert start < stop
            rebuilt[start:stop] = [2 if full else 1] * (stop - start)
        assert rebuilt == row
        # A run that touches its neighbour is of the other kind: runs are as long as can be.
        assert all(a[1] < b[0] or a[2] != b[2] for a, b in pairwise(spans))


@pytest.mark.parametrize("name", MASKS)
def test_lists_make_the_same_map_again(name):
    mask, batch, heads, *lengths = MASKS[name]
    made = flexmod.create_block_mask(mask, batch, heads, *lengths, BLOCK_SIZE=16)
    lists = [getattr(made, v) for v in VIEWS[:4]]
    again = BlockMask.from_kv_blocks(*lists, 16, mask, tuple(lengths))
    assert again.shape == made.shape
    assert torch.equal(again.tiles(), made.tiles()) and torch.equal(again.dense(), made.dense())


@settings(max_examples=50, deadline=None)
@given(table=TILES)
def test_lists_without_a_mask_are_obeyed(table):
    tiles = torch.tensor(table)[None, None]
    counts, indices = (
        [(tiles == kind).sum(-1).int() for kind in (1, 2)],
        [torch.argsort((tiles != kind).int(), dim=-1, stable=True).int() for kind in (1, 2)],
    )
    made = BlockMask.from_kv_blocks(counts[0], indices[0], counts[1], indices[1], BLOCK_SIZE=(2, 3))
    expected = (tiles > 0).repeat_interleave(2, 2).repeat_interleave(3, 3)
    assert torch.equal(made.dense(), expected)
    assert torch.equal(made.to_dense(), (tiles > 0).int())


COUNTS, INDICES = torch.tensor([[[1, 2]]]).int(), torch.tensor([[[[0, 1], [0, 1]]]]).int()
REFUSED = {
    "a float count": ({"kv_num_blocks": COUNTS.float()}, "kv_num_blocks must be int32"),
    "float indices": ({"kv_indices": INDICES.float()}, "kv_indices must be int32"),
    "three axes": ({"kv_indices": INDICES[0]}, "columns"),
    "other rows": ({"kv_num_blocks": COUNTS[..., :1]}, "kv_num_blocks"),
    "too many": ({"kv_num_blocks": COUNTS + 1}, r"\[0, 2\]"),
    "a negative count": ({"kv_num_blocks": COUNTS - 2}, "kv_num_blocks"),
    "an index out of range": ({"kv_indices": INDICES + 1}, r"\[0, 2\)"),
    "a negative index": ({"kv_indices": INDICES - 1}, "kv_indices"),
    "a block twice": ({"kv_indices": INDICES * 0}, "twice"),
    "half of a pair": ({"full_kv_num_blocks": COUNTS}, "together"),
    "other columns": (
        {
            "full_kv_num_blocks": COUNTS * 0,
            "full_kv_indices": torch.zeros(1, 1, 2, 3, dtype=torch.int32),
        },
        "shape",
    ),
    "a block in both": ({"full_kv_num_blocks": COUNTS, "full_kv_indices": INDICES}, "both"),
    "lengths too long": ({"seq_lengths": (33, 32)}, "seq_lengths"),
    "lengths too short": ({"seq_lengths": (16, 32)}, "seq_lengths"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_lists_that_do_not_fit_are_refused(name):
    changes, text = REFUSED[name]
    arguments = {"kv_num_blocks": COUNTS, "kv_indices": INDICES, "BLOCK_SIZE": 16, **changes}
    with pytest.raises(BlockMaskError, match=text):
        BlockMask.from_kv_blocks(**arguments)
    assert BlockMask.from_kv_blocks(COUNTS, INDICES, BLOCK_SIZE=16).shape == (1, 1, 32, 32)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((None, None, 8, 8), "reads b but B is None"),
        ((2, None, 8, 8), "reads h but H is None"),
        ((2, 2, -1, 8), "Q_LEN"),
        ((2, 2, 8, 2.0), "KV_LEN"),
        ((2, 2, 8, None), "KV_LEN"),
        ((True, 2, 8, 8), "B must be"),
        ((2, "2", 8, 8), "H must be"),
    ],
    ids=str,
)
def test_extents_that_do_not_fit_are_refused(arguments, text):
    with pytest.raises(ArgumentError, match=text):
        flexmod.create_block_mask(lambda b, h, q, k: q + b > k + h, *arguments)


@pytest.mark.parametrize("size", [0, -1, (8,), (8, 0), (8, 8, 8), 2.0, "8", None, True], ids=repr)
def test_block_sizes_that_are_none_are_refused(size):
    with pytest.raises(ArgumentError, match="BLOCK_SIZE"):
        flexmod.create_block_mask(masks.causal(), None, None, 8, 8, BLOCK_SIZE=size)


@pytest.mark.parametrize("name", MASKS)
def test_counts_sparsity_and_density(name):
    mask, batch, heads, *lengths = MASKS[name]
    made = flexmod.create_block_mask(mask, batch, heads, *lengths, BLOCK_SIZE=16)
    tiles, dense = made.tiles(), made.dense()
    assert made.counts() == tuple(int((tiles == kind).sum()) for kind in (0, 1, 2))
    assert made.sparsity() == pytest.approx(100 * float((tiles == 0).double().mean()))
    assert made.density() == pytest.approx(100 * float(dense.double().mean()))
    assert made.numel() == dense.numel() and 0 <= made.sparsity() <= 100


def test_another_grid_is_remembered():
    made = flexmod.create_block_mask(masks.causal(), None, None, 64, 64, BLOCK_SIZE=16)
    finer = made.regrid((8, 32))
    assert finer.block_size == (8, 32) and finer is made.regrid((8, 32))
    assert made.regrid((16, 16)) is made
    assert torch.equal(finer.dense(), made.dense())


def test_other_blocks_of_a_mask_that_reads_nothing_are_kept_by_content():
    size = 192, 128
    causal, other = (flexmod.create_block_mask(masks.causal(), 1, 1, 999, 999) for _ in range(2))
    found = in_blocks_of(causal, size)
    assert found is in_blocks_of(other, size)
    assert torch.equal(found.tiles(), causal.regrid(size).tiles())
    assert in_blocks_of(causal, causal.block_size) is causal
    documents = flexmod.create_block_mask(MASKS["documents"][0], 1, 1, 96, 96)
    assert in_blocks_of(documents, size) is documents.regrid(size)


def test_a_changed_capture_makes_a_map_stale():
    ids = torch.arange(32) // 8
    made = flexmod.create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, 32, 32)
    made.check_unchanged()
    ids[0] = 3
    with pytest.raises(BlockMaskError, match="changed in place"):
        made.check_unchanged()
    q = torch.randn(1, 1, 32, 8)
    with pytest.raises(BlockMaskError, match="make the block mask again"):
        flexmod.flex_attention(q, q, q, block_mask=made)


def test_pictures():
    """A line shows two rows of blocks."""
    made = flexmod.create_block_mask(masks.causal(), None, None, 64, 64, BLOCK_SIZE=16)
    assert made.to_string().splitlines()[-2:] == ["▓▄  ", "██▓▄"]
    assert "sparsity=37.50%" in str(made) and "shape=(1, 1, 64, 64)" in str(made)
    heads = flexmod.create_block_mask(lambda b, h, q, k: q >= k * h, None, 6, 64, 64, BLOCK_SIZE=16)
    assert "2 more" in heads.to_string(limit=4) and "more" not in heads.to_string(limit=6)
    assert made.to_string(grid_size=2).splitlines()[-1] == "▓▄"
    assert made.to_string((1, 2)).splitlines()[-1] == "▀▀"
    nothing = flexmod.create_block_mask(masks.nothing_mask, None, None, 64, 64, BLOCK_SIZE=16)
    assert set(nothing.to_string()) <= {" ", "\n"}


@pytest.mark.parametrize(
    "shape", [(1, 1, 20, 33), (2, 3, 16, 8), (2, 1, 1, 50), (1, 1, 0, 5), (1, 2, 5, 0)]
)
def test_from_dense_holds_the_table(shape):
    visible = torch.rand(shape) < 0.5
    visible[..., 8:24] = True
    visible[..., 32:40] = False
    made = BlockMask.from_dense(visible, 8)
    assert made.shape == shape and torch.equal(made.dense(), visible)
    if visible.numel():
        check_block_mask(made)


@pytest.mark.parametrize(
    "wrong", [torch.ones(2, 2, dtype=torch.bool), torch.ones(1, 1, 2, 2), None]
)
def test_from_dense_refuses(wrong):
    with pytest.raises(flexmod.BlockMaskError, match="visible must be bool"):
        BlockMask.from_dense(wrong)
