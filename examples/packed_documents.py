"""Sequences of unequal length in one row, without padding: each sees only itself, causally."""

from __future__ import annotations

import torch

import flexmod
from flexmod import masks


def main() -> None:
    torch.manual_seed(0)
    lengths = [700, 90, 1258]
    ids = masks.document_ids(lengths)
    total = len(ids)
    query, key, value = torch.randn(3, 1, 4, total, 64)
    mask_mod = masks.and_masks(masks.causal(), masks.document(ids))

    # Made once and used in every layer: deciding the blocks is not repeated.
    block_mask = flexmod.create_block_mask(mask_mod, None, None, total, total)
    out = flexmod.flex_attention(query, key, value, block_mask=block_mask)
    print(block_mask)

    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        parts = (x[:, :, rows] for x in (query, key, value))
        alone = flexmod.flex_attention(*parts, block_mask=masks.causal())
        error = (out[:, :, rows] - alone).abs().max()
        print(f"document of {length:>4} tokens: differs from its own attention by {error:.0e}")
        start += length


if __name__ == "__main__":
    main()
