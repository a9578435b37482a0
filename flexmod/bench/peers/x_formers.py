"""xFormers' memory_efficient_attention with its structured masks."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch

from flexmod.bench.case import BSHD, Call, Case
from flexmod.bench.peers.flash_cute import missing
from flexmod.bench.rows import Row, document_lengths


def absent(device: torch.device) -> str | None:
    return "it needs a GPU" if device.type != "cuda" else missing("xformers.ops")


def serves(row: Row, direction: str) -> bool:
    return row.score == "none" and row.mask != "prefix"


def make(case: Case) -> Call:
    ops = importlib.import_module("xformers.ops")
    biases = importlib.import_module("xformers.ops.fmha.attn_bias")
    row = case.row
    bias: Any = None
    if row.mask == "causal":
        bias = biases.LowerTriangularMask()
    elif row.mask == "window":
        bias = biases.LowerTriangularFromBottomRightMask().make_local_attention(row.size)
    elif row.mask == "documents":
        lengths = document_lengths(row.size, row.seqlen)
        bias = biases.BlockDiagonalCausalMask.from_seqlens(lengths, device=case.query.device)
    inputs = BSHD.leaves(case)
    return Call(partial(ops.memory_efficient_attention, *inputs, attn_bias=bias), inputs, BSHD)
