from __future__ import annotations

import pytest
import torch

from flexmod import masks

B, H = 2, 2
RAGGED = (13, 17)


def dense(mod, q_len, kv_len, batch=B, heads=H):
    """[batch, heads, q_len, kv_len] bool, the mod under one vmap an index."""
    for axis in (3, 2, 1, 0):
        mod = torch.vmap(mod, in_dims=tuple(0 if n == axis else None for n in range(4)))
    return mod(*(torch.arange(extent) for extent in (batch, heads, q_len, kv_len)))


def by_hand(visible, q_len, kv_len, batch=B, heads=H):
    """The same matrix from a plain predicate of Python ints."""
    table = [
        [[[bool(visible(b, h, i, j)) for j in range(kv_len)] for i in range(q_len)]
         for h in range(heads)] for b in range(batch)
    ]  # fmt: skip
    return torch.tensor(table).reshape(batch, heads, q_len, kv_len)


def row_counts(mod, q_len, kv_len=None):
    return dense(mod, q_len, kv_len or q_len, 1, 1)[0, 0].sum(-1).tolist()


def picture(mod, q_len, kv_len=None, b=0):
    rows = dense(mod, q_len, kv_len or q_len)[b, 0].int().tolist()
    return ["".join("x" if cell else "." for cell in row) for row in rows]


IDS = [3, 3, 0, 0, 0, 7, 7, 3, 1, 1, 1, 1, 2, 2, 2, 9, 9]
IDS_BATCH = [[0] * 5 + [1] * 12, [4, 2] * 8 + [4]]
KV_IDS = [0, 7] * 8 + [3]
LOW, HIGH = [0, 2, 5, 9, 16, 3, 3, 0, 8, 8, 1, 0, 15], [1, 9, 5, 17, 17, 2, 4, 17, 8, 9, 3, 0, 17]
KEEP = [[1, 0, 1, 1] * 4 + [0], [0] * 16 + [1]]
PARENTS = [-1, 0, 0, 1, 1, 2, -1, 6, 3]
PARENTS_BATCH = [PARENTS, [-1, 0, 1, 2, 3, 4, 5, 6, 7]]


def together(i, j, size):
    """Both lie in one of the ranges 0..size-1, size..2*size-1, ..."""
    starts = range(0, 24, size)
    return any({i, j} <= set(range(start, start + size)) for start in starts)


def is_ancestor(parents, i, j):
    while i != j and i >= 0:
        i = parents[i]
    return i == j


def nearest(at, extent, kernel):
    """The kernel positions of range(extent) nearest to `at`; of two as near, the lower first."""
    return sorted(range(extent), key=lambda other: (abs(other - at), other))[:kernel]


def in_neighbourhood(i, j, height, width, tall, wide):
    rows, columns = nearest(i // width, height, tall), nearest(i % width, width, wide)
    return j // width in rows and j % width in columns


def diffusion_sees(i, j, length, block):
    (q_copy, q_at), (kv_copy, kv_at) = divmod(i, length), divmod(j, length)
    NOISY, CLEAN = 0, 1
    return (q_copy, kv_copy, q_at // block, kv_at // block) in (
        [(NOISY, NOISY, n, n) for n in range(length)]
        + [(NOISY, CLEAN, n, m) for n in range(length) for m in range(n)]
        + [(CLEAN, CLEAN, n, m) for n in range(length) for m in range(n + 1)]
    )


CASES = {
    "causal": (masks.causal(), RAGGED, lambda b, h, i, j: j in range(i + 1)),
    "window 1": (masks.sliding_window(1), RAGGED, lambda b, h, i, j: i == j),
    "window 5": (masks.sliding_window(5), RAGGED, lambda b, h, i, j: i - j in (0, 1, 2, 3, 4)),
    "window beyond": (masks.sliding_window(99), RAGGED, lambda b, h, i, j: j <= i),
    "centred 5": (masks.sliding_window(5, False), RAGGED,
                  lambda b, h, i, j: i - j in (-2, -1, 0, 1, 2)),
    "centred 4": (masks.sliding_window(4, causal=False), RAGGED,
                  lambda b, h, i, j: i - j in (2, 1, 0, -1)),
    "between": (masks.window_between(2, 4), RAGGED, lambda b, h, i, j: j in range(i - 2, i + 5)),
    "open left": (masks.window_between(None, 3), RAGGED, lambda b, h, i, j: j < i + 4),
    "open right": (masks.window_between(3, None), RAGGED, lambda b, h, i, j: j > i - 4),
    "open": (masks.window_between(None, None), RAGGED, lambda b, h, i, j: True),
    "symmetric": (masks.symmetric_window(3), RAGGED, lambda b, h, i, j: abs(i - j) <= 3),
    "dilated": (masks.dilated_window(3, 4), RAGGED, lambda b, h, i, j: j in (i, i - 4, i - 8)),
    "dilated centred": (masks.dilated_window(4, 3, causal=False), RAGGED,
                        lambda b, h, i, j: j in (i - 6, i - 3, i, i + 3)),
    "sink": (masks.sink_window(3, 2), RAGGED,
             lambda b, h, i, j: j in (i, i - 1, i - 2) or (j < 2 and j <= i)),
    "strided": (masks.strided(4), RAGGED,
                lambda b, h, i, j: j in {*range(i - 3, i + 1), *range(i, -1, -4)}),
    "noop": (masks.noop_mask, RAGGED, lambda b, h, i, j: True),
    "nothing": (masks.nothing_mask, RAGGED, lambda b, h, i, j: False),
    "bidirectional": (masks.bidirectional(), RAGGED, lambda b, h, i, j: True),
    "chunked": (masks.chunked(5), RAGGED, lambda b, h, i, j: together(i, j, 5)),
    "block causal": (masks.block_causal(4), RAGGED, lambda b, h, i, j: j < (i // 4 + 1) * 4),
    "frame block": (masks.frame_block(6, 2), RAGGED,
                    lambda b, h, i, j: i in (0, 1, 6, 7, 12) or j in (0, 1, 6, 7, 12, 13)
                    or together(i, j, 2)),
    "global": (masks.global_tokens(2), RAGGED, lambda b, h, i, j: i in (0, 1) or j in (0, 1)),
    "global 0": (masks.global_tokens(0), RAGGED, lambda b, h, i, j: False),
    "natten 3": (masks.natten_2d(4, 5, 3), (20, 20),
                 lambda b, h, i, j: in_neighbourhood(i, j, 4, 5, 3, 3)),
    "natten even": (masks.natten_2d(5, 4, (2, 4)), (20, 20),
                    lambda b, h, i, j: in_neighbourhood(i, j, 5, 4, 2, 4)),
    "prefix": (masks.prefix_lm(4), RAGGED, lambda b, h, i, j: j < 4 or j <= i),
    "prefix batch": (masks.prefix_lm(torch.tensor([0, 16])), RAGGED,
                     lambda b, h, i, j: j < (0, 16)[b] or j <= i),
    "prefix tensor": (masks.prefix_lm(torch.tensor(6)), RAGGED,
                      lambda b, h, i, j: j < 6 or j <= i),
    "document": (masks.document(IDS), RAGGED, lambda b, h, i, j: IDS[i] == IDS[j]),
    "document batch": (masks.document(torch.tensor(IDS_BATCH, dtype=torch.int32)), RAGGED,
                       lambda b, h, i, j: IDS_BATCH[b][i] == IDS_BATCH[b][j]),
    "document cross": (masks.document(IDS_BATCH, kv_ids=KV_IDS), RAGGED,
                       lambda b, h, i, j: IDS_BATCH[b][i] == KV_IDS[j]),
    "document ignore": (masks.document(IDS, ignore=3), RAGGED,
                        lambda b, h, i, j: IDS[i] == IDS[j] and 3 not in (IDS[i], IDS[j])),
    "padding": (masks.padding(6), RAGGED, lambda b, h, i, j: j < 6),
    "padding batch": (masks.padding([0, 9]), RAGGED, lambda b, h, i, j: j < (0, 9)[b]),
    "padding both": (masks.padding([5, 9], queries=True), RAGGED,
                     lambda b, h, i, j: max(i, j) < (5, 9)[b]),
    "padding left": (masks.not_mask(masks.padding([3, 0])), RAGGED,
                     lambda b, h, i, j: j >= (3, 0)[b]),
    "key padding": (masks.key_padding(KEEP), RAGGED, lambda b, h, i, j: KEEP[b][j]),
    "key padding bool": (masks.key_padding(torch.tensor(KEEP[0]).bool()), RAGGED,
                         lambda b, h, i, j: KEEP[0][j]),
    "spans": (masks.span_intervals(LOW, HIGH), RAGGED,
              lambda b, h, i, j: j in range(LOW[i], HIGH[i])),
    "spans batch": (masks.span_intervals(torch.tensor([LOW, HIGH]), torch.tensor([HIGH, LOW])),
                    RAGGED, lambda b, h, i, j: j in (range(LOW[i], HIGH[i]) if b == 0
                                                     else range(HIGH[i], LOW[i]))),
    "diffusion": (masks.block_diffusion(12, 4), (24, 24),
                  lambda b, h, i, j: diffusion_sees(i, j, 12, 4)),
    "diffusion ragged": (masks.block_diffusion(7, 3), (14, 14),
                         lambda b, h, i, j: diffusion_sees(i, j, 7, 3)),
    "tree": (masks.tree(PARENTS), (9, 9), lambda b, h, i, j: is_ancestor(PARENTS, i, j)),
    "tree batch": (masks.tree(torch.tensor(PARENTS_BATCH)), (9, 9),
                   lambda b, h, i, j: is_ancestor(PARENTS_BATCH[b], i, j)),
    "tree prefix": (masks.tree(PARENTS, prefix=[8, 3]), (9, 17),
                    lambda b, h, i, j: j < (8, 3)[b] or (j - (8, 3)[b] < 9
                    and is_ancestor(PARENTS, i, j - (8, 3)[b]))),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_mask_equals_its_definition(case):
    mod, (q_len, kv_len), visible = CASES[case]
    result = dense(mod, q_len, kv_len)
    assert result.dtype == torch.bool
    assert torch.equal(result, by_hand(visible, q_len, kv_len))


def test_every_mask_has_a_case():
    made = {mod.__name__ for mod, _, _ in CASES.values()}
    helpers = {"and_masks", "or_masks", "not_mask", "compose", "shift", "document_ids"}
    random = {"random_blocks", "bigbird"}
    assert set(masks.__all__) - helpers - random <= made


COUNTS = {
    "sliding_window is w keys": (masks.sliding_window(4), [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]),
    "w keys beside one's own": (masks.window_between(4, 0), [1, 2, 3, 4, 5, 5, 5, 5, 5, 5]),
    "centred, odd": (masks.sliding_window(3, causal=False), [2, 3, 3, 3, 3, 2]),
    "centred, even": (masks.sliding_window(4, causal=False), [2, 3, 4, 4, 4, 3]),
    "radius": (masks.symmetric_window(1), [2, 3, 3, 2]),
    "prefix": (masks.prefix_lm(2), [2, 2, 3, 4]),
    "chunked": (masks.chunked(2), [2, 2, 2, 2, 1]),
    "block causal": (masks.block_causal(2), [2, 2, 4, 4, 5]),
    "document": (masks.document([0, 0, 1, 1, 1]), [2, 2, 3, 3, 3]),
    "document but 0": (masks.document([0, 0, 1, 1, 1], ignore=0), [0, 0, 3, 3, 3]),
    "diffusion": (masks.block_diffusion(4, 2), [2, 2, 4, 4, 2, 2, 4, 4]),
    "natten": (masks.natten_2d(4, 4, 3), [9] * 16),
}


@pytest.mark.parametrize("case", COUNTS)
def test_keys_seen_by_each_row(case):
    mod, counts = COUNTS[case]
    assert row_counts(mod, len(counts)) == counts


PICTURES = {
    "causal": (masks.causal(), 3, 5, ["x....", "xx...", "xxx.."]),
    "dilated": (masks.dilated_window(2, 3), 8, 8,
                ["x.......", ".x......", "..x.....", "x..x....",
                 ".x..x...", "..x..x..", "...x..x.", "....x..x"]),
    "sink": (masks.sink_window(2, 1), 6, 6,
             ["x.....", "xx....", "xxx...", "x.xx..", "x..xx.", "x...xx"]),
    "strided": (masks.strided(3), 8, 8,
                ["x.......", "xx......", "xxx.....", "xxxx....",
                 ".xxxx...", "..xxxx..", "x..xxxx.", ".x..xxxx"]),
    "spans": (masks.span_intervals([0, 2, 1], [2, 5, 1]), 3, 5, ["xx...", "..xxx", "....."]),
    "tree": (masks.tree([-1, 0, 0, 1], prefix=2), 4, 7,
             ["xxx....", "xxxx...", "xxx.x..", "xxxx.x."]),
    "diffusion": (masks.block_diffusion(4, 2), 8, 8,
                  ["xx......", "xx......", "..xxxx..", "..xxxx..",
                   "....xx..", "....xx..", "....xxxx", "....xxxx"]),
    "frame": (masks.frame_block(4, 1), 6, 6,
              ["xxxxxx", "xx..x.", "x.x.x.", "x..xx.", "xxxxxx", "x...xx"]),
    "decode": (masks.shift(masks.causal(), q_offset=3), 2, 6, ["xxxx..", "xxxxx."]),
}  # fmt: skip


@pytest.mark.parametrize("case", PICTURES)
def test_exact_small_matrix(case):
    mod, q_len, kv_len, rows = PICTURES[case]
    assert picture(mod, q_len, kv_len) == rows


def test_corner_of_natten_sees_the_moved_neighbourhood():
    row = dense(masks.natten_2d(4, 4, 3), 16, 16)[0, 0, 0]
    assert row.nonzero().flatten().tolist() == [0, 1, 2, 4, 5, 6, 8, 9, 10]


def test_random_blocks_draws_whole_blocks_once_by_seed():
    mod = masks.random_blocks(13, 17, block=4, count=2, seed=5)
    table = dense(mod, 13, 17, 1, 1)[0, 0]
    blocks = table[::4, ::4]
    assert blocks.sum(-1).tolist() == [2, 2, 2, 2]
    assert torch.equal(table, blocks.repeat_interleave(4, 0).repeat_interleave(4, 1)[:13, :17])
    again = masks.random_blocks(13, 17, block=4, count=2, seed=5)
    assert torch.equal(dense(again, 13, 17, 1, 1)[0, 0], table)
    others = [dense(masks.random_blocks(13, 17, 4, 2, seed), 13, 17, 1, 1) for seed in range(4)]
    assert any(not torch.equal(other, others[0]) for other in others)


def test_bigbird_is_window_globals_and_the_drawn_blocks():
    drawn = dense(masks.random_blocks(30, 30, 4, 2, seed=3), 30, 30)
    expected = by_hand(
        lambda b, h, i, j: abs(i // 4 - j // 4) < 2 or i < 4 or j < 4 or drawn[b, h, i, j], 30, 30
    )
    assert torch.equal(dense(masks.bigbird(30, 4, 3, 1, 2, seed=3), 30, 30), expected)


def test_document_ids_from_lengths():
    assert masks.document_ids([2, 0, 3]).tolist() == [0, 0, 2, 2, 2]
    packed = masks.and_masks(masks.causal(), masks.document(masks.document_ids([2, 3])))
    assert row_counts(packed, 5) == [1, 2, 1, 2, 3]


def test_a_tensor_is_captured_as_it_is():
    ids = torch.tensor([0, 0, 0])
    mod = masks.document(ids)
    ids[1] = 5
    assert row_counts(mod, 3) == [2, 1, 2]


def test_device_moves_lists_and_tensors():
    captured = masks.document([0, 1], device="meta").__closure__
    tensors = [c.cell_contents for c in captured if isinstance(c.cell_contents, torch.Tensor)]
    assert tensors and all(t.device.type == "meta" for t in tensors)
    assert masks.document_ids(torch.tensor([1]), device="cpu").device.type == "cpu"
