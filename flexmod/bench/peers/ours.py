"""flexmod itself."""

from __future__ import annotations

from functools import partial
from typing import Any

from flexmod.attention import flex_attention
from flexmod.bench.case import Call, Case
from flexmod.blocks import create_block_mask
from flexmod.program import trace


def make(engine: str | None, case: Case, traced: bool = False) -> Call:
    """The mods as a user writes them; `traced`: the score mod traced beforehand."""
    seqlen, device = case.row.seqlen, case.query.device
    mask: Any = case.mask_mod
    if mask is not None:
        mask = create_block_mask(mask, None, None, seqlen, seqlen, device)
    score: Any = case.score_mod
    if score is not None and traced:
        score = trace(score, "score", device=device)
    attend = partial(flex_attention, *case.tensors, score, mask, backend=engine)
    return Call(attend, [*case.tensors, *case.learned])
