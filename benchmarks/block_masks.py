"""Building block maps beside torch's create_block_mask, eager and compiled: time and memory.

    OMP_NUM_THREADS=1 python benchmarks/block_masks.py --max-len 1048576

Each map is built in a process of its own, so that the peak of one does not hide that of another.
Times are the best of five later calls (of one for torch): CPU time of one core on a CPU, elapsed
time on a GPU. Memory is what the process holds at most during the first call beyond what it held
before. torch is given up to --peer-len tokens only, as its memory grows with the square of the
length.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import environment

import flexmod
from flexmod import masks

BLOCK = 128
MIB = 1024 * 1024
BUILDERS = ("flexmod", "torch eager", "torch compiled")


def document_ids(length: int, device: str) -> torch.Tensor:
    """Packed documents of 1 to 4096 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 4097, (length // 512 + 1,), generator=generator)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return ids[:length].to(device)


def dilated(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """1024 keys a row, 4 apart."""
    apart = q_idx - kv_idx
    return (apart >= 0) & (apart < 4096) & (apart % 4 == 0)


def rows(length: int, device: str) -> dict[str, Callable[..., Any]]:
    packed = masks.document(document_ids(length, device))
    causal, window = masks.causal(), masks.sliding_window(1024)
    return {
        "causal": causal,
        "window 1024": window,
        "prefix 8192": masks.prefix_lm(8192),
        "causal documents": masks.and_masks(causal, packed),
        "dilated window": dilated,
        "documents + window": masks.and_masks(packed, window),
        "documents + dilated": masks.and_masks(packed, dilated),
        "window or prefix": masks.or_masks(window, masks.and_masks(causal, masks.padding(1024))),
        "not causal documents": masks.not_mask(masks.and_masks(causal, packed)),
    }


def build(builder: str, mask_mod: Callable[..., Any], length: int, device: str) -> Any:
    shape = (None, None, length, length)
    if builder == "flexmod":
        return flexmod.create_block_mask(mask_mod, *shape, device=device, BLOCK_SIZE=BLOCK)
    from torch.nn.attention.flex_attention import create_block_mask

    make = torch.compile(create_block_mask) if builder == "torch compiled" else create_block_mask
    return make(mask_mod, *shape, device=device, BLOCK_SIZE=BLOCK)


def measure(builder: str, row: str, length: int, device: str) -> dict[str, Any]:
    """Milliseconds and MiB of the second call, in this process."""
    mask_mod = rows(length, device)[row]
    # What is imported and traced once does not count; the memory of the first large call does.
    build(builder, rows(BLOCK, device)[row], BLOCK, device)
    memory = peak(lambda: build(builder, mask_mod, length, device), device)
    times = []
    for _ in range(5 if builder == "flexmod" else 1):
        synchronize(device)
        start = clock(device)
        build(builder, mask_mod, length, device)
        synchronize(device)
        times.append(1e3 * (clock(device) - start))
    return {"ms": min(times), "mib": memory}


def clock(device: str) -> float:
    return time.process_time() if device == "cpu" else time.perf_counter()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak(call: Callable[[], Any], device: str) -> float:
    """MiB that a call holds at most, above what was held before it."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return (torch.cuda.max_memory_allocated() - before) / MIB
    done = threading.Event()
    before = highest = resident()

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.0005):
            highest = max(highest, resident())

    thread = threading.Thread(target=watch)
    thread.start()
    call()
    done.set()
    thread.join()
    return (highest - before) / MIB


def resident() -> int:
    """Bytes of this process in memory (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def in_own_process(builder: str, row: str, length: int, device: str, limit: float) -> Any:
    """The figures, or why there are none."""
    arguments = ["--one", builder, row, str(length), "--device", device]
    try:
        done = subprocess.run(
            [sys.executable, __file__, *arguments], capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return f"> {limit:.0f} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["killed"]
        return "out of memory" if "out of memory" in done.stderr else lines[-1][:60]
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-len", type=int, default=1 << 20)
    parser.add_argument("--peer-len", type=int, default=8192)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument("--builders", default=",".join(BUILDERS))
    parser.add_argument("--limit", type=float, default=120, help="seconds for one figure")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    if options.one:
        builder, row, length = options.one
        print(json.dumps(measure(builder, row, int(length), options.device)))
        return
    builders = options.builders.split(",")
    lengths = sorted({min(options.peer_len, options.max_len), options.max_len})
    results = []
    print(f"{'mask':<22}{'tokens':>9}  " + "".join(f"{b:>26}" for b in builders))
    for length in lengths:
        for row in rows(1024, "cpu"):
            if options.rows not in row:
                continue
            found = {}
            for builder in builders:
                if builder == "flexmod" or length <= options.peer_len:
                    found[builder] = in_own_process(
                        builder, row, length, options.device, options.limit
                    )
            results.append({"row": row, "tokens": length, **found})
            print(f"{row:<22}{length:>9}  " + "".join(map(_cell, found.values())), flush=True)
    if options.out:
        text = json.dumps({"environment": environment(options.device), "rows": results}, indent=1)
        options.out.write_text(text + "\n")


def _cell(found: Any) -> str:
    if isinstance(found, str):
        return f"{found:>26}"
    return f"{found['ms']:>11.1f} ms {found['mib']:>7.1f} MiB"


if __name__ == "__main__":
    main()
