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
    launch, result = prepare(problem, inputs, found)
    launch.run()
    return Result(result.out.to(problem.dtype), result.lse, result.max_scores)


def prepare(problem: Problem, inputs: Inputs, found: tuning.Target) -> tuple[kernel.Launch, Result]:
    """The launch, and the tensors that it will fill."""
    tiles = tuning.plan(problem, found, "forward")
    assert tiles is not None  # `refuses` has looked
    problem, tiles = fitted(problem, tiles)
    ready = Inputs(*kernel.prepared(inputs, found))
    out = new_output(problem, ready.query)
    fields = kernel.fields(problem, ready, [out], tiles, found)
    fields["HAS_SINK"] = problem.sink is not None
    module = kernel.load("fa2_forward.py.jinja", problem, fields, tiles, found)
    shape = (problem.batch, problem.heads, problem.q_len)
    lse = torch.empty(shape, dtype=problem.work_dtype, device=problem.device)
    result = Result(out, lse, torch.empty_like(lse))
    runs = problem.mask.runs if problem.mask else None
    rows = problem.mask.grid.rows if problem.mask else 0
    spans, table, *plane_strides = kernel.map_arguments(problem, runs, rows)
    sink = lse if problem.sink is None else problem.sink.detach().to(problem.work_dtype)
    arguments = [
        *ready, *result, spans, table, problem.scale,
        sink, *kernel.dropout_arguments(problem),
        problem.heads, problem.group, problem.q_len, problem.kv_len,
        *kernel.strides(ready, out), *plane_strides, *kernel.mod_arguments(problem, found),
    ]  # fmt: skip
    programs = -(-problem.q_len // tiles.q) * problem.batch * problem.heads
    return kernel.Launch(module, "forward", programs, arguments, fields, tiles), result
