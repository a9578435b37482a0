"""Kernels of the fa2 engine: their text, their compile-time fields, and their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flexmod.blocks import BlockMask
from flexmod.kernels import compile as kernel_cache
from flexmod.kernels import dropout, templates, tuning
from flexmod.kernels.fa2 import products, sums
from flexmod.kernels.fa2.target import INTERPRETER
from flexmod.kernels.problem import Inputs, Problem
from flexmod.program import Program
from flexmod.program.emit import Function, absent, emit, is_wide, layout, values

_COLUMNS = {"hopper_forward.py.jinja": "kv_idx", "hopper_backward.py.jinja": "q_idx"}


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
        "SCALES_FIRST": problem.scales_first,
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
    programs = {"score": problem.score, "mask": problem.mask_program, "gradient": gradient}
    columns = _COLUMNS.get(template, "")

    def emitted(kind: str, program: Program | None) -> Function:
        if program is None:
            return absent(kind, columns)
        return emit(program, f"{kind}_", fast and kind != "mask", columns)

    def render() -> str:
        mods = {kind: emitted(kind, program) for kind, program in programs.items()}
        if template == "hopper_backward.py.jinja" and plan is not None:
            mods["plane"] = products.function(plan, gradient, fast, mods["gradient"].names)
        return templates.render(
            template,
            mods=mods,
            sums=plan or sums.NOTHING,
            dropout=problem.dropout_p > 0,
            real="fp64" if problem.dtype == torch.float64 else "fp32",
            fields=noted,
        )

    signature = (template, problem.dtype, fast, plan, *map(_signature, programs.values()))
    # The types of captured tensors too: a module serves launches of one signature only.
    captured = tuple(c.dtype for p in programs.values() if p is not None for c in p.captures)
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
    return program.key, tuple(layout(c) for c in program.captures)


def written_dtype(dtype: torch.dtype, target: tuning.Target) -> torch.dtype:
    """Type of what a kernel writes: Triton's interpreter has no right bfloat16."""
    return torch.float32 if dtype == torch.bfloat16 and target is INTERPRETER else dtype


def dense(x: Tensor) -> Tensor:
    """As the kernels read queries, keys and values: the last axis dense, no pending sign."""
    x = x.resolve_neg()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def strides(inputs: Inputs, last: Tensor) -> list[int]:
    """Of query, key, value and `last`; one key/value batch that serves all has stride 0."""
    found = [list(x.stride()[:3]) for x in (*inputs, last)]
    for x, stride in zip(inputs[1:], found[1:3], strict=True):
        if x.shape[0] == 1:
            stride[0] = 0
    return [s for stride in found for s in stride]


def plane_strides(mask: BlockMask | None, rows: int) -> tuple[int, int]:
    """How far the planes of a map are apart, in its `rows` of blocks (0: shared)."""
    if mask is None:
        return 0, 0
    grid = mask.grid
    return (rows * grid.heads if grid.batch > 1 else 0), (rows if grid.heads > 1 else 0)


def mod_values(programs: Sequence[Program | None]) -> list[int | float]:
    """Strides, sizes and numbers that the mods of a kernel read, in the order of `load`'s text."""
    return [value for p in programs if p is not None for value in values(p)]


def dropout_values(problem: Problem) -> tuple[float, int]:
    """1 / (1 - p), and the threshold of `dropout.keep`."""
    return 1 / (1 - problem.dropout_p), dropout.threshold(problem.dropout_p)


def words(seed: int) -> tuple[int, int]:
    """The seed of dropout as the kernels take it."""
    return (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF) if seed else (0, 0)
