"""Compile rendered kernels for GPUs that are not there, and say what they use.

A script: Triton's compiler and its interpreter exclude each other in one process. Prints a JSON
object a kernel (`--json`) or a table.

    python tests/kernels/compile_targets.py --json mods heads
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from kernel_mods import MODS
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flexmod.attention import make_problem
from flexmod.kernels import fa2, tuning
from flexmod.kernels.problem import Inputs, Problem, new_output

SEQLEN = 1024  # long enough for full tiles
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 << 10),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 << 10),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 << 10),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 << 10),
}
_POINTERS = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32",
    torch.float64: "*fp64", torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    mod: str
    arch: str
    dtype: str
    head_dim: int

    @property
    def label(self) -> str:
        return f"{self.mod} {self.arch} {self.dtype} D{self.head_dim}"


@dataclass(frozen=True)
class Usage:
    """What one kernel uses: bytes of shared memory, registers and bytes of spills a thread."""

    case: Case
    tiles: tuple[int, int, int, int]
    shared: int
    planned: int
    registers: int
    spills: int
    seconds: float
    error: str = ""


def cases(groups: list[str]) -> Iterator[Case]:
    """`mods`: all mods at D 64; `heads`: no mod at D 64 and 128; `wide`: other dtypes and dims."""
    if "mods" in groups:
        yield from (Case(mod, arch, "bfloat16", 64) for mod in MODS for arch in TARGETS)
    if "heads" in groups:
        mods = ("none", "causal", "softcap_causal", "alibi_causal")
        yield from (Case(mod, arch, "bfloat16", 128) for mod in mods for arch in TARGETS)
    if "wide" in groups:
        sizes = [(dtype, dim) for dtype in ("bfloat16", "float32", "float64") for dim in (256, 512)]
        sizes = [("float32", 64), ("float32", 128), ("float64", 64), ("float64", 128), *sizes]
        yield from (Case("causal", arch, *size) for size in sizes for arch in TARGETS)


def measure(case: Case, hints: dict[str, int]) -> Usage | None:
    """Compile one kernel as `fa2.forward` would launch it; None: no tiles, the engine refuses."""
    gpu, limit = TARGETS[case.arch]
    found = tuning.Target(case.arch, limit)
    shape = (1, 2, SEQLEN, case.head_dim)
    inputs = Inputs(*(torch.zeros(shape, dtype=getattr(torch, case.dtype)) for _ in range(3)))
    score_mod, mask_mod = MODS[case.mod]()
    problem = make_problem(inputs, score_mod, mask_mod, None, hints)
    if tuning.plan(problem, found) is None:
        return None
    plan, problem = fa2.prepare(problem, inputs, found)
    tiles, planned = plan.tiles, tuning.shared_bytes(plan.tiles, problem)
    sizes = (tiles.q, tiles.kv, tiles.warps, tiles.stages)
    started = time.perf_counter()
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    try:
        kernel = triton.compile(_source(plan, problem, inputs, found), target=gpu, options=options)
    except Exception as error:
        seconds = time.perf_counter() - started
        return Usage(case, sizes, 0, planned, 0, 0, seconds, f"{type(error).__name__}: {error}")
    registers, spills = _resources(kernel, gpu)
    seconds = time.perf_counter() - started
    return Usage(case, sizes, kernel.metadata.shared, planned, registers, spills, seconds)


def _source(plan: fa2.Plan, problem: Problem, inputs: Inputs, found: tuning.Target) -> ASTSource:
    """The kernel with the argument types of a launch; pointers are 16-byte aligned."""
    kernel = plan.module.forward
    out = new_output(problem, inputs.query)
    statistics = torch.empty(1, dtype=problem.work_dtype)
    first, last = fa2._map_arguments(problem)[:2], fa2._map_arguments(problem)[2:]
    counts = (problem.heads, problem.group, problem.q_len, problem.kv_len)
    programs = [p for p in (problem.score, problem.mask_program) if p is not None]
    values = [
        *inputs, out, statistics, statistics, *first, problem.scale, *counts,
        *fa2._strides(problem, inputs, out), *last,
        *(a for p in programs for a in fa2._mod_arguments(p, found)),
    ]  # fmt: skip
    names = kernel.arg_names
    signature = {n: _type(v, kernel.params[i]) for i, (n, v) in enumerate(zip(names, values))}  # noqa: B905
    signature |= dict.fromkeys(plan.fields, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(4)}
    return ASTSource(kernel, signature, dict(plan.fields), aligned)


def _type(value: Any, parameter: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if parameter.annotation_type:
        return parameter.annotation_type
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _resources(kernel: Any, gpu: GPUTarget) -> tuple[int, int]:
    """Registers and spilled bytes a thread."""
    if gpu.backend == "hip":
        text = kernel.asm["amdgcn"]
        count = lambda name: int(re.search(rf"\.{name}:\s+(\d+)", text)[1])  # noqa: E731
        return count("vgpr_count"), 4 * count("vgpr_spill_count")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.check_output([tool, "--dump-resource-usage", file.name], text=True)
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("groups", nargs="+", choices=("mods", "heads", "wide"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="part of a case's label")
    parser.add_argument("--hint", action="append", default=[], help="BLOCK_M=64, num_warps=8, ...")
    options = parser.parse_args()
    hints = {name: int(value) for name, _, value in (h.partition("=") for h in options.hint)}
    for case in cases(options.groups):
        if options.only not in case.label:
            continue
        usage = measure(case, hints)
        if options.json:
            print(json.dumps({"case": asdict(case), "usage": usage and asdict(usage)}))
        elif usage is None:
            print(f"{case.label:<44} refused: no tiles fit")
        else:
            note = usage.error or f"{usage.registers:>4} registers {usage.spills:>6} spilled"
            print(f"{case.label:<44} {str(usage.tiles):<20} {usage.shared:>7} B "
                  f"(planned {usage.planned:>7}) {note} {usage.seconds:.1f} s")  # fmt: skip
        sys.stdout.flush()


if __name__ == "__main__":
    main()
