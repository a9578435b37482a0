"""Which probabilities dropout keeps: a function of (seed, b, h, q_idx, kv_idx) and nothing else.

A counter-based generator, Philox2x32 with ten rounds (Salmon et al., 2011, "Parallel random
numbers: as easy as 1, 2, 3"): counter (kv_idx, q_idx), key from the seed, b and h. The kernels
compute the same bits (`dropout_keep` in templates/functions.py.jinja), whatever their tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIER, _WEYL = 0xD256D193, 0x9E3779B9
_ROUNDS = 10


def keep(seed: int, p: float, indices: dict[str, Tensor]) -> Tensor:
    """True where a probability is kept; of the broadcast shape of the four indices.

    Each is kept with probability 1 - p, to within 2**-32.
    """
    key = _mix(torch.tensor(seed & _MASK, device=indices["b"].device))
    for word in (torch.tensor(seed >> 32 & _MASK, device=key.device), indices["b"], indices["h"]):
        key = _mix((key ^ word) + _WEYL & _MASK)
    left, right = torch.broadcast_tensors(indices["kv_idx"] & _MASK, indices["q_idx"] & _MASK)
    for _ in range(_ROUNDS):
        high, low = _multiply(left)
        left, right = high ^ key ^ right, low
        key = key + _WEYL & _MASK
    return left >= threshold(p)


def threshold(p: float) -> int:
    """Random words below this are dropped."""
    return min(round(p * 2**32), _MASK)


def _multiply(x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of x * _MULTIPLIER, in int64 without overflow."""
    low_half, high_half = x & 0xFFFF, x >> 16
    low = low_half * _MULTIPLIER
    high = high_half * _MULTIPLIER + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF


def _mix(x: Tensor) -> Tensor:
    """A 32-bit finaliser (lowbias32 of C. Wellons' hash prospector)."""
    x = x ^ x >> 16
    x = _multiply_low(x, 0x7FEB352D)
    x = x ^ x >> 15
    x = _multiply_low(x, 0x846CA68B)
    return x ^ x >> 16


def _multiply_low(x: Tensor, factor: int) -> Tensor:
    return (x & 0xFFFF) * factor + ((x >> 16) * factor << 16) & _MASK
