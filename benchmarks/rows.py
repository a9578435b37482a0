"""The rows of the attention benchmarks: name -> the mods, written once for flexmod and for torch.

Both take the same functions `(score, b, h, q_idx, kv_idx)` and `(b, h, q_idx, kv_idx)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Mod = Callable[..., Any] | None


@dataclass(frozen=True)
class Row:
    """One row: its sequence length, and what makes (score_mod, mask_mod, learned tensors)."""

    name: str
    make: Callable[[int, int, torch.device], tuple[Mod, Mod, list[Tensor]]]
    seqlen: int = 16384


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def _plain(score_mod: Mod, mask_mod: Mod) -> Callable[..., tuple[Mod, Mod, list[Tensor]]]:
    return lambda heads, seqlen, device: (score_mod, mask_mod, [])


def _window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 1024)


def _prefix(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) | (kv_idx < 1024)


def _documents(heads: int, seqlen: int, device: torch.device):
    document = torch.arange(seqlen, device=device) // (seqlen // 16)

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (document[q_idx] == document[kv_idx])

    return None, mask_mod, []


def _alibi(heads: int, seqlen: int, device: torch.device):
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, device=device) / heads)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    return score_mod, causal, []


def _softcap(score, b, h, q_idx, kv_idx):
    return 30.0 * torch.tanh(score / 30.0)


def _relative(learned: bool):
    def make(heads: int, seqlen: int, device: torch.device):
        table = torch.randn(heads, 2 * seqlen - 1, device=device).requires_grad_(learned)

        def score_mod(score, b, h, q_idx, kv_idx):
            return score + table[h, kv_idx - q_idx + seqlen - 1]

        return score_mod, causal, [table] if learned else []

    return make


def _head_scale(heads: int, seqlen: int, device: torch.device):
    scale = torch.ones(heads, device=device, requires_grad=True)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score * scale[h]

    return score_mod, causal, [scale]


ROWS = [
    Row("dense", _plain(None, None)),
    Row("causal", _plain(None, causal)),
    Row("window 1024", _plain(None, _window)),
    Row("16 documents", _documents),
    Row("prefix 1024", _plain(None, _prefix)),
    Row("alibi", _alibi),
    Row("softcap", _plain(_softcap, causal)),
    Row("causal 4096", _plain(None, causal), 4096),
    Row("relative bias", _relative(False), 4096),
    Row("learned relative bias", _relative(True), 4096),
    Row("learned head scale", _head_scale, 4096),
]
