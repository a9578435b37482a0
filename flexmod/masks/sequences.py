"""Masks made from lengths, ids, spans or parents: what a batch holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexmod.errors import ArgumentError
from flexmod.masks.arguments import MaskMod, integers, per_batch, whole

Device = torch.device | str | None


def prefix_lm(lengths: int | Tensor | Sequence[int], device: Device = None) -> MaskMod:
    """The first `lengths` keys are seen by all queries; the rest is causal.

    lengths: an int, or integers [B], one for each sequence of the batch.
    Example: `prefix_lm(2)` on 4 tokens: rows see 2, 2, 3, 4 keys.
    Source: the prefix LM of T5 (2019).
    """
    length = per_batch("lengths", lengths, device=device)

    def prefix_lm(b, h, q_idx, kv_idx):
        return (kv_idx < length(b)) | (kv_idx <= q_idx)

    return prefix_lm


def document(
    ids: Tensor | Sequence,
    kv_ids: Tensor | Sequence | None = None,
    ignore: int | None = None,
    device: Device = None,
) -> MaskMod:
    """Query and key must carry the same id: packed sequences, image spans.

    ids: integers [S] or [B, S], in any order. kv_ids: those of the keys, if not the same.
    ignore: an id that stands for "none": such positions see nothing and are not seen.
    Example: `document([0, 0, 1, 1, 1])`: rows see 2, 2, 3, 3, 3 keys; with `ignore=0` they see
    0, 0, 3, 3, 3. `and_masks(causal(), document(ids))` is the mask of packed language-model data.
    """
    q_table = integers("ids", ids, ("[S]", "[B, S]"), device)
    kv_table = q_table
    if kv_ids is not None:
        kv_table = integers("kv_ids", kv_ids, ("[S]", "[B, S]"), device)
    if ignore is not None:
        ignore = whole("ignore", ignore, low=None)
    q_batched, kv_batched = q_table.dim() == 2, kv_table.dim() == 2

    def document(b, h, q_idx, kv_idx):
        mine = q_table[b, q_idx] if q_batched else q_table[q_idx]
        other = kv_table[b, kv_idx] if kv_batched else kv_table[kv_idx]
        if ignore is None:
            return mine == other
        return (mine == other) & (mine != ignore)

    return document


def document_ids(lengths: Tensor | Sequence[int], device: Device = None) -> Tensor:
    """Ids [sum(lengths)] int64 of sequences packed one after the other, for `document`.

    Example: `document_ids([2, 0, 3])` is [0, 0, 2, 2, 2].
    """
    table = integers("lengths", lengths, ("[N]",), device)
    return torch.repeat_interleave(torch.arange(len(table), device=table.device), table)


def padding(
    lengths: int | Tensor | Sequence[int], queries: bool = False, device: Device = None
) -> MaskMod:
    """Only the first `lengths` keys (an int, or integers [B]) are visible.

    Rows past the length still see those keys; with queries=True they see nothing (output 0).
    Padding on the left is `not_mask(padding(pad_counts))`.
    Example: `padding([3, 1])` on 4 keys: each row of sequence 0 sees 3 keys, of sequence 1 one.
    """
    length = per_batch("lengths", lengths, device=device)

    def padding(b, h, q_idx, kv_idx):
        if queries:
            return (kv_idx < length(b)) & (q_idx < length(b))
        return kv_idx < length(b)

    return padding


def key_padding(keep: Tensor | Sequence, device: Device = None) -> MaskMod:
    """Key j of sequence b is visible where keep[b, j] is true: a tokenizer's attention mask.

    keep: bool or 0/1 integers [B, KV] or [KV].
    Example: `key_padding([[0, 1, 1]])`: each row sees keys 1 and 2.
    """
    table = integers("keep", keep, ("[KV]", "[B, KV]"), device, flags=True)
    batched = table.dim() == 2

    def key_padding(b, h, q_idx, kv_idx):
        return (table[b, kv_idx] if batched else table[kv_idx]) != 0

    return key_padding


def span_intervals(lo: Tensor | Sequence, hi: Tensor | Sequence, device: Device = None) -> MaskMod:
    """Query i sees the keys lo[i]..hi[i]-1; none where hi[i] <= lo[i].

    lo, hi: integers [Q] or [B, Q], of one shape.
    Example: `span_intervals([0, 2, 1], [2, 5, 1])`: rows see 2, 3, 0 keys.
    """
    low = integers("lo", lo, ("[Q]", "[B, Q]"), device)
    high = integers("hi", hi, ("[Q]", "[B, Q]"), device)
    if low.shape != high.shape:
        shapes = f"lo {list(low.shape)}, hi {list(high.shape)}"
        raise ArgumentError(f"lo and hi must have one shape, got {shapes}")
    batched = low.dim() == 2

    def span_intervals(b, h, q_idx, kv_idx):
        start, end = (t[b, q_idx] if batched else t[q_idx] for t in (low, high))
        return (kv_idx >= start) & (kv_idx < end)

    return span_intervals


def block_diffusion(length: int, block: int) -> MaskMod:
    """Training mask of block diffusion over 2*length tokens: a noisy copy, then the clean one.

    A noisy token sees its own noisy block and the clean blocks before it. A clean token sees
    clean blocks up to its own, and no noisy token. The last block may be shorter.
    Example: `block_diffusion(4, 2)`: rows see 2, 2, 4, 4 and 2, 2, 4, 4 keys.
    Source: Block Diffusion, BD3-LM (2025).
    """
    length, block = whole("length", length), whole("block", block)

    def block_diffusion(b, h, q_idx, kv_idx):
        q_noisy, kv_noisy = q_idx < length, kv_idx < length
        mine = torch.where(q_noisy, q_idx, q_idx - length) // block
        other = torch.where(kv_noisy, kv_idx, kv_idx - length) // block
        among_noisy = q_noisy & kv_noisy & (mine == other)
        noisy_to_clean = q_noisy & ~kv_noisy & (mine > other)
        among_clean = ~q_noisy & ~kv_noisy & (mine >= other)
        return among_noisy | noisy_to_clean | among_clean

    return block_diffusion


def tree(
    parents: Tensor | Sequence,
    prefix: int | Tensor | Sequence[int] = 0,
    device: Device = None,
) -> MaskMod:
    """Draft tokens of a tree: each sees itself, its ancestors, and `prefix` keys before them.

    parents: integers [T] or [B, T]; parents[i] < i is the parent of token i, -1 marks a root.
    prefix: an int, or integers [B]: query i is draft token i, key prefix + i is draft token i,
    and keys after the draft are not seen.
    Example: `tree([-1, 0, 0, 1])`: token 3 sees 0, 1, 3, but not its uncle 2.
    Source: SpecInfer (2023), Medusa (2024).
    """
    table = ancestors(integers("parents", parents, ("[T]", "[B, T]"), device))
    batched, count = table.dim() == 3, table.shape[-1]
    before = per_batch("prefix", prefix, device=device)

    def tree(b, h, q_idx, kv_idx):
        token = kv_idx - before(b)
        # Keys outside the draft look up some draft token and are overruled.
        known = torch.clamp(token, 0, count - 1)
        related = table[b, q_idx, known] if batched else table[q_idx, known]
        return (token < 0) | (related & (token < count))

    return tree


def ancestors(parents: Tensor) -> Tensor:
    """Bool [(B,) T, T]: entry (i, j) is true if j is i or an ancestor of i."""
    count = parents.shape[-1]
    rows = parents.reshape(-1, count).to("cpu", torch.int64)
    if ((rows < -1) | (rows >= torch.arange(count, device="cpu"))).any():
        raise ArgumentError(
            "parents must hold -1 (a root) or an index below the token's own: "
            "number the tokens so that each comes after its parent"
        )
    batch = torch.arange(len(rows), device="cpu")
    table = torch.eye(count, dtype=torch.bool, device="cpu").repeat(len(rows), 1, 1)
    for token in range(count):
        parent = rows[:, token]
        table[:, token] |= table[batch, parent] & (parent >= 0)[:, None]
    return table.reshape(*parents.shape, count).to(parents.device)
