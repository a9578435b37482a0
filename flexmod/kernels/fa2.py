"""The `fa2` engine: plain Triton, for CUDA sm_80 and newer and for ROCm.

On CPU tensors it runs in Triton's interpreter (set TRITON_INTERPRET=1 before Triton is imported):
that is how its kernels are tested without a GPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flexmod.errors import BackendError
from flexmod.kernels import compile as kernel_cache
from flexmod.kernels import templates, tuning
from flexmod.kernels.problem import Inputs, Problem, Result, new_output
from flexmod.program import Program
from flexmod.program.emit import Function, arguments, emit, is_wide

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_IDENTITY = Function(
    "@triton.jit\ndef score_mod(score, b, h, q_idx, kv_idx):\n    return score\n", ()
)
_ALL_VISIBLE = Function("@triton.jit\ndef mask_mod(b, h, q_idx, kv_idx):\n    return True\n", ())
_INTERPRETER = tuning.Target("interpreter", 1 << 30)


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def target(device: torch.device) -> tuning.Target | str:
    """The architecture of a device and its shared memory, or why it cannot be used."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return "Triton is not installed"
    if interpreted():
        return _INTERPRETER
    if device.type != "cuda":
        return "it needs a GPU (on CPU: set TRITON_INTERPRET=1 before Triton is imported)"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return tuning.Target(properties.gcnArchName.split(":")[0], 64 << 10)
    if properties.major < 8:
        return (
            f"it needs compute capability 8.0, this GPU has {properties.major}.{properties.minor}"
        )
    arch = f"sm_{properties.major}{properties.minor}"
    return tuning.Target(arch, properties.shared_memory_per_block_optin)


def refuses(problem: Problem) -> str | None:
    """Why this engine cannot serve a problem, or None."""
    found = target(problem.device)
    if isinstance(found, str):
        return found
    if problem.gradient is not None or problem.sink is not None or problem.dropout_p:
        return "it has no backward pass"
    if problem.dtype not in _DTYPES:
        return f"it does not take {problem.dtype}"
    if tuning.plan(problem, found) is None:
        return (
            f"no tile of head_dim {problem.head_dim} and {problem.value_dim} in {problem.dtype} "
            f"fits into {found.shared >> 10} KiB of shared memory"
        )
    return None


@dataclass(frozen=True)
class Plan:
    """A kernel, ready to launch."""

    module: ModuleType
    fields: dict[str, Any]
    tiles: tuning.Tiles


def prepare(problem: Problem, inputs: Inputs, found: tuning.Target) -> tuple[Plan, Problem]:
    """Choose tiles, fit the map's blocks to them, and load the kernel."""
    from dataclasses import replace

    tiles = tuning.plan(problem, found)
    assert tiles is not None  # `refuses` has looked
    if problem.mask is not None:
        fitted = tuning.fit_blocks(tiles, problem.mask.block_size)
        if fitted is None:
            problem = replace(problem, mask=problem.mask.regrid((tiles.q, tiles.kv)))
        tiles = fitted or tiles
    fields = kernel_fields(problem, inputs, tiles, found.arch)
    module = load_kernel(problem, fields, tiles, found.arch)
    return Plan(module, fields, tiles), problem


def kernel_fields(
    problem: Problem, inputs: Inputs, tiles: tuning.Tiles, arch: str
) -> dict[str, Any]:
    """The compile-time arguments of the kernel."""
    block = problem.mask.block_size if problem.mask else (1, 1)
    vector = 16 // problem.dtype.itemsize
    strides = [s for x in inputs for s in x.stride()[:3]] + [padded_stride(problem)]
    aligned = vector <= 8 and all(s % 8 == 0 for s in strides)
    return {
        "HEAD_DIM": problem.head_dim,
        "VALUE_DIM": problem.value_dim,
        "PADDED_DIM": tuning.padded(problem.head_dim),
        "PADDED_VALUE": tuning.padded(problem.value_dim),
        "TILE_Q": tiles.q,
        "TILE_KV": tiles.kv,
        "BLOCK_Q": block[0],
        "BLOCK_KV": block[1],
        "HAS_SCORE": problem.score is not None,
        "HAS_MASK": problem.mask is not None,
        "HAS_MAP": problem.mask is not None,
        "WIDE": any(is_wide(x) for x in inputs),
        "ALIGNED": aligned,
        "PRECISION": tuning.precision(arch, problem.dtype),
    }


def padded_stride(problem: Problem) -> int:
    """The row stride of the output in the densest layout."""
    return problem.value_dim


def load_kernel(
    problem: Problem, fields: dict[str, Any], tiles: tuning.Tiles, arch: str
) -> ModuleType:
    import triton

    fast = arch.startswith("sm_") and problem.dtype.itemsize == 2

    def function(program: Program | None, default: Function, prefix: str) -> Function:
        return emit(program, prefix, fast) if program is not None else default

    def render() -> str:
        score = function(problem.score, _IDENTITY, "score_")
        mask = function(problem.mask_program, _ALL_VISIBLE, "mask_")
        scale = "fp64" if problem.dtype == torch.float64 else "fp32"
        return templates.render("fa2_forward.py.jinja", score, mask, scale_type=scale)

    signature = ("fa2_forward", problem.dtype, fast, *map(_signature, _programs(problem)))
    noted = {"dtype": problem.dtype, **fields, "warps": tiles.warps, "stages": tiles.stages}
    return kernel_cache.load(signature, render, noted, f"triton {triton.__version__}, {arch}")


def _programs(problem: Problem) -> tuple[Program | None, Program | None]:
    return problem.score, problem.mask_program


def _signature(program: Program | None) -> object:
    if program is None:
        return None
    return program.structure, tuple(is_wide(c) for c in program.captures)


def forward(problem: Problem, inputs: Inputs) -> Result:
    found = target(problem.device)
    assert isinstance(found, tuning.Target)
    if found is _INTERPRETER:
        inputs, dtype = _without_bfloat16(inputs)
    else:
        dtype = problem.dtype
    inputs = Inputs(*(_unit_stride(x) for x in inputs))
    plan, problem = prepare(problem, inputs, found)
    out = new_output(problem, inputs.query)
    shape = (problem.batch, problem.heads, problem.q_len)
    lse = torch.empty(shape, dtype=problem.work_dtype, device=problem.device)
    top = torch.empty_like(lse)
    grid = (-(-problem.q_len // plan.tiles.q) * problem.batch * problem.heads,)
    try:
        plan.module.forward[grid](
            *inputs, out, lse, top, *_map_arguments(problem)[:2], problem.scale,
            problem.heads, problem.group, problem.q_len, problem.kv_len,
            *_strides(problem, inputs, out), *_map_arguments(problem)[2:],
            *(a for p in _programs(problem) if p is not None for a in _mod_arguments(p, found)),
            **plan.fields, num_warps=plan.tiles.warps, num_stages=plan.tiles.stages,
        )  # fmt: skip
    except Exception as error:
        raise BackendError(f"fa2 could not build or launch its kernel: {error}") from error
    return Result(out.to(dtype), lse, top)


def _without_bfloat16(inputs: Inputs) -> tuple[Inputs, torch.dtype]:
    """Triton's interpreter keeps bfloat16 as raw bits and computes nonsense with it."""
    dtype = inputs.query.dtype
    if dtype != torch.bfloat16:
        return inputs, dtype
    return Inputs(*(x.float() for x in inputs)), dtype


def _mod_arguments(program: Program, found: tuning.Target) -> list[Any]:
    values = arguments(program)
    if found is _INTERPRETER:
        is_half = lambda v: isinstance(v, Tensor) and v.dtype == torch.bfloat16  # noqa: E731
        values = [v.float() if is_half(v) else v for v in values]
    return values


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _strides(problem: Problem, inputs: Inputs, out: Tensor) -> list[int]:
    strides = [list(x.stride()[:3]) for x in (*inputs, out)]
    for x, stride in zip(inputs[1:], strides[1:3], strict=True):
        if x.shape[0] == 1:
            stride[0] = 0  # one key/value batch serves all
    return [s for stride in strides for s in stride]


def _map_arguments(problem: Problem) -> tuple[Tensor, Tensor, int, int, int]:
    """indptr, runs, and how far planes are apart in rows of blocks (0: shared)."""
    if problem.mask is None:
        nothing = torch.empty(1, dtype=torch.int32, device=problem.device)
        return nothing, nothing, 0, 0, 0
    grid, runs = problem.mask.grid, problem.mask.runs
    b = grid.rows * grid.heads if grid.batch > 1 else 0
    h = grid.rows if grid.heads > 1 else 0
    return runs.indptr, runs.table, b, h, grid.rows
