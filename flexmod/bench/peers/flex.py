"""torch's flex_attention under torch.compile, with its own kernels or flash-attn's."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from flexmod.bench.case import Call, Case
from flexmod.bench.peers import flash_cute
from flexmod.bench.rows import Row


def absent(device: torch.device) -> str | None:
    return None


def flash_absent(device: torch.device) -> str | None:
    from torch.nn.attention import flex_attention as theirs

    options = getattr(theirs, "FlexKernelOptions", None)
    if "BACKEND" not in getattr(options, "__annotations__", {}):
        return f"torch {torch.__version__} has no BACKEND option"
    return flash_cute.absent(device)


def serves(row: Row, direction: str) -> bool:
    return True


def make(backend: str | None, case: Case) -> Call:
    from torch.nn.attention import flex_attention as theirs

    seqlen, device = case.row.seqlen, case.query.device
    mask: Any = None
    if case.mask_mod is not None:
        mask = theirs.create_block_mask(case.mask_mod, None, None, seqlen, seqlen, device)
    compiled = torch.compile(theirs.flex_attention, dynamic=False)
    options: Any = {"BACKEND": backend} if backend else None
    attend = partial(compiled, *case.tensors, case.score_mod, mask, kernel_options=options)
    return Call(attend, [*case.tensors, *case.learned])


def forget() -> None:
    """Between rows: torch.compile gives up on a function that it has compiled too often."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
