"""What share of all pairs a mask shows, from a sample."""

from __future__ import annotations

from functools import lru_cache

import torch

from flexmod.program.evaluate import evaluate
from flexmod.program.ir import Program

_PAIRS = 4096
_STEPS = 0.7548776662466927, 0.5698402910979532  # fill a square evenly: Roberts' sequence (2018)


@lru_cache(maxsize=64)
def visible_share(
    program: Program, batch: int, heads: int, q_len: int, kv_len: int
) -> float | None:
    """From 0 to 1; None if a mask reads tensors, which lie on a device and may change.

    Of a causal mask it is 0.5, to about a hundredth.
    """
    if any(line.op == "load" for line in program.instructions):
        return None
    number = torch.arange(_PAIRS, dtype=torch.float64, device="cpu")
    places = {"b": number % batch, "h": number % heads}
    for index, step, length in zip(("q_idx", "kv_idx"), _STEPS, (q_len, kv_len), strict=True):
        places[index] = number * step % 1 * length
    (visible,), _ = evaluate(program, {index: place.long() for index, place in places.items()})
    return visible.expand(_PAIRS).double().mean().item()
