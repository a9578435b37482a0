"""Microseconds that a call takes on the host, on tensors so small that a GPU is never behind.

    python benchmarks/host.py                a GPU: calls behind each other, without waiting
    python benchmarks/host.py --engine fa2   another engine than the first that serves the calls
    python benchmarks/host.py --stand-in     no GPU: all but the launch itself, which is a stand-in
    python benchmarks/host.py --json FILE    the same figures as data

Of many short rounds the fastest counts: what else the machine does only makes rounds slower.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import flexmod
from flexmod import masks, mods

SEQLEN, HEADS, HEAD_DIM = 128, 2, 64
ROUNDS, CALLS = 500, 4


class _Kernel:
    """In the place of a compiled kernel, and of the function that it is compiled from."""

    arg_names, function, packed_metadata = (), 0, ()

    def __getitem__(self, grid: Any) -> Callable[..., _Kernel]:
        return lambda *arguments, **fields: self

    def run(self, *arguments: Any) -> None:
        torch.empty(64)  # the memory for descriptors that a launcher asks for


def stand_in() -> None:
    """A Hopper GPU whose kernels do nothing; the path up to their launch is the real one."""
    from flexmod.kernels import launch, tuning

    found = tuning.Target("sm_90", 227 << 10)
    for name in ("fa2", "fa2.target", "fa2.forward", "fa2.backward",
                 "hopper", "hopper.forward", "hopper.backward"):  # fmt: skip
        importlib.import_module(f"flexmod.kernels.{name}").target = lambda device: found
    launch.Launch.kernel = property(lambda self: _Kernel())
    importlib.import_module("triton.runtime.driver")
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 0))
    sys.modules["triton.runtime.driver"].driver = driver


def calls(device: str, engine: str | None) -> dict[str, Callable[[], Any]]:
    """What is timed, by name."""
    shape = (1, HEADS, SEQLEN, HEAD_DIM)
    query, key, value = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    d_out = torch.randn_like(query)
    block_mask = flexmod.create_block_mask(
        masks.causal(), None, None, SEQLEN, SEQLEN, device=device
    )
    function = mods.alibi(HEADS, device=device)
    handle = flexmod.trace(function, "score", device=device)
    table = torch.randn(HEADS, 2 * SEQLEN - 1, device=device, requires_grad=True)
    scale = torch.ones(HEADS, device=device, requires_grad=True)

    def attend(*tensors: torch.Tensor, score_mod: Any = None, mask: Any = block_mask) -> Any:
        return flexmod.flex_attention(*tensors, score_mod, mask, backend=engine)

    def backward(score_mod: Any, *learned: torch.Tensor) -> Callable[[], Any]:
        out = attend(*leaves, score_mod=score_mod)
        wanted = [*leaves, *learned]
        return lambda: torch.autograd.grad(out, wanted, d_out, retain_graph=True)

    return {
        "torch's own, no mod": lambda: scaled_dot_product_attention(query, key, value),
        "forward, no mod": lambda: attend(query, key, value, mask=None),
        "forward, block mask": lambda: attend(query, key, value),
        "forward, traced handle": lambda: attend(query, key, value, score_mod=handle),
        "forward, function": lambda: attend(query, key, value, score_mod=function),
        "forward, function made anew": lambda: attend(
            query, key, value, score_mod=mods.softcap(20.0)
        ),
        "forward, with gradients": lambda: attend(*leaves, score_mod=handle),
        "backward, no mod": backward(None),
        "backward, handle": backward(handle),
        "backward, learned table": backward(mods.relative_bias(table), table),
        "backward, learned scale": backward(mods.head_scale(scale), scale),
    }


def microseconds(call: Callable[[], Any], device: str) -> float:
    fastest = float("inf")
    for _ in range(ROUNDS):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        fastest = min(fastest, (time.perf_counter() - began) / CALLS)
    return fastest * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stand-in", action="store_true", help="without a GPU")
    parser.add_argument("--engine", help="default: hopper with a stand-in, else flexmod's choice")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    engine = options.engine or ("hopper" if options.stand_in else None)
    if options.stand_in:
        stand_in()
    device = "cpu" if options.stand_in else "cuda"
    found = {}
    for name, call in calls(device, engine).items():
        found[name] = round(microseconds(call, device), 1)
        print(f"{name:<30}{found[name]:>8.1f} us")
    if options.json:
        gpu = None if options.stand_in else torch.cuda.get_device_name()
        setting = {
            "torch": torch.__version__, "python": sys.version.split()[0], "gpu": gpu,
            "engine": engine or "default",
        }  # fmt: skip
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"setting": setting, "us": found}, file, indent=1)


if __name__ == "__main__":
    main()
