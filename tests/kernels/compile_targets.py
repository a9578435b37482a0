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
from triton.experimental.gluon._runtime import GluonASTSource

from flexmod import trace
from flexmod.attention import make_problem
from flexmod.autograd import with_gradient
from flexmod.kernels import tuning
from flexmod.kernels.fa2 import sums
from flexmod.kernels.fa2.backward import Backward
from flexmod.kernels.fa2.forward import Forward
from flexmod.kernels.hopper.backward import Backward as HopperBackward
from flexmod.kernels.hopper.forward import Forward as HopperForward
from flexmod.kernels.launch import Launch, readable
from flexmod.kernels.memory import shared_bytes
from flexmod.kernels.problem import Inputs, Saved

GROUPS = ("mods", "few", "heads", "backward", "hopper", "bounds", "wide")
BOUNDS = (
    ("relative_bias", "sm_86", "bfloat16", 128),
    ("causal", "sm_86", "float32", 256, "backward_key"),
    ("causal", "sm_86", "bfloat16", 512),
    ("causal", "sm_80", "float64", 256),
    ("causal", "sm_90", "float32", 64),
    ("causal", "sm_90", "bfloat16", 256),
    ("causal", "sm_100", "bfloat16", 256),
    ("relative_bias", "sm_100", "bfloat16", 128, "backward_key"),
    ("causal", "gfx942", "bfloat16", 512, "backward_query"),
)
SEQLEN = 1024  # long enough for full tiles
LSE = torch.zeros(1, 2, SEQLEN)
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 << 10),
    "sm_86": (GPUTarget("cuda", 86, 32), 99 << 10),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 << 10),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 << 10),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 << 10),
}
ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")  # of all groups but `bounds`
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
    kernel: str = "forward"  # or backward_query, backward_key, hopper_forward, hopper_backward
    seqlen: int = SEQLEN

    @property
    def label(self) -> str:
        length = "" if self.seqlen == SEQLEN else f" S{self.seqlen}"
        return f"{self.kernel} {self.mod} {self.arch} {self.dtype} D{self.head_dim}{length}"

    @property
    def may_spill(self) -> bool:
        """Whether its registers are known not to suffice: accumulators of a backward and of wide
        heads fill them, and loads that may be out of range hold an address and a flag a pair."""
        if self.kernel == "hopper_forward":  # three consumers leave a producer few for a map
            return self.head_dim > 128 or self.mod == "checked_load" or self.seqlen > SEQLEN
        return self.kernel != "forward"


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
    """`mods`: all mods at D 64; `few` of them; `heads`: D 128; `wide`: other dtypes and dims;
    `bounds`: where shared memory was seen to be closest to what is planned."""
    if "few" in groups:
        mods = ("none", "relative_bias", "documents", "floor_division")
        yield from (Case(mod, arch, "bfloat16", 64) for mod in mods for arch in ARCHS)
    if "mods" in groups:
        yield from (Case(mod, arch, "bfloat16", 64) for mod in MODS for arch in ARCHS)
    if "heads" in groups:
        mods = ("none", "softcap_causal")
        yield from (Case(mod, arch, "bfloat16", 128) for mod in mods for arch in ARCHS)
    if "backward" in groups:
        named = [("relative_bias", 64), ("softcap_causal", 128)]
        for kernel in ("backward_query", "backward_key"):
            pairs = [(mod, dim, arch) for mod, dim in named for arch in ARCHS]
            yield from (Case(mod, arch, "bfloat16", dim, kernel) for mod, dim, arch in pairs)
    if "hopper" in groups:
        mods = ("causal", "documents", "relative_bias", "checked_load", "composed")
        pairs = [*((mod, 64) for mod in mods), ("none", 128), ("softcap_causal", 128)]
        pairs += [("causal", 32), ("causal", 192), ("none", 256)]
        yield from (Case(mod, "sm_90", "bfloat16", dim, "hopper_forward") for mod, dim in pairs)
        yield Case("causal", "sm_90", "bfloat16", 64, "hopper_forward", 16384)
        pairs = [("softcap_causal", 64), ("causal", 128), ("relative_bias", 128), ("composed", 64)]
        pairs += [("causal", 32)]
        yield from (Case(mod, "sm_90", "bfloat16", dim, "hopper_backward") for mod, dim in pairs)
    if "bounds" in groups:
        yield from (Case(*case) for case in BOUNDS)
    if "wide" in groups:
        sizes = [(dtype, dim) for dtype in ("bfloat16", "float32", "float64") for dim in (256, 512)]
        sizes = [("float32", 64), ("float32", 128), ("float64", 64), ("float64", 128), *sizes]
        yield from (Case("causal", arch, *size) for size in sizes for arch in ARCHS)


def measure(case: Case, hints: dict[str, int]) -> Usage | None:
    """Compile one kernel as the engine would launch it; None: no tiles fit, the engine refuses."""
    gpu, limit = TARGETS[case.arch]
    prepared = _prepared(case, tuning.Target(case.arch, limit), hints)
    if prepared is None:
        return None
    launch, tensors, planned = prepared
    tiles = launch.tiles
    sizes = (tiles.q, tiles.kv, tiles.warps, tiles.stages)
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages, "enable_fp_fusion": True}
    options |= launch.options
    started = time.perf_counter()
    try:
        kernel = triton.compile(_source(launch, tensors), target=gpu, options=options)
    except Exception as error:
        seconds = time.perf_counter() - started
        return Usage(case, sizes, 0, planned, 0, 0, seconds, f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - started
    return Usage(case, sizes, kernel.metadata.shared, planned, *_resources(kernel, gpu), seconds)


def _prepared(
    case: Case, found: tuning.Target, hints: dict[str, int]
) -> tuple[Launch, list[torch.Tensor], int] | None:
    """The launch of a case, its tensors, and the bytes of shared memory it was planned with."""
    dtype = getattr(torch, case.dtype)
    inputs = Inputs(*(torch.zeros(1, 2, case.seqlen, case.head_dim, dtype=dtype) for _ in range(3)))
    score_mod, mask_mod = MODS[case.mod]()
    score = trace(score_mod, "score") if score_mod else None
    problem = make_problem(inputs, score, mask_mod, kernel_options=hints)
    if score is not None and "backward" in case.kernel:
        slots = frozenset(n for n, c in enumerate(score.captures) if c.is_floating_point())
        problem = with_gradient(problem, score, slots)
    if case.kernel == "hopper_forward":
        run = HopperForward(problem, inputs, found)
        given = problem.operands(inputs)
        counter = torch.zeros(1, dtype=torch.int32) if run.is_dynamic else LSE
        return run.launch, [counter, *run.tensors(given, run.empty(inputs.query))], found.shared
    if case.kernel == "hopper_backward":
        saved = Saved(inputs.query, LSE, inputs.query, None)
        back = HopperBackward(problem, inputs, saved, found)
        given = problem.operands(inputs)
        _, tensors, _ = back.tensors(given, saved, back.empty(), back.captured.make())
        return back.passes[0].over_keys, tensors, found.shared
    if tuning.plan(problem, found, case.kernel) is None:
        return None
    if case.kernel == "forward":
        run = Forward(problem, inputs, found)
        launch, tensors = run.launch, run.tensors(problem.operands(inputs), run.empty(inputs.query))
    else:
        lse = torch.zeros(1, 2, SEQLEN, dtype=problem.work_dtype)
        saved = Saved(inputs.query, lse, inputs.query, None)
        back = Backward(problem, inputs, saved, sums.plan(problem), found)
        given = problem.operands(inputs)
        both = back.tensors(given, saved, back.empty(), back.buffers.make())
        at = ("backward_query", "backward_key").index(case.kernel)
        launch, tensors = (back.over_queries, back.over_keys)[at], both[at]
    work, tiles = tuning.work_of(problem, found, case.kernel), launch.tiles
    planned = shared_bytes(work, tiles.q, tiles.kv, tiles.stages)
    return launch, [x if x.dtype != torch.bool else readable(x) for x in tensors], planned


def _source(launch: Launch, tensors: list[torch.Tensor]) -> ASTSource:
    """The kernel with the argument types of its launch; tensors are 16-byte aligned."""
    kernel, signature, aligned = launch.kernel, {}, {}
    values = [*tensors, *launch.fixed, 0, 0]
    for number, (parameter, value) in enumerate(zip(kernel.params, values, strict=False)):
        signature[parameter.name] = _type(value, parameter)
        if isinstance(value, torch.Tensor) and not parameter.do_not_specialize:
            aligned[(number,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(launch.fields, "constexpr")
    ordered = {name: signature.pop(name) for name in kernel.arg_names}
    assert not signature, f"no parameters for {list(signature)}"
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    return source(kernel, ordered, dict(launch.fields), aligned)


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
        count = lambda name: int(re.search(rf"\.{name}:\s+(\d+)", text)[1])
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
    parser.add_argument("groups", nargs="+", choices=GROUPS)
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
            row = {"case": asdict(case), "usage": usage and asdict(usage)}
            row |= {"may_spill": case.may_spill, "triton": triton.__version__}
            print(json.dumps(row))
        elif usage is None:
            print(f"{case.label:<52} refused: no tiles fit")
        else:
            note = usage.error or f"{usage.registers:>4} registers {usage.spills:>6} spilled"
            print(f"{case.label:<52} {usage.tiles!s:<20} {usage.shared:>7} B "
                  f"(planned {usage.planned:>7}) {note} {usage.seconds:.1f} s")  # fmt: skip
        sys.stdout.flush()


if __name__ == "__main__":
    main()
