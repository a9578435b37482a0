"""Forward and backward beside torch's flex_attention, TFLOP/s on visible elements.

    python benchmarks/attention.py --direction backward --head-dim 128 --out results.json

Backward counts 2.5 times the forward's operations. Ratios are of medians taken in one run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rows import ROWS, Row
from timing import environment, interleaved

import flexmod

HIDDEN = 2048  # heads x head_dim


def flexmod_call(row: Row, tensors: list[torch.Tensor], options: dict[str, Any]) -> Any:
    query, key, value = tensors
    score_mod, mask_mod, learned = row.make(query.shape[1], query.shape[2], query.device)
    n = query.shape[2]
    mask = mask_mod and flexmod.create_block_mask(mask_mod, None, None, n, n, query.device)
    return (
        lambda: flexmod.flex_attention(query, key, value, score_mod, mask, kernel_options=options),
        learned,
        mask,
    )


def torch_call(row: Row, tensors: list[torch.Tensor], options: dict[str, Any]) -> Any:
    from torch.nn.attention import flex_attention as peer

    query, key, value = tensors
    score_mod, mask_mod, learned = row.make(query.shape[1], query.shape[2], query.device)
    n = query.shape[2]
    mask = mask_mod and peer.create_block_mask(mask_mod, None, None, n, n, query.device)
    torch._dynamo.reset()
    compiled = torch.compile(peer.flex_attention, dynamic=False)
    return lambda: compiled(query, key, value, score_mod, mask), learned, None


def measure(row: Row, direction: str, head_dim: int, peers: list[str], device: str) -> dict:
    """One row: operations, and the time of each candidate."""
    heads = HIDDEN // head_dim
    shape = (1, heads, row.seqlen, head_dim)
    tensors = [
        torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    calls: dict[str, Callable[[], Any]] = {}
    failed: dict[str, str] = {}
    density = 100.0
    for name in peers:
        make = flexmod_call if name == "flexmod" else torch_call
        call, learned, mask = make(row, tensors, {})
        if mask is not None:
            density = mask.density()
        try:
            calls[name] = directed(call, direction, [*tensors, *learned])
            calls[name]()
        except Exception as error:  # a peer that cannot serve a row is shown as 0
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[-1][:200]}"
            calls.pop(name, None)
    times = interleaved(calls, device=device)
    operations = 4 * row.seqlen**2 * HIDDEN * density / 100
    operations *= 2.5 if direction == "backward" else 1
    rates = dict.fromkeys(peers, 0.0)
    rates |= {name: operations / t["median"] / 1e9 for name, t in times.items()}
    return {"row": row.name, "head_dim": head_dim, "direction": direction, "seqlen": row.seqlen,
            "ms": times, "tflops": rates, "failed": failed}  # fmt: skip


def directed(call: Callable[[], Any], direction: str, inputs: list[torch.Tensor]) -> Any:
    """The forward without a graph, or the backward alone."""
    if direction == "forward":

        def run() -> None:
            with torch.no_grad():
                call()

        return run
    out = call()
    d_out = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, inputs, d_out, retain_graph=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--direction", choices=("forward", "backward"), default="forward")
    parser.add_argument("--head-dim", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument("--peers", default="flexmod,torch flex")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    print(f"{'row':<24} {'D':>4} " + " ".join(f"{p:>12}" for p in options.peers.split(",")))
    for head_dim in options.head_dim:
        for row in ROWS:
            if options.rows in row.name:
                peers = options.peers.split(",")
                found = measure(row, options.direction, head_dim, peers, options.device)
                results.append(found)
                rates = " ".join(f"{found['tflops'][p]:>12.0f}" for p in peers)
                first, *others = (found["tflops"][p] for p in peers)
                ratio = f"{first / max(others):>7.2f}x" if any(others) else ""
                print(f"{row.name:<24} {head_dim:>4} {rates} {ratio}", flush=True)
                torch.cuda.empty_cache()
    if options.out:
        text = json.dumps({"environment": environment(options.device), "rows": results}, indent=1)
        options.out.write_text(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
