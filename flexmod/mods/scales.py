"""Score mods that scale, cap or move the score itself."""

from __future__ import annotations

import math
from typing import Any

import torch

from flexmod.mods.arguments import PerHead, ScoreMod, per_head, positive, whole


def identity(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """The score as it is. Itself a score mod: pass `identity`, not `identity()`."""
    return score


def softcap(cap: float) -> ScoreMod:
    """cap * tanh(score / cap): keeps scores inside (-cap, cap). cap > 0.

    Example: `softcap(20.0)` takes 100 to 20*tanh(5) = 19.998184. Source: Gemma 2 (2024).
    """
    cap = positive("cap", cap)

    def softcap(score, b, h, q_idx, kv_idx):
        return cap * torch.tanh(score / cap)

    return softcap


def temperature(value: PerHead) -> ScoreMod:
    """score / value, per head: above 1 attention spreads, below 1 it sharpens.

    Example: `temperature(2.0)` takes 3 to 1.5.
    """
    divisor = per_head("value", value, positive)

    def temperature(score, b, h, q_idx, kv_idx):
        return score / divisor(h)

    return temperature


def head_scale(scale: PerHead) -> ScoreMod:
    """score * scale[h]. Example: `head_scale([1.0, 0.5])` halves the scores of head 1."""
    factor = per_head("scale", scale)

    def head_scale(score, b, h, q_idx, kv_idx):
        return score * factor(h)

    return head_scale


def head_bias(bias: PerHead) -> ScoreMod:
    """score + bias[h]. One number for a whole row: it moves lse, and the output not at all.

    Of use before a sink or a merge by lse. Example: `head_bias([0.0, 1.0])` adds 1 to head 1.
    """
    amount = per_head("bias", bias)

    def head_bias(score, b, h, q_idx, kv_idx):
        return score + amount(h)

    return head_bias


def log_length(scale: PerHead = 1.0) -> ScoreMod:
    """score * scale[h] * ln(i + 1) for query i, which under a causal mask sees i + 1 keys.

    Keeps attention from fading as rows grow longer. Query 0 gets score 0 (it has one key).
    Example: `log_length()` multiplies row 7 by ln 8 = 2.0794. Source: Scalable-Softmax (2025).
    """
    factor = per_head("scale", scale)

    def log_length(score, b, h, q_idx, kv_idx):
        return score * (factor(h) * torch.log(q_idx + 1.0))

    return log_length


def position_scale(train_length: int) -> ScoreMod:
    """score * max(1, ln(i + 1) / ln(train_length)): no change within the trained length.

    train_length: tokens, at least 2. Under a causal mask query i sees i + 1 keys.
    Example: `position_scale(4)` multiplies row 15 by ln 16 / ln 4 = 2. Source: log-n scaling,
    as in Qwen (2023).
    """
    rate = 1.0 / math.log(whole("train_length", train_length, 2))

    def position_scale(score, b, h, q_idx, kv_idx):
        return score * torch.clamp(torch.log(q_idx + 1.0) * rate, min=1.0)

    return position_scale
