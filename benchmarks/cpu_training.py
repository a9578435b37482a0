"""Forward and backward on the CPU beside torch's scaled_dot_product_attention.

    python benchmarks/cpu_training.py --seqlen 8192 --out results.json

Two rows: causal beside SDPA's is_causal, and a causal window of 256 beside SDPA with that window as
a dense mask. Medians of interleaved rounds; a ratio above 1 means that flexmod took longer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import flexmod
from flexmod import masks
from flexmod.bench.setting import environment
from flexmod.bench.timing import Budget, interleaved

HEADS, HEAD_DIM, WINDOW = 8, 64, 256
sdpa = torch.nn.functional.scaled_dot_product_attention


def step(attend: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> Callable[[], Any]:
    """One forward and one backward, on gradients of ones."""

    def run() -> None:
        out = attend(*tensors)
        torch.autograd.grad(out, tensors, torch.ones_like(out))

    return run


def rows(seqlen: int) -> dict[str, dict[str, Callable[..., torch.Tensor]]]:
    """Row -> candidate -> attention of query, key and value."""
    found: dict[str, dict[str, Callable[..., torch.Tensor]]] = {}
    causal, window = masks.causal(), masks.sliding_window(WINDOW)
    distance = torch.arange(seqlen)[:, None] - torch.arange(seqlen)
    dense = (distance >= 0) & (distance < WINDOW)
    for name, mask_mod, theirs in (
        ("causal", causal, lambda q, k, v: sdpa(q, k, v, is_causal=True)),
        (f"window {WINDOW}", window, lambda q, k, v: sdpa(q, k, v, attn_mask=dense)),
    ):
        mask = flexmod.create_block_mask(mask_mod, None, None, seqlen, seqlen)
        ours = partial(flexmod.flex_attention, block_mask=mask)
        found[name] = {"flexmod": ours, "sdpa": theirs}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    shape = (1, HEADS, given.seqlen, HEAD_DIM)
    tensors = [torch.randn(shape).requires_grad_() for _ in range(3)]
    device = torch.device("cpu")
    report: dict[str, Any] = {**environment(device), "rows": {}}
    for name, candidates in rows(given.seqlen).items():
        calls = {candidate: step(attend, tensors) for candidate, attend in candidates.items()}
        times = interleaved(calls, given.rounds, device, Budget(None))
        ratio = times["flexmod"].median / times["sdpa"].median
        report["rows"][name] = {
            "milliseconds": {name: found._asdict() for name, found in times.items()},
            "ratio": ratio,
        }
        medians = "  ".join(f"{c} {t.median:8.0f} ms" for c, t in times.items())
        print(f"{name:<12} {medians}  flexmod/sdpa {ratio:.3f}", flush=True)
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
