"""Mods that cover what a rendered kernel can hold: name -> () -> (score_mod, mask_mod)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flexmod import compose, masks, mods

Pair = tuple[Callable[..., Any] | None, Callable[..., Any] | None]
HEADS, SEQLEN = 2, 1024


def _checked() -> Pair:
    table = torch.arange(100, dtype=torch.float32)
    return (lambda score, b, h, q_idx, kv_idx: score + table[q_idx - kv_idx + 50]), None


def _floors() -> Pair:
    return None, lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) // 7 % 3 == 0


def _double() -> Pair:
    factor = torch.tensor(1.5, dtype=torch.float64)
    return (lambda score, b, h, q_idx, kv_idx: score * factor), None


def _functions() -> Pair:
    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.nn.functional.softplus(score) + torch.round(score) * torch.expm1(-score.abs())

    return score_mod, None


def _documents() -> Pair:
    ids = torch.arange(SEQLEN) // 200
    return None, masks.and_masks(masks.causal(), masks.document(ids))


MODS: dict[str, Callable[[], Pair]] = {
    "none": lambda: (None, None),
    "causal": lambda: (None, masks.causal()),
    "alibi_causal": lambda: (mods.alibi(HEADS), masks.causal()),
    "softcap_causal": lambda: (mods.softcap(20.0), masks.causal()),
    "relative_bias": lambda: (mods.relative_bias(torch.zeros(HEADS, 2 * SEQLEN - 1)), None),
    "documents": _documents,
    "checked_load": _checked,
    "floor_division": _floors,
    "double_number": _double,
    "functions": _functions,
    "composed": lambda: (compose(mods.alibi(HEADS), mods.softcap(9.0)), masks.sliding_window(99)),
}
