"""flash-attn 4 (`flash_attn.cute`): what it takes as arguments, no mods in its own language."""

from __future__ import annotations

import importlib
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from flexmod.bench.case import BSHD, PACKED, Call, Case
from flexmod.bench.rows import CAP, Row, document_lengths


def absent(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "it needs a GPU"
    return missing("flash_attn.cute")


def missing(module: str) -> str | None:
    """Why a module cannot be imported, in one line, or None."""
    try:
        importlib.import_module(module)
    except Exception as error:  # broken installations raise whatever they like
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else module}"
    return None


def serves(row: Row, direction: str) -> bool:
    return row.mask != "prefix" and row.score in ("none", "softcap")


def make(case: Case) -> Call:
    cute = importlib.import_module("flash_attn.cute")
    row = case.row
    options: dict[str, Any] = {"causal": row.mask != "none"}
    if row.score == "softcap":
        options["softcap"] = CAP
    if row.mask == "window":
        options["window_size"] = (row.size - 1, 0)
    if row.mask != "documents":
        inputs = BSHD.leaves(case)
        return Call(_first(partial(cute.flash_attn_func, *inputs, **options)), inputs, BSHD)
    inputs = PACKED.leaves(case)
    lengths = document_lengths(row.size, row.seqlen)
    edges = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=inputs[0].device)
    options |= {"cu_seqlens_q": edges, "cu_seqlens_k": edges}
    options |= {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    return Call(_first(partial(cute.flash_attn_varlen_func, *inputs, **options)), inputs, PACKED)


def _first(call: Any) -> Any:
    """out alone, of functions that return (out, lse)."""

    def attend() -> Tensor:
        found = call()
        return found[0] if isinstance(found, tuple) else found

    return attend
