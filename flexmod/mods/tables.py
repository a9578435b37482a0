"""Score mods that look a bias up in a table."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flexmod.errors import ArgumentError
from flexmod.mods.arguments import Device, ScoreMod, reals, whole


def bias(table: Tensor | Sequence, device: Device = None) -> ScoreMod:
    """score + table[b, h, i, j]; axes of extent 1 are shared.

    table: floats [B|1, H|1, Q|1, KV|1]; leading axes may be left out: [Q, KV], [H, Q, KV].
    Example: `bias(torch.zeros(4, 1, 1))` is one number for each of 4 heads.
    """
    shapes = ("[KV]", "[Q, KV]", "[H, Q, KV]", "[B, H, Q, KV]")
    table = reals("table", table, shapes, device)
    shared = [extent == 1 for extent in table.shape]

    def bias(score, b, h, q_idx, kv_idx):
        place = (b, h, q_idx, kv_idx)[4 - len(shared) :]
        index = (0 if one else at for one, at in zip(shared, place, strict=True))
        return score + table[tuple(index)]

    return bias


def relative_bias(table: Tensor | Sequence, clamp: bool = True, device: Device = None) -> ScoreMod:
    """score + table[h, j - i + R - 1]: one learned number for each signed distance.

    table: floats [H, 2R-1] or [2R-1] for distances -(R-1)..R-1. Farther keys take the entry of
    the nearest end; clamp=False saves that step where |i - j| < R always holds.
    Example: `relative_bias([0.5, 0.0, -0.5])` (R = 2) adds 0.5 to all past keys.
    Source: clipped distances as in Shaw et al. (2018).
    """
    table = reals("table", table, ("[2R-1]", "[H, 2R-1]"), device)
    entries = table.shape[-1]
    if entries % 2 == 0:
        raise ArgumentError(f"table must have an odd last axis 2R-1, got {list(table.shape)}")
    by_head, middle = table.dim() == 2, entries // 2

    def relative_bias(score, b, h, q_idx, kv_idx):
        entry = kv_idx - q_idx + middle
        if clamp:
            entry = torch.clamp(entry, 0, entries - 1)
        return score + (table[h, entry] if by_head else table[entry])

    return relative_bias


def t5_buckets(
    num_buckets: int, bidirectional: bool = True, max_distance: int = 128, device: Device = None
) -> Tensor:
    """Buckets [2*max_distance+1] int64 of the distances j - i = -max_distance..max_distance.

    Half the buckets (of each direction, if bidirectional) hold one distance each, the others
    grow logarithmically up to max_distance, from where on all distances share the last.
    Example: `t5_buckets(4, False, 4)` is [3, 3, 2, 1, 0, 0, 0, 0, 0].
    """
    least = 4 if bidirectional else 2
    if whole("num_buckets", num_buckets, least) % (2 if bidirectional else 1):
        raise ArgumentError(f"num_buckets must be even if bidirectional, got {num_buckets}")
    side = num_buckets // 2 if bidirectional else num_buckets
    exact = side // 2
    whole("max_distance", max_distance, exact + 1)
    offset = torch.arange(-max_distance, max_distance + 1, device=device)
    distance = offset.abs() if bidirectional else (-offset).clamp(min=0)
    # fp32 and this order of steps: buckets at the edges must be those of trained checkpoints.
    growth = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    coarse = (exact + (growth * (side - exact)).long()).clamp(max=side - 1)
    bucket = torch.where(distance < exact, distance, coarse)
    return bucket + side * (offset > 0) if bidirectional else bucket


def t5_bias(
    table: Tensor | Sequence,
    bidirectional: bool = True,
    max_distance: int = 128,
    device: Device = None,
) -> ScoreMod:
    """score + table[bucket(j - i), h]: T5's bucketed relative positions.

    table: floats [num_buckets, H], the weight of a trained embedding as it is. The buckets are
    looked up in a table made here (`t5_buckets`), on the device of `table`.
    Example: `t5_bias(weight, bidirectional=False)` for a decoder. Source: T5 (2019).
    """
    table = reals("table", table, ("[num_buckets, H]",), device)
    buckets = t5_buckets(table.shape[0], bidirectional, max_distance, table.device)

    def t5_bias(score, b, h, q_idx, kv_idx):
        offset = torch.clamp(kv_idx - q_idx, -max_distance, max_distance)
        return score + table[buckets[offset + max_distance], h]

    return t5_bias


def swin_2d_bias(
    height: int, width: int, table: Tensor | Sequence, device: Device = None
) -> ScoreMod:
    """score + table[(dy + height - 1) * (2*width - 1) + dx + width - 1, h].

    Tokens are a height x width window, row by row; dy, dx are query minus key.
    table: floats [(2*height-1) * (2*width-1), H].
    Example: `swin_2d_bias(8, 8, torch.zeros(225, 4))`. Source: Swin Transformer (2021).
    """
    height, width = whole("height", height), whole("width", width)
    table = reals("table", table, ("[(2*height-1)*(2*width-1), H]",), device)
    entries = (2 * height - 1) * (2 * width - 1)
    if table.shape[0] != entries:
        raise ArgumentError(f"table must have {entries} rows, got {list(table.shape)}")

    def swin_2d_bias(score, b, h, q_idx, kv_idx):
        down = q_idx // width - kv_idx // width + (height - 1)
        right = q_idx % width - kv_idx % width + (width - 1)
        return score + table[down * (2 * width - 1) + right, h]

    return swin_2d_bias
