"""Attention with any score_mod and mask_mod, from a few lines of Python to fused kernels."""

from flexmod import cache, masks, mods, nn
from flexmod.attention import flex_attention
from flexmod.blocks import BlockMask, create_block_mask, create_mask
from flexmod.errors import (
    ArgumentError,
    BackendError,
    BlockMaskError,
    DeviceError,
    FlexmodError,
    IndexRangeError,
    TraceError,
    UnsupportedError,
)
from flexmod.explain import explain
from flexmod.masks import and_masks, compose, noop_mask, not_mask, or_masks, shift
from flexmod.options import FlexKernelOptions
from flexmod.patch import patch_torch
from flexmod.program import Program, trace
from flexmod.returned import AuxOutput, AuxRequest

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "AuxOutput",
    "AuxRequest",
    "BackendError",
    "BlockMask",
    "BlockMaskError",
    "DeviceError",
    "FlexKernelOptions",
    "FlexmodError",
    "IndexRangeError",
    "Program",
    "TraceError",
    "UnsupportedError",
    "and_masks",
    "cache",
    "compose",
    "create_block_mask",
    "create_mask",
    "explain",
    "flex_attention",
    "masks",
    "mods",
    "nn",
    "noop_mask",
    "not_mask",
    "or_masks",
    "patch_torch",
    "shift",
    "trace",
]
