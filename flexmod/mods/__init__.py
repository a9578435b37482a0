"""Score mods: functions that make a `score_mod(score, b, h, q_idx, kv_idx) -> score`.

`score` is the scaled product of query and key in fp32; h is the QUERY head. Arguments are checked
when the mod is made; a wrong one raises ArgumentError. A parameter called "per head" is a
number, a tensor [] or a tensor [H]. Tensors are captured as they are: they may live on any
device and may require gradients. Lists and tables made here become tensors on `device`, or on the
default device where a mod has no such argument. Chain
mods with `flexmod.compose`; the inner function bears the factory's name, which errors show.
"""

from __future__ import annotations

from flexmod.mods.distances import alibi, alibi_slopes, distance_penalty, gaussian_window
from flexmod.mods.scales import (
    head_bias,
    head_scale,
    identity,
    log_length,
    position_scale,
    softcap,
    temperature,
)
from flexmod.mods.tables import bias, relative_bias, swin_2d_bias, t5_bias, t5_buckets

__all__ = [
    "alibi",
    "alibi_slopes",
    "bias",
    "distance_penalty",
    "gaussian_window",
    "head_bias",
    "head_scale",
    "identity",
    "log_length",
    "position_scale",
    "relative_bias",
    "softcap",
    "swin_2d_bias",
    "t5_bias",
    "t5_buckets",
    "temperature",
]
