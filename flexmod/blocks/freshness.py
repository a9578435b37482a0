"""Whether the tensors that a mask captures still hold what its map was made from."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmod.program import Program

# Per captured tensor its version counter, or a copy where torch keeps no counter.
Snapshot = tuple[int | Tensor, ...]


def snapshot(program: Program) -> Snapshot:
    return tuple(c.clone() if c.is_inference() else c._version for c in program.captures)


def is_fresh(seen: Snapshot, program: Program) -> bool:
    return all(
        torch.equal(was, now) if isinstance(was, Tensor) else was == now._version
        for was, now in zip(seen, program.captures, strict=True)
    )
