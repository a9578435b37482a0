"""What a user needs to test mods of his own: an oracle, and how to compare with it.

Example:
    >>> import flexmod, torch
    >>> query = key = value = torch.ones(1, 1, 4, 8)
    >>> causal = flexmod.masks.causal()
    >>> expected, lse, _ = naive(query, key, value, mask_mod=causal)
    >>> assert_matches(flexmod.flex_attention(query, key, value, None, causal), expected)
"""

from __future__ import annotations

from .block_masks import check_block_mask
from .compare import assert_matches
from .oracle import naive, naive_same_dtype, visible

__all__ = ["assert_matches", "check_block_mask", "naive", "naive_same_dtype", "visible"]
