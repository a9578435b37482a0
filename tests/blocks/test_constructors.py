"""Maps in closed form and from tables, against classified ones; and what they refuse."""

from __future__ import annotations

import random

import pytest
import torch

import flexmod
from flexmod import BlockMask, masks
from flexmod.errors import ArgumentError, BlockMaskError
from flexmod.testing import check_block_mask

SEEDS = range(8)
SIZES = (4, 8, 16)


def same(made: BlockMask, mask_mod) -> None:
    """The map, its blocks and its transpose are those of a map that was classified."""
    classified = flexmod.create_block_mask(mask_mod, *made.shape, "cpu", made.block_size)
    assert torch.equal(made.dense(), classified.dense())
    assert torch.equal(made.tiles(), classified.tiles())
    rows = made.grid.rows
    assert torch.equal(made.transposed.tiles(rows), classified.transposed.tiles(rows))
    assert [row for row in made.runs.host] == [row for row in classified.runs.host]
    check_block_mask(made, mask_mod)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("causal", [True, False])
def test_windows(seed, causal):
    rng = random.Random(seed)
    window, q_len, kv_len = rng.randrange(1, 30), rng.randrange(1, 70), rng.randrange(1, 70)
    size = tuple(rng.choices(SIZES, k=2))
    made = BlockMask.from_window(
        window, q_len, kv_len, causal=causal, device="cpu", BLOCK_SIZE=size
    )
    same(made, masks.sliding_window(window, causal))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("causal", [True, False])
def test_documents_by_length(seed, causal):
    rng = random.Random(seed)
    lengths = [5, *(rng.randrange(20) for _ in range(rng.randrange(8)))]
    size = tuple(rng.choices(SIZES, k=2))
    ends = torch.tensor([0, *lengths]).cumsum(0)
    mask_mod = masks.document(masks.document_ids(lengths))
    mask_mod = masks.and_masks(mask_mod, masks.causal()) if causal else mask_mod
    for given in ({"lengths": lengths}, {"cu_seqlens": ends}, {"ids": masks.document_ids(lengths)}):
        same(BlockMask.from_documents(**given, causal=causal, BLOCK_SIZE=size), mask_mod)


def test_documents_and_what_comes_after_them():
    made = BlockMask.from_documents(lengths=[10, 12], total=40, BLOCK_SIZE=8)
    same(made, masks.document(masks.document_ids([10, 12, 18])))
    made = BlockMask.from_documents(lengths=[10, 12], total=15, BLOCK_SIZE=8)
    same(made, masks.document(masks.document_ids([10, 5])))


def test_documents_of_a_batch_in_any_order():
    ids = torch.randint(0, 3, (2, 50), generator=torch.Generator().manual_seed(0))
    same(BlockMask.from_documents(ids, BLOCK_SIZE=8), masks.document(ids))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("single", [True, False])
def test_prefixes(seed, single):
    rng = random.Random(seed)
    q_len, kv_len = rng.randrange(1, 70), rng.randrange(1, 70)
    lengths = rng.randrange(40) if single else rng.choices(range(kv_len + 5), k=3)
    size = tuple(rng.choices(SIZES, k=2))
    made = BlockMask.from_prefix_lengths(lengths, q_len, kv_len, device="cpu", BLOCK_SIZE=size)
    same(made, masks.prefix_lm(lengths))


@pytest.mark.parametrize("mask_mod", [None, masks.causal()])
def test_tables_and_chosen_blocks(mask_mod):
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(0, 2, (2, 3, 5, 6), generator=generator).bool()
    made = BlockMask.from_dense_blocks(table, mask_mod, (37, 44), BLOCK_SIZE=8)
    tokens = table.repeat_interleave(8, 2).repeat_interleave(8, 3)[:, :, :37, :44]
    if mask_mod is not None:
        tokens = tokens & flexmod.create_mask(mask_mod, 1, 1, 37, 44, "cpu")
    assert torch.equal(made.dense(), tokens)
    check_block_mask(made, exact=False)
    chosen = torch.stack(
        [torch.where(table, torch.arange(6), -1), torch.full_like(table, -1).long()]
    )
    again = BlockMask.from_topk(chosen[0].flip(-1), 44, mask_mod, 37, BLOCK_SIZE=8)
    assert torch.equal(again.tiles(), made.tiles()) and torch.equal(again.dense(), tokens)


def test_a_table_of_kinds():
    kinds = flexmod.create_block_mask(masks.causal(), None, None, 60, 60, "cpu", 16).tiles()
    made = BlockMask.from_dense_blocks(kinds, masks.causal(), (60, 60), BLOCK_SIZE=16)
    same(made, masks.causal())


ZEROS = torch.zeros(1, 1, 2, dtype=torch.int32)
PAIRS = torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32)
LISTS = {
    "kv_num_blocks": [(ZEROS.float(), PAIRS), (ZEROS + 3, PAIRS), (ZEROS - 1, PAIRS),
                      (ZEROS[0], PAIRS)],
    "kv_indices": [(ZEROS, PAIRS.float()), (ZEROS + 2, PAIRS + 1), (ZEROS + 2, -PAIRS),
                   (ZEROS + 2, PAIRS.flip(-1)), (ZEROS + 2, PAIRS * 0), (ZEROS, PAIRS[0])],
    "full_kv_num_blocks": [(ZEROS, PAIRS, None, PAIRS), (ZEROS, PAIRS, ZEROS + 9, PAIRS)],
    "full_kv_indices": [(ZEROS, PAIRS, ZEROS + 1, PAIRS + 2), (ZEROS + 1, PAIRS, ZEROS + 1, PAIRS)],
}  # fmt: skip


@pytest.mark.parametrize(
    "named,given", [(name, given) for name, many in LISTS.items() for given in many]
)
def test_index_lists_that_are_wrong(named, given):
    with pytest.raises(BlockMaskError, match=named):
        BlockMask.from_kv_blocks(*given, BLOCK_SIZE=16)


REFUSED = {
    "ids, lengths": lambda: BlockMask.from_documents(),
    "ids and lengths": lambda: BlockMask.from_documents([0, 1], lengths=[1, 1]),
    "lengths must be integers": lambda: BlockMask.from_documents(lengths=[1.5]),
    "lengths must have shape": lambda: BlockMask.from_documents(lengths=[[1, 2]]),
    "cu_seqlens": lambda: BlockMask.from_documents(cu_seqlens=[]),
    "ids must have shape": lambda: BlockMask.from_documents(torch.zeros(2, 2, 2, dtype=torch.long)),
    "Q_LEN": lambda: BlockMask.from_window(4, -1),
    "KV_LEN": lambda: BlockMask.from_prefix_lengths(4, 8, 1.5),
    "window": lambda: BlockMask.from_window(0, 8),
    "BLOCK_SIZE": lambda: BlockMask.from_window(4, 8, BLOCK_SIZE=0),
    "indices must lie": lambda: BlockMask.from_topk(torch.full((1, 1, 2, 1), 9), 512),
    "indices must be": lambda: BlockMask.from_topk(torch.zeros(2, 2, dtype=torch.long), 512),
    "blocks must be": lambda: BlockMask.from_dense_blocks(torch.zeros(3, 2, 2, dtype=torch.long)),
    "blocks must hold": lambda: BlockMask.from_dense_blocks(torch.full((2, 2), 3)),
    "seq_lengths": lambda: BlockMask.from_dense_blocks(
        torch.ones(2, 2).bool(), seq_lengths=(999, 5)
    ),
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_constructors_refuse(named):
    with pytest.raises(ArgumentError, match=named):
        REFUSED[named]()
