"""Masks: functions that make a `mask_mod(b, h, q_idx, kv_idx) -> bool`, true where visible.

b, h, q_idx, kv_idx are batch, query head, query position and key position (int64 scalars). A
mask is an ordinary function of them: it runs on tensors, under `torch.vmap` and in the tracer.
Arguments are checked when the mask is made; a wrong one raises ArgumentError. Tensors may live
on any device; lists become tensors on `device`. The inner function bears the factory's name, so
that combined masks print as "and_masks(causal, sliding_window)".

    mask_mod = and_masks(causal(), document(ids), padding(lengths))
"""

from __future__ import annotations

from flexmod.masks.combine import (
    and_masks,
    compose,
    noop_mask,
    not_mask,
    nothing_mask,
    or_masks,
    shift,
)
from flexmod.masks.patterns import (
    bidirectional,
    bigbird,
    block_causal,
    chunked,
    frame_block,
    global_tokens,
    natten_2d,
    random_blocks,
)
from flexmod.masks.sequences import (
    block_diffusion,
    document,
    document_ids,
    key_padding,
    padding,
    prefix_lm,
    span_intervals,
    tree,
)
from flexmod.masks.windows import (
    causal,
    dilated_window,
    sink_window,
    sliding_window,
    strided,
    symmetric_window,
    window_between,
)

__all__ = [
    "and_masks",
    "bidirectional",
    "bigbird",
    "block_causal",
    "block_diffusion",
    "causal",
    "chunked",
    "compose",
    "dilated_window",
    "document",
    "document_ids",
    "frame_block",
    "global_tokens",
    "key_padding",
    "natten_2d",
    "noop_mask",
    "not_mask",
    "nothing_mask",
    "or_masks",
    "padding",
    "prefix_lm",
    "random_blocks",
    "shift",
    "sink_window",
    "sliding_window",
    "span_intervals",
    "strided",
    "symmetric_window",
    "tree",
    "window_between",
]
