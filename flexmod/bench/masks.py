"""The suite `masks`: building block maps beside torch's create_block_mask, time and memory.

Times are the best of five calls after the first (of one for torch): CPU time of one core on a CPU,
elapsed time on a GPU. Memory is what the first call holds at most beyond what was held before. On
a CPU each map is built in a process of its own, so that the peak of one does not hide that of
another, and torch is given so much address space that the machine stays usable.

    python -m flexmod.bench.masks flexmod causal 8192 cpu    # one map, for the suite
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from flexmod import masks
from flexmod.bench import window
from flexmod.bench.setting import Setting
from flexmod.blocks import create_block_mask

_LIMIT = 120.0  # seconds for one figure
_LONG = 1 << 20  # tokens that flexmod alone is asked for
_LONG_ON_CPU = 1 << 14  # and of the row that attends, on a CPU
_ADDRESSES = 12 * 1024**3  # bytes that torch may ask for on a CPU
BLOCK = 128
MIB = 1024 * 1024
Record = dict[str, Any]
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
        return create_block_mask(mask_mod, *shape, device=device, BLOCK_SIZE=BLOCK)
    from torch.nn.attention import flex_attention as theirs

    make: Any = theirs.create_block_mask
    make = torch.compile(make) if builder == "torch compiled" else make
    return make(mask_mod, *shape, device=device, BLOCK_SIZE=BLOCK)


def figures_of(builder: str, row: str, length: int, device: str) -> dict[str, Any]:
    """Milliseconds and MiB of the second call, in this process."""
    mask_mod = rows(length, device)[row]
    if builder == "torch compiled":
        torch.compiler.reset()  # after some masks it would fall back to what it does eagerly
    else:  # what is imported once does not count; the memory of the first large call does
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
    try:
        call()
    finally:  # else the process would never end
        done.set()
        thread.join()
    return (highest - before) / MIB


def resident() -> int:
    """Bytes of this process in memory (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def figures(builder: str, row: str, length: int, setting: Setting) -> dict[str, float]:
    """Milliseconds and MiB. Raises where there are none, with the reason."""
    if setting.device.type == "cpu":
        return in_own_process(builder, row, length, setting)
    try:
        return figures_of(builder, row, length, setting.device.type)
    finally:
        torch.cuda.empty_cache()


def in_own_process(builder: str, row: str, length: int, setting: Setting) -> dict[str, float]:
    command = [sys.executable, "-m", "flexmod.bench.masks", builder, row, str(length)]
    limit = min(_LIMIT, setting.budget.left or _LIMIT)
    try:
        done = subprocess.run(
            [*command, setting.device.type], capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"more than {limit:.0f} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["killed"]
        wanted = [line for line in lines if "allocate" in line] or lines[-1:]
        raise RuntimeError(wanted[0])
    return json.loads(done.stdout.splitlines()[-1])


def measure(setting: Setting) -> Iterator[Record]:
    """Every mask at a million tokens, where torch has no memory; then beside torch.

    The compiled builder comes last, as compiling takes most of the time of a run.
    """
    length = min(_LONG, 512 * setting.tokens)  # --quick and --tokens make that shorter, too
    if wants(setting, window.NAME):
        on_cpu = setting.device.type == "cpu"
        yield window.measure(setting, min(length, _LONG_ON_CPU) if on_cpu else length)
    with_torch = any("flex" in c.name for c in setting.candidates if not c.is_ours)
    builders = BUILDERS if with_torch else BUILDERS[:1]
    names = [row for row in rows(BLOCK, "cpu") if wants(setting, row)]
    for row in names:
        record = _record(row, length)
        _add(setting, record, row, builders[:1])
        if with_torch and not setting.budget.is_spent and row == names[0]:
            _add(setting, record, row, ("torch eager",))
        yield record
    records = [_record(row, setting.tokens) for row in names]
    for row, record in zip(names, records, strict=True):
        _add(setting, record, row, builders[:2])
    for row, record in zip(names, records, strict=True):
        _add(setting, record, row, builders[2:])
        yield record


def wants(setting: Setting, row: str) -> bool:
    return any(part.strip() in row for part in setting.rows.split(","))


def _record(row: str, length: int) -> Record:
    empty: Record = {name: {} for name in ("ms", "mib", "failed", "error")}
    return {"row": f"{row} {length}", "tokens": length, **empty}


def _add(setting: Setting, record: Record, row: str, builders: Sequence[str]) -> None:
    for builder in builders:
        if setting.budget.is_spent:
            setting.left.append(f"{record['row']} ({builder})")
            continue
        setting.progress.show(f"masks {record['row']}: {builder}")
        try:
            found = figures(builder, row, record["tokens"], setting)
        except (RuntimeError, TimeoutError) as error:  # torch's out-of-memory is a RuntimeError
            record["failed"][builder] = (str(error).splitlines() or [type(error).__name__])[0][:160]
            continue
        record["ms"][builder], record["mib"][builder] = found["ms"], found["mib"]


def main(builder: str, row: str, length: str, device: str) -> None:
    """One map in this process; prints its figures."""
    if device == "cpu":
        torch.set_num_threads(1)
        if builder != "flexmod":
            resource.setrlimit(resource.RLIMIT_AS, (_ADDRESSES, _ADDRESSES))
    print(json.dumps(figures_of(builder, row, int(length), device)))


if __name__ == "__main__":
    main(*sys.argv[1:])
