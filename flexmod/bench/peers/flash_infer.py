"""FlashInfer's prefill of a single request: forward only, one batch."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch

from flexmod.bench.case import PACKED, Call, Case
from flexmod.bench.peers.flash_cute import missing
from flexmod.bench.rows import CAP, Row


def absent(device: torch.device) -> str | None:
    return "it needs a GPU" if device.type != "cuda" else missing("flashinfer")


def serves(row: Row, direction: str) -> bool:
    fixed = row.mask in ("none", "causal", "window") and row.score in ("none", "softcap", "alibi")
    return direction == "forward" and fixed


def make(case: Case) -> Call:
    if case.query.shape[0] > 1:
        raise ValueError("the function for a single request takes one batch")
    row = case.row
    options: dict[str, Any] = {"causal": row.mask != "none"}
    if row.mask == "window":
        options["window_left"] = row.size - 1
    if row.score == "softcap":
        options["logits_soft_cap"] = CAP
    if row.score == "alibi":
        options["pos_encoding_mode"] = "ALIBI"
    inputs = [PACKED.to(x.detach()) for x in case.tensors]
    prefill = importlib.import_module("flashinfer").single_prefill_with_kv_cache
    return Call(partial(prefill, *inputs, **options), inputs, PACKED)
