"""What the attention suites measure: a row is one entry of `rows`, a mask and a score mod by kind.

The kinds are data, so that a peer with a fixed set of features can tell what it serves. The mods
are the same plain functions for flexmod and for torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flexmod.errors import ArgumentError

Mod = Callable[..., Any] | None
TOKENS = 16384  # batch x seqlen that the sizes below are meant for
CAP = 30.0  # of the softcap rows


@dataclass(frozen=True)
class Row:
    """One row. `size` is the window, the prefix or the number of documents of its mask."""

    name: str
    seqlen: int
    mask: str = "causal"  # a key of MASKS
    size: int = 0
    score: str = "none"  # a key of SCORES
    learns: bool = False
    head_dims: tuple[int, ...] | None = None  # None: any
    batch: int | None = None  # None: as many as there are tokens for


def rows(tokens: int = TOKENS) -> list[Row]:
    """All rows; with fewer tokens than TOKENS all lengths shrink alike."""

    def part(n: int) -> int:
        return max(n * tokens // TOKENS, 16)

    window, table = part(1024), part(4096)
    return [
        Row("dense", tokens, "none"),
        Row("causal", tokens),
        Row(f"prefix {window}", tokens, "prefix", window),
        Row(f"window {window}", tokens, "window", window),
        Row("16 documents", tokens, "documents", 16),
        Row("alibi", tokens, score="alibi"),
        Row("softcap", tokens, score="softcap"),
        Row(f"causal {table}", table),
        Row("relative bias", table, score="relative"),
        Row("learned relative bias", table, score="relative", learns=True),
        Row("learned head scale", table, score="scale", learns=True),
        *(Row(f"causal {part(n)}", part(n), head_dims=(128,)) for n in (512, 1024, 2048)),
    ]


def small_rows(tokens: int = TOKENS) -> list[Row]:
    """Short sequences in small batches, where the time before a launch shows."""
    lengths = [max(n * tokens // TOKENS, 16) for n in (512, 1024, 2048, 4096)]
    return [
        Row(f"{score if score != 'none' else 'causal'} {n} x {batch}", n, score=score, batch=batch)
        for score in ("none", "alibi")
        for n in lengths
        for batch in (1, 8)
    ]


def select(found: list[Row], wanted: str) -> list[Row]:
    """Rows by name, or by a part of the name where no row has just that; "": all.

    Raises:
        ArgumentError: a part is in no name.
    """
    parts = [part.strip() for part in wanted.split(",") if part.strip()]
    names = [row.name for row in found]
    for part in parts:
        if not any(part in name for name in names):
            raise ArgumentError(f"no row is called {part!r}; there are {', '.join(names)}")
    return [
        row
        for row in found
        if not parts or any(row.name == p or (p not in names and p in row.name) for p in parts)
    ]


def document_lengths(count: int, seqlen: int) -> list[int]:
    """`count` documents of random lengths that fill a sequence, the same on every call."""
    generator = torch.Generator().manual_seed(0)
    cuts = torch.randperm(seqlen - 1, generator=generator)[: count - 1] + 1
    edges = [0, *sorted(cuts.tolist()), seqlen]
    return [stop - start for start, stop in pairwise(edges)]


def _causal(size: int, seqlen: int, device: torch.device) -> Mod:
    return lambda b, h, q_idx, kv_idx: q_idx >= kv_idx


def _prefix(size: int, seqlen: int, device: torch.device) -> Mod:
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) | (kv_idx < size)


def _window(size: int, seqlen: int, device: torch.device) -> Mod:
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < size)


def _documents(size: int, seqlen: int, device: torch.device) -> Mod:
    lengths = torch.tensor(document_lengths(size, seqlen))
    ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths).int().to(device)
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx])


def _alibi(heads: int, seqlen: int, device: torch.device, learns: bool) -> tuple[Mod, list[Tensor]]:
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, device=device) / heads)
    return lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx), []


def _softcap(
    heads: int, seqlen: int, device: torch.device, learns: bool
) -> tuple[Mod, list[Tensor]]:
    return lambda score, b, h, q_idx, kv_idx: CAP * torch.tanh(score / CAP), []


def _relative(
    heads: int, seqlen: int, device: torch.device, learns: bool
) -> tuple[Mod, list[Tensor]]:
    table = torch.randn(heads, 2 * seqlen, device=device, dtype=torch.bfloat16)
    table.requires_grad_(learns)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[h, q_idx - kv_idx + seqlen]

    return score_mod, [table] if learns else []


def _scale(heads: int, seqlen: int, device: torch.device, learns: bool) -> tuple[Mod, list[Tensor]]:
    scale = (torch.rand(heads, device=device) + 0.5).requires_grad_(learns)
    return lambda score, b, h, q_idx, kv_idx: score * scale[h], [scale] if learns else []


MASKS: dict[str, Callable[[int, int, torch.device], Mod]] = {
    "none": lambda size, seqlen, device: None,
    "causal": _causal,
    "prefix": _prefix,
    "window": _window,
    "documents": _documents,
}
SCORES: dict[str, Callable[[int, int, torch.device, bool], tuple[Mod, list[Tensor]]]] = {
    "none": lambda heads, seqlen, device, learns: (None, []),
    "alibi": _alibi,
    "softcap": _softcap,
    "relative": _relative,
    "scale": _scale,
}
