"""Maps that are cut, joined, combined and copied, against maps made afresh."""

from __future__ import annotations

import copy
import io
import pickle
import random

import pytest
import torch

import flexmod
from flexmod import BlockMask, masks
from flexmod.errors import BlockMaskError
from flexmod.testing import check_block_mask

SEEDS = range(12)


class Case:
    """Two maps of one random shape, and their tokens."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.shape = (rng.choice([1, 2, 3]), rng.choice([1, 2]), *rng.choices(range(1, 70), k=2))
        self.size = tuple(rng.choices([4, 8, 16], k=2))
        batch, heads, q_len, kv_len = self.shape
        ids = torch.randint(0, 4, (batch, max(q_len, kv_len)), generator=generator)
        reach = torch.randint(-3, 40, (heads,), generator=generator)
        choices = [
            masks.causal(),
            masks.noop_mask,
            masks.sliding_window(rng.randrange(1, 20)),
            masks.dilated_window(5, 3),
            lambda b, h, q_idx, kv_idx: ids[b, q_idx] == ids[b, kv_idx],
            lambda b, h, q_idx, kv_idx: q_idx - kv_idx < reach[h],
            lambda b, h, q_idx, kv_idx: (q_idx * 3 + kv_idx) % 5 < 2,
        ]
        self.a, self.b = (
            flexmod.create_block_mask(rng.choice(choices), *self.shape, "cpu", self.size)
            for _ in range(2)
        )
        self.tokens_a, self.tokens_b = self.a.dense(), self.b.dense()


@pytest.fixture(params=SEEDS)
def case(request):
    return Case(request.param)


def holds(block_mask: BlockMask, tokens: torch.Tensor) -> None:
    """The map shows these tokens, its blocks and its transpose agree, and copies are equal."""
    assert block_mask.shape == tokens.shape
    assert torch.equal(block_mask.dense(), tokens)
    check_block_mask(block_mask)
    grid = block_mask.grid
    turned = block_mask.transposed.tiles(grid.rows).view(grid.planes, grid.columns, grid.rows)
    assert torch.equal(turned.mT.flatten(0, 1), block_mask.runs.tiles(grid.columns))
    percent = 100 * float(tokens.double().mean()) if tokens.numel() else 0.0
    assert block_mask.density() == pytest.approx(percent)


def test_parts(case):
    rng, a, tokens = case.rng, case.a, case.tokens_a
    batch, heads = rng.randrange(case.shape[0]), rng.randrange(case.shape[1])
    holds(a[batch], tokens[batch : batch + 1])
    holds(a[:, heads], tokens[:, heads : heads + 1])
    holds(a[batch:, -1], tokens[batch:, -1:])
    holds(a[[batch, 0]], tokens[[batch, 0]])
    high = case.size[0]
    first, last = sorted(rng.choices(range(a.grid.rows + 1), k=2))
    part = a[:, :, first:last]
    holds(part, tokens[:, :, first * high : last * high])
    assert part.offset == (first * high if first < last else 0, 0)
    if last - first > 1:
        holds(part[:, :, 1:], tokens[:, :, (first + 1) * high : last * high])


def test_rows_in_any_order(case):
    high, rows = case.size[0], case.a.grid.rows
    q_len = case.shape[2]
    chosen = case.rng.sample(range(rows), case.rng.randrange(1, rows + 1))
    if q_len % high and rows - 1 in chosen:
        chosen.sort()
    tokens = torch.cat([torch.arange(r * high, min(q_len, (r + 1) * high)) for r in chosen])
    holds(case.a[:, :, torch.tensor(chosen)], case.tokens_a[:, :, tokens])


def test_a_short_block_can_only_come_last():
    block_mask = flexmod.create_block_mask(masks.causal(), None, None, 40, 40, "cpu", 16)
    with pytest.raises(BlockMaskError, match="last block"):
        block_mask[:, :, [2, 0]]


def test_crop_and_pad(case):
    q_len, kv_len = case.shape[2:]
    fewer = case.rng.randrange(q_len + 1), case.rng.randrange(kv_len + 1)
    holds(case.a.crop(*fewer), case.tokens_a[:, :, : fewer[0], : fewer[1]])
    more = q_len + case.rng.randrange(20), kv_len + case.rng.randrange(20)
    padded = torch.nn.functional.pad(case.tokens_a, (0, more[1] - kv_len, 0, more[0] - q_len))
    holds(case.a.pad(*more), padded)
    holds(case.a.pad(*more).crop(q_len, kv_len), case.tokens_a)


def test_shift():
    made = flexmod.create_block_mask(masks.sliding_window(9), None, None, 24, 60, "cpu", 8)
    moved = made.shift(q_offset=30, kv_offset=-1)
    wanted = masks.shift(masks.sliding_window(9), q_offset=30, kv_offset=-1)
    holds(moved, flexmod.create_mask(wanted, 1, 1, 24, 60, "cpu"))
    assert moved.offset == (30, -1)


def test_concat(case):
    a, b, tokens_a, tokens_b = case.a, case.b, case.tokens_a, case.tokens_b
    holds(BlockMask.concat([a, b], "b"), torch.cat([tokens_a, tokens_b]))
    holds(BlockMask.concat([a, a], "b"), torch.cat([tokens_a, tokens_a]))
    holds(BlockMask.concat([a, b, a], "h"), torch.cat([tokens_a, tokens_b, tokens_a], 1))
    q_len, kv_len = (n // s * s for n, s in zip(case.shape[2:], case.size, strict=True))
    above, left = a.crop(q_len=q_len), a.crop(kv_len=kv_len)
    holds(BlockMask.concat([above, b], "q_idx"), torch.cat([tokens_a[:, :, :q_len], tokens_b], 2))
    holds(BlockMask.concat([left, b], "kv_idx"), torch.cat([tokens_a[..., :kv_len], tokens_b], 3))


def test_algebra(case):
    a, b, tokens_a, tokens_b = case.a, case.b, case.tokens_a, case.tokens_b
    holds(a & b, tokens_a & tokens_b)
    holds(a | b, tokens_a | tokens_b)
    holds(a - b, tokens_a & ~tokens_b)
    holds(~a, ~tokens_a)
    holds((a | b) & ~(a & b), tokens_a ^ tokens_b)


def test_algebra_broadcasts_what_the_mask_does_not_read():
    ids = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    rows = flexmod.create_block_mask(masks.document(ids), 2, None, 4, 4, "cpu", 2)
    causal = flexmod.create_block_mask(masks.causal(), None, 3, 4, 4, "cpu", 2)
    holds(rows & causal, (rows.dense() & causal.dense()).expand(2, 3, 4, 4))
    one = flexmod.create_block_mask(masks.document(ids[:1]), 1, None, 4, 4, "cpu", 2)
    with pytest.raises(BlockMaskError, match="B = "):
        rows & one


@pytest.mark.parametrize("wrong", ["lengths", "axis", "nothing", "inside a block"])
def test_maps_that_do_not_fit(wrong):
    make = lambda n: flexmod.create_block_mask(masks.causal(), None, None, n, 40, "cpu", 16)
    with pytest.raises(BlockMaskError):
        if wrong == "lengths":
            make(40) & make(32)
        elif wrong == "axis":
            BlockMask.concat([make(40)], "rows")
        elif wrong == "nothing":
            BlockMask.concat([])
        else:
            BlockMask.concat([make(40), make(40)])


def _saved(block_mask):
    file = io.BytesIO()
    torch.save({"mask": block_mask}, file)
    file.seek(0)
    return torch.load(file)["mask"]  # weights_only, torch's default


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), _saved]
)
def test_copies_and_files(case, copied):
    part = (case.a - case.b)[:, :, 1:]
    again = copied(part)
    holds(again, part.dense())
    assert (again.offset, again.block_size) == (part.offset, part.block_size)
    assert torch.equal(again.tiles(), part.tiles())


def test_a_damaged_file_is_noticed():
    made = flexmod.create_block_mask(masks.causal(), None, None, 64, 64, "cpu", 16)
    restore, (place, text, captures, spans, table) = made.__reduce__()
    with pytest.raises(BlockMaskError, match="runs"):
        restore(place, text, captures, spans, table + 5)
    with pytest.raises(BlockMaskError, match="damaged"):
        structure, *rest = text
        restore(place, (structure.replace("input", "__import__"), *rest), captures, spans, table)


def test_a_stale_map_is_not_cut():
    ids = torch.arange(64) // 16
    made = flexmod.create_block_mask(masks.document(ids), None, None, 64, 64, "cpu", 16)
    ids[0] = 3
    for use in (lambda: made[:, :, 0], lambda: made.crop(8), lambda: ~made, made.__reduce__):
        with pytest.raises(BlockMaskError, match="changed in place"):
            use()


def test_equal_planes_are_stored_once():
    def by_parity(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & ((q_idx - kv_idx < 100) | (h % 2 == 0))

    one = flexmod.create_block_mask(by_parity, None, 2, 1024, 1024, "cpu", 64)
    many = flexmod.create_block_mask(by_parity, None, 64, 1024, 1024, "cpu", 64)
    assert many.runs.table.shape == one.runs.table.shape
    assert torch.equal(many.tiles()[0, -2:], one.tiles()[0])
    assert many.transposed.table.shape == one.transposed.table.shape
