"""Whether the tensors that a mask captures still hold what its map was made from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexmod.program import Program

# Per captured tensor its version counter, or a copy where torch keeps no counter.
Snapshot = tuple[int | Tensor, ...]
STALE = (
    "a tensor captured by {} was changed in place after its block mask was made: "
    "make the block mask again"
)
UNKNOWN = -1  # of a tensor that a graph reads and torch keeps no counter for


def snapshot(program: Program) -> Snapshot:
    return tuple(c.clone() if c.is_inference() else c._version for c in program.captures)


def versions(seen: Snapshot) -> tuple[int, ...]:
    """A snapshot as numbers alone."""
    return tuple(UNKNOWN if isinstance(was, Tensor) else was for was in seen)


def is_fresh(seen: Snapshot, captures: Sequence[Tensor]) -> bool:
    return not seen or all(_is_same(*pair) for pair in zip(seen, captures, strict=True))


def _is_same(was: int | Tensor, now: Tensor) -> bool:
    if isinstance(was, Tensor):
        return torch.equal(was, now)
    return was == UNKNOWN or now.is_inference() or was == now._version
