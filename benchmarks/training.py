"""What training costs on a device: learned tensors, memory, and whether it repeats itself.

    python benchmarks/training.py

Three tables: the backward with a learned relative bias and a learned scale a head, as ratios to the
causal backward without; peak memory of forward and backward over what has to be kept; runs with
deterministic=True whose gradients are bitwise equal to the first one's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import flexmod
from flexmod import masks
from flexmod.bench.timing import Budget, interleaved

CHANNELS = 2048  # heads x head_dim


def tensors(heads: int, seqlen: int, dim: int, device: torch.device) -> list[Tensor]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = (1, heads, seqlen, dim)
    return [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(3)]


def learned(heads: int, seqlen: int, device: torch.device) -> dict[str, tuple[Any, list[Tensor]]]:
    """Name -> score mod, and what it learns."""
    table = torch.randn(heads, 2 * seqlen - 1, device=device).requires_grad_()
    scale = (torch.rand(heads, device=device) + 0.5).requires_grad_()

    def relative_bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[h, kv_idx - q_idx + seqlen - 1]

    def head_scale(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * scale[h]

    return {
        "none": (None, []),
        "relative bias": (relative_bias, [table]),
        "head scale": (head_scale, [scale]),
    }


def backwards(
    dim: int, seqlen: int, channels: int, device: torch.device
) -> dict[str, Callable[[], Any]]:
    """Name -> one causal backward, of an output that is kept."""
    heads = channels // dim
    leaves = tensors(heads, seqlen, dim, device)
    mask = flexmod.create_block_mask(masks.causal(), None, None, seqlen, seqlen, device)
    found: dict[str, Callable[[], Any]] = {}
    for name, (mod, more) in learned(heads, seqlen, device).items():
        out = flexmod.flex_attention(*leaves, mod, mask)
        grad, wanted = torch.randn_like(out), [*leaves, *more]
        found[name] = lambda out=out, grad=grad, wanted=wanted: torch.autograd.grad(
            out, wanted, grad, retain_graph=True
        )
        found[name]()  # its kernels are built
    return found


def ratios(dim: int, given: argparse.Namespace, device: torch.device) -> str:
    calls = backwards(dim, given.seqlen, given.channels, device)
    times = interleaved(calls, given.rounds, device, Budget(None))
    plain = times["none"].median
    return "  ".join(f"{n} {t.median:.3f} ms ({t.median / plain:.2f})" for n, t in times.items())


def peak(seqlen: int, heads: int, dim: int, device: torch.device) -> float:
    """Peak memory over query, key, value, out, their gradients and lse."""
    leaves = tensors(heads, seqlen, dim, device)
    window = masks.sliding_window(1024)
    mask = flexmod.create_block_mask(window, None, None, seqlen, seqlen, device)

    def step() -> None:
        out = flexmod.flex_attention(*leaves, block_mask=mask)
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    step()
    torch.cuda.reset_peak_memory_stats(device)
    step()
    needed = 8 * leaves[0].numel() * leaves[0].itemsize + 4 * heads * seqlen
    return torch.cuda.max_memory_allocated(device) / needed


def equal_runs(count: int, seqlen: int, device: torch.device) -> int:
    """How many runs with a learned bias had the gradients of the first, bit for bit."""
    heads, dim = 4, 64
    leaves = tensors(heads, seqlen, dim, device)
    mod, more = learned(heads, seqlen, device)["relative bias"]
    out_grad = torch.randn_like(leaves[0])

    def gradients() -> tuple[Tensor, ...]:
        out = flexmod.flex_attention(*leaves, mod, masks.causal(), deterministic=True)
        return torch.autograd.grad(out, [*leaves, *more], out_grad)

    first = gradients()
    runs = (zip(first, gradients(), strict=True) for _ in range(count))
    return sum(all(torch.equal(a, b) for a, b in pairs) for pairs in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seqlen", type=int, default=4096, help="of the first and the last table")
    parser.add_argument("--channels", type=int, default=CHANNELS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--runs", type=int, default=20, help="with deterministic=True")
    given = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(given.device)
    for dim in (128, 64):
        print(f"D{dim:<4} {ratios(dim, given, device)}", flush=True)
    if device.type == "cuda":
        print(f"peak memory of 131,072 tokens, 8 heads of 64: {peak(131072, 8, 64, device):.3f}")
    equal = equal_runs(given.runs, given.seqlen, device)
    print(f"deterministic: {equal} of {given.runs} runs equal the first")


if __name__ == "__main__":
    main()
