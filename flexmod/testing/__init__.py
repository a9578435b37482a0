"""What a user needs to test mods of his own: an oracle, and how to compare with it.

Example:
    >>> expected, lse, _ = naive(query, key, value, score_mod, mask_mod)
    >>> assert_matches(flex_attention(query, key, value, score_mod, mask_mod), expected)
"""

from __future__ import annotations

from .block_masks import check_block_mask
from .compare import assert_matches
from .oracle import naive, naive_same_dtype, visible

__all__ = ["assert_matches", "check_block_mask", "naive", "naive_same_dtype", "visible"]
