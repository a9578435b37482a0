"""Kernels of the fa2 engine: their text, their compile-time fields, and their launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flexmod.blocks.runs import Runs
from flexmod.errors import BackendError
from flexmod.kernels import compile as kernel_cache
from flexmod.kernels import dropout, templates, tuning
from flexmod.kernels.fa2 import sums
from flexmod.kernels.fa2.target import INTERPRETER
from flexmod.kernels.problem import Inputs, Problem
from flexmod.program import Program
from flexmod.program.emit import Function, arguments, emit, is_wide

_IDENTITY = Function(
    "@triton.jit\ndef score_mod(score, b, h, q_idx, kv_idx):\n    return score\n", ()
)
_ALL_VISIBLE = Function("@triton.jit\ndef mask_mod(b, h, q_idx, kv_idx):\n    return True\n", ())
_PASSED = Function(
    "@triton.jit\ndef gradient_mod(grad, score, b, h, q_idx, kv_idx):\n    return (grad,)\n", ()
)


def fields(
    problem: Problem,
    inputs: Inputs,
    others: Sequence[Tensor],
    tiles: tuning.Tiles,
    target: tuning.Target,
) -> dict[str, Any]:
    """Compile-time arguments that the forward and backward kernels share.

    `others` are the tensors beside query, key and value that are read or written in 16 bytes.
    """
    block = problem.mask.block_size if problem.mask else (1, 1)
    aligned = all(_is_aligned(x) for x in (*inputs, *others))
    distinct = all(0 not in x.stride()[2:] for x in inputs)  # no row repeated by stride 0
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
        "GATHERS": tuning.gathers(problem),
        "HAS_MAP": problem.mask is not None,
        "HAS_DROPOUT": problem.dropout_p > 0,
        "WIDE": any(is_wide(x) for x in inputs),
        "ALIGNED": aligned,
        "DESCRIPTORS": aligned and distinct and target.copies_tiles,
        "PRECISION": tuning.precision(target.arch, problem.dtype),
    }


def _is_aligned(x: Tensor) -> bool:
    """Whether every row starts at a multiple of 8 elements and of 16 bytes."""
    return x.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in x.stride()[:3])


def load(
    template: str,
    problem: Problem,
    noted: dict[str, Any],
    tiles: tuning.Tiles,
    target: tuning.Target,
    plan: sums.Plan | None = None,
) -> ModuleType:
    """The module of a template for a problem, from memory, disk or anew.

    A backward kernel has a plan of sums and the derivative of score_mod, a forward kernel neither.
    """
    import triton

    fast = target.arch.startswith("sm_") and problem.dtype.itemsize == 2
    gradient = problem.gradient.program if problem.gradient and plan else None
    programs = (problem.score, problem.mask_program, gradient)
    gluon = template.startswith("hopper")

    def render() -> str:
        return templates.render(
            template,
            mods={
                "score": emit(problem.score, "score_", fast, gluon) if problem.score else _IDENTITY,
                "mask": emit(problem.mask_program, "mask_", False, gluon)
                if problem.mask_program
                else _ALL_VISIBLE,
                "gradient": emit(gradient, "gradient_", fast, gluon) if gradient else _PASSED,
            },
            sums=plan or sums.NOTHING,
            dropout=problem.dropout_p > 0,
            real="fp64" if problem.dtype == torch.float64 else "fp32",
            fields=noted,
        )

    signature = (template, problem.dtype, fast, plan, *map(_signature, programs))
    # The types of captured tensors too: a module serves launches of one signature only.
    captured = tuple(c.dtype for p in programs if p is not None for c in p.captures)
    everything = {
        "dtype": problem.dtype,
        **noted,
        "warps": tiles.warps,
        "stages": tiles.stages,
        "captures": captured,
    }
    toolchain = f"triton {triton.__version__}, {target.arch}"
    return kernel_cache.load(signature, render, everything, toolchain)


def _signature(program: Program | None) -> object:
    if program is None:
        return None
    return program.key, tuple(is_wide(c) for c in program.captures)


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments, ready to run."""

    module: ModuleType
    name: str
    programs: int  # on a one-dimensional grid, which has no limit of 65,535
    arguments: list[Any]
    fields: dict[str, Any]  # compile-time arguments
    tiles: tuning.Tiles

    @property
    def kernel(self) -> Any:
        return getattr(self.module, self.name)

    def run(self) -> None:
        """Whatever Triton raises becomes one BackendError.

        A module serves one specialisation, so that after its first launch the compiled kernel is
        launched directly, unless an argument could change its type: misaligned tensors, wide ints.
        """
        direct: dict[Any, Any] = self.module.__dict__.setdefault("_direct", {})
        fixed = self.fields["ALIGNED"] and all(
            not isinstance(a, int) or -(2**31) <= a < 2**31 for a in self.arguments
        )
        key = (self.name, self.arguments[0].device.index) if fixed else None
        try:
            if self.fields["DESCRIPTORS"]:
                _lend_scratch()
            if key in direct:
                names = self.kernel.arg_names[len(self.arguments) :]
                constants = [self.fields[name] for name in names]
                direct[key][(self.programs, 1, 1)](*self.arguments, *constants)
                return
            compiled = self.kernel[(self.programs,)](
                *self.arguments,
                **self.fields,
                num_warps=self.tiles.warps,
                num_stages=self.tiles.stages,
                enable_fp_fusion=True,
            )
        except Exception as error:
            raise BackendError(f"fa2 could not build or launch its kernel: {error}") from error
        if key is not None and hasattr(compiled, "launch_metadata"):  # not in the interpreter
            direct[key] = compiled


def _lend_scratch() -> None:
    """Descriptors made in a kernel are kept in memory that Triton asks for at each launch."""
    import triton

    triton.set_allocator(
        lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda")
    )


def prepared(tensors: Sequence[Tensor], target: tuning.Target) -> list[Tensor]:
    """The last axis dense, and every tensor as the kernel can read it."""
    dense = [x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in tensors]
    return [readable(x, target) for x in dense]


def readable(x: Any, target: tuning.Target) -> Any:
    """Triton's interpreter keeps bfloat16 as raw bits and computes nonsense with it."""
    half = isinstance(x, Tensor) and x.dtype == torch.bfloat16
    return x.float() if half and target is INTERPRETER else x


def mod_arguments(problem: Problem, target: tuning.Target, gradient: bool = False) -> list[Any]:
    """What the mods of a kernel read: captured tensors with their strides, and numbers."""
    programs = [problem.score, problem.mask_program]
    if gradient and problem.gradient is not None:
        programs.append(problem.gradient.program)
    values = [value for p in programs if p is not None for value in arguments(p)]
    return [readable(v, target) for v in values]


def strides(inputs: Inputs, last: Tensor) -> list[int]:
    """Of query, key, value and `last`; one key/value batch that serves all has stride 0."""
    found = [list(x.stride()[:3]) for x in (*inputs, last)]
    for x, stride in zip(inputs[1:], found[1:3], strict=True):
        if x.shape[0] == 1:
            stride[0] = 0
    return [s for stride in found for s in stride]


def map_arguments(
    problem: Problem, runs: Runs | None, rows: int
) -> tuple[Tensor, Tensor, int, int]:
    """spans, runs, and how far the planes of the map are apart in rows (0: shared)."""
    if problem.mask is None or runs is None:
        nothing = torch.empty(1, dtype=torch.int32, device=problem.device)
        return nothing, nothing, 0, 0
    grid = problem.mask.grid
    b = rows * grid.heads if grid.batch > 1 else 0
    return runs.spans, runs.table, b, rows if grid.heads > 1 else 0


def dropout_arguments(problem: Problem) -> tuple[float, int, int, int]:
    """1 / (1 - p), the seed in two words, and the threshold of `dropout.keep`."""
    seed, p = problem.dropout_seed, problem.dropout_p
    return 1 / (1 - p), seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, dropout.threshold(p)
