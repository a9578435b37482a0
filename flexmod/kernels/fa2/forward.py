"""Forward of the fa2 engine."""

from __future__ import annotations

from dataclasses import replace

import torch

from flexmod.kernels import tuning
from flexmod.kernels.fa2 import kernel
from flexmod.kernels.fa2.target import target
from flexmod.kernels.problem import Inputs, Problem, Result, new_output


def fitted(problem: Problem, tiles: tuning.Tiles) -> tuple[Problem, tuning.Tiles]:
    """Tiles that divide the blocks of the map; the map in other blocks where they are too odd."""
    if problem.mask is None:
        return problem, tiles
    smaller = tuning.fit_blocks(tiles, problem.mask.block_size)
    if smaller is not None:
        return problem, smaller
    return replace(problem, mask=problem.mask.regrid((tiles.q, tiles.kv))), tiles


def forward(problem: Problem, inputs: Inputs) -> Result:
    found = target(problem.device)
    assert isinstance(found, tuning.Target)
    tiles = tuning.plan(problem, found, "forward")
    assert tiles is not None  # `refuses` has looked
    problem, tiles = fitted(problem, tiles)
    query, key, value = kernel.prepared(inputs, found)
    ready = Inputs(query, key, value)
    noted = kernel.fields(problem, ready, tiles, found)
    noted["HAS_SINK"] = problem.sink is not None
    module = kernel.load("fa2_forward.py.jinja", problem, noted, tiles, found)
    out = new_output(problem, query)
    shape = (problem.batch, problem.heads, problem.q_len)
    lse = torch.empty(shape, dtype=problem.work_dtype, device=problem.device)
    top = torch.empty_like(lse)
    runs = problem.mask.runs if problem.mask else None
    rows = problem.mask.grid.rows if problem.mask else 0
    indptr, table, *plane_strides = kernel.map_arguments(problem, runs, rows)
    sink = kernel.readable(problem.sink) if problem.sink is not None else lse  # lse: not read
    arguments = [
        query, key, value, out, lse, top, indptr, table, problem.scale,
        sink.detach(), *kernel.dropout_arguments(problem),
        problem.heads, problem.group, problem.q_len, problem.kv_len,
        *kernel.strides(ready, out), *plane_strides, *kernel.mod_arguments(problem, found),
    ]  # fmt: skip
    programs = -(-problem.q_len // tiles.q) * problem.batch * problem.heads
    kernel.launch(module.forward, programs, arguments, noted, tiles)
    return Result(out.to(problem.dtype), lse, top)
