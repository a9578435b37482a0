"""A row of the suite `masks`: attention over a window of a very long sequence, map and all."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from flexmod import masks
from flexmod.attention import flex_attention
from flexmod.bench.setting import Setting
from flexmod.blocks import create_block_mask

NAME = "attention in a window of 1024"
_WINDOW, _HEAD_DIM, _CHECKED = 1024, 64, 67  # the last: query rows that are compared
_BOUND = {torch.bfloat16: 2e-2, torch.float32: 1e-5}  # of errors against float64


def measure(setting: Setting, length: int) -> dict[str, Any]:
    """Milliseconds of the second call of one head, and its error on some rows."""
    device, name = setting.device, f"{NAME}, {length}"
    generator = torch.Generator(device).manual_seed(0)
    shape = (3, 1, 1, length, _HEAD_DIM)
    query, key, value = torch.randn(
        shape, generator=generator, device=device, dtype=setting.dtype
    ).unbind()
    setting.progress.show(name)
    window = masks.sliding_window(_WINDOW)
    block_mask = create_block_mask(window, None, None, length, length, device)
    for _ in range(2):
        _wait(device)
        start = time.perf_counter()
        out = flex_attention(query, key, value, block_mask=block_mask)
        _wait(device)
        took = 1e3 * (time.perf_counter() - start)
    error = _error(out[0, 0], query[0, 0], key[0, 0], value[0, 0])
    failed = {} if error <= _BOUND[setting.dtype] else {"flexmod": f"wrong by {error:.1e}"}
    figures = {} if failed else {"flexmod": took}
    return {
        "row": name, "tokens": length, "ms": figures, "mib": {}, "failed": failed,
        "error": {"flexmod": error},
    }  # fmt: skip


def _error(out: Tensor, query: Tensor, key: Tensor, value: Tensor) -> float:
    """The largest difference to float64 over rows from all over the sequence."""
    length, worst = len(out), 0.0
    for row in torch.linspace(0, length - 1, _CHECKED).long().tolist():
        seen = slice(max(0, row - _WINDOW + 1), row + 1)
        score = key[seen].double() @ query[row].double() / _HEAD_DIM**0.5
        expected = score.softmax(0) @ value[seen].double()
        worst = max(worst, float((out[row].double() - expected).abs().max()))
    return worst


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
