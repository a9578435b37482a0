"""torch's scaled_dot_product_attention, each of its kernels on a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flexmod.bench.case import Call, Case
from flexmod.bench.rows import Row
from flexmod.blocks import create_block_mask

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "CPU": SDPBackend.FLASH_ATTENTION,
}
_TAKES_MASKS = ("efficient", "CPU")  # as dense tensors of bools


def absent(name: str, device: torch.device) -> str | None:
    if (name == "CPU") == (device.type == "cpu"):
        return None
    return "it is for CPUs" if name == "CPU" else "it needs a GPU"


def serves(name: str, row: Row, direction: str) -> bool:
    return row.score == "none" and (row.mask in ("none", "causal") or name in _TAKES_MASKS)


def make(name: str, case: Case) -> Call:
    arguments: dict[str, Any] = {"is_causal": case.row.mask == "causal"}
    if case.mask_mod is not None and case.row.mask != "causal":
        shape = (None, None, case.row.seqlen, case.row.seqlen)
        block_mask = create_block_mask(case.mask_mod, *shape, case.query.device)
        arguments = {"attn_mask": block_mask.dense()}
    call = partial(scaled_dot_product_attention, *case.tensors, **arguments)

    def attend() -> Tensor:
        with sdpa_kernel(BACKENDS[name]):
            return call()

    return Call(attend, list(case.tensors))
