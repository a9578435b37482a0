"""Score mods that are formulas of the distance between query and key."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor

from flexmod.errors import ArgumentError
from flexmod.mods.arguments import Device, PerHead, ScoreMod, per_head, positive, reals, whole


def alibi_slopes(heads: int, device: Device = None) -> Tensor:
    """Slopes [heads] fp32 of the ALiBi paper: 2**(-8*(n+1)/heads) for head n.

    If heads is not a power of two: the slopes of the largest power p below it, then every
    other one (the 1st, 3rd, ...) of those for 2*p.
    Example: `alibi_slopes(4)` is [1/4, 1/16, 1/64, 1/256]; a fifth and sixth head get 1/2, 1/8.
    """
    heads = whole("heads", heads)
    power = 1 << (heads.bit_length() - 1)
    exponents = [8 * (n + 1) / power for n in range(power)]
    exponents += [4 * (2 * n + 1) / power for n in range(heads - power)]
    return torch.tensor([2.0**-e for e in exponents], dtype=torch.float32, device=device)


def alibi(
    slopes: int | Tensor | Sequence[float], symmetric: bool = False, device: Device = None
) -> ScoreMod:
    """score + slopes[h] * (j - i): a linear penalty on keys in the past.

    slopes: a tensor [H], or the number of query heads for `alibi_slopes(heads)`. Keys after the
    query would be favoured: add a causal mask, or pass symmetric=True for -slopes[h] * |i - j|.
    Example: `alibi(4)`: head 0 takes 1/4 from the score for each step back. Source: ALiBi (2021).
    """
    if isinstance(slopes, Integral):
        table = alibi_slopes(int(slopes), device)
    else:
        table = reals("slopes", slopes, ("[H]",), device)

    def alibi(score, b, h, q_idx, kv_idx):
        if symmetric:
            return score - table[h] * torch.abs(q_idx - kv_idx)
        return score + table[h] * (kv_idx - q_idx)

    return alibi


PENALTIES = {
    "linear": lambda distance, shape: distance * shape,
    "log": lambda distance, shape: torch.log1p(distance * shape),
    "power": lambda distance, shape: distance**shape,
}


def distance_penalty(kind: str, scale: PerHead = 1.0, shape: PerHead = 1.0) -> ScoreMod:
    """score - scale[h] * f(|i - j|), with `kind` choosing f, shape[h] its parameter.

    "linear": shape*d; "log": ln(1 + shape*d); "power": d**shape. Both are per head, meant > 0.
    Example: `distance_penalty("log")` takes ln 4 = 1.386 from a key 3 away.
    Source: KERPLE (2022), whose r1, r2 are scale, shape.
    """
    if kind not in PENALTIES:
        raise ArgumentError(f"kind must be one of {', '.join(PENALTIES)}, got {kind!r}")
    penalty = PENALTIES[kind]
    strength, parameter = per_head("scale", scale, positive), per_head("shape", shape, positive)

    def distance_penalty(score, b, h, q_idx, kv_idx):
        # A float from here on: kernels have powers and logarithms of floats only.
        distance = torch.abs(q_idx - kv_idx) * 1.0
        return score - strength(h) * penalty(distance, parameter(h))

    return distance_penalty


def gaussian_window(sigma: PerHead) -> ScoreMod:
    """score - (i - j)**2 / (2 * sigma[h]**2): a soft window of `sigma` tokens, per head.

    Example: `gaussian_window(2.0)` takes 1/2 from keys 2 away, 2 from keys 4 away.
    """
    width = per_head("sigma", sigma, positive)

    def gaussian_window(score, b, h, q_idx, kv_idx):
        steps = (q_idx - kv_idx) / width(h)
        return score - 0.5 * steps * steps

    return gaussian_window
