"""Backward of the fa2 engine: two kernels, then the sums of captured tensors are scattered."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmod.kernels import captures, tuning
from flexmod.kernels.fa2 import kernel, sums
from flexmod.kernels.fa2.forward import fitted
from flexmod.kernels.fa2.target import target
from flexmod.kernels.problem import Gradients, Inputs, Problem, Saved


def backward(problem: Problem, inputs: Inputs, saved: Saved) -> Gradients:
    found = target(problem.device)
    assert isinstance(found, tuning.Target)
    plan = sums.plan(problem)
    in_order = problem.deterministic and plan.uses_atomics
    launches, targets, buffers = prepare(
        problem, inputs, saved, sums.NOTHING if in_order else plan, found
    )
    for launch in launches:
        launch.run()
    if in_order:
        captured = captures.in_order(problem, inputs, saved)
    else:
        captured = plan.scatter(problem, buffers)
    return Gradients(*targets, captured)


def prepare(
    problem: Problem, inputs: Inputs, saved: Saved, plan: sums.Plan, found: tuning.Target
) -> tuple[list[kernel.Launch], list[Tensor], list[Tensor]]:
    """The two launches, the gradients of query, key and value, and the sums that they fill."""
    query, key, value, d_out = kernel.prepared([*inputs, saved.d_out], found)
    ready = Inputs(query, key, value)
    targets = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in ready]
    statistics = [saved.lse.contiguous(), saved.delta.contiguous()]
    by_query, by_key = (
        fitted(problem, _tiles(problem, found, name)) for name in ("query", "key")
    )
    buffers = plan.buffers(*by_query)
    shared = [d_out, statistics, plan, buffers, found]
    launches = [
        _launch("query", by_query, ready, targets[:1], *shared),
        _launch("key", by_key, ready, targets[1:], *shared),
    ]
    return launches, targets, buffers


def _tiles(problem: Problem, found: tuning.Target, name: str) -> tuning.Tiles:
    tiles = tuning.plan(problem, found, f"backward_{name}")
    assert tiles is not None  # `refuses` has looked
    return tiles


def _launch(
    name: str,
    fit: tuple[Problem, tuning.Tiles],
    inputs: Inputs,
    targets: list[Tensor],
    d_out: Tensor,
    statistics: list[Tensor],
    plan: sums.Plan,
    buffers: list[Tensor],
    found: tuning.Target,
) -> kernel.Launch:
    """One of the two kernels: `backward_query` or `backward_key`."""
    problem, tiles = fit
    fields = kernel.fields(problem, inputs, tiles, found)
    fields["HAS_GRADIENT"] = problem.gradient is not None
    fields["HAS_SCORE_GRADIENT"] = problem.gradient is None or problem.gradient.score is not None
    fields["ALIGNED"] = fields["ALIGNED"] and all(s % 8 == 0 for s in d_out.stride()[:3])
    module = kernel.load("fa2_backward.py.jinja", problem, fields, tiles, found, plan)
    mask, query_rows = problem.mask, name == "query"
    runs = (mask.runs if query_rows else mask.transposed) if mask else None
    rows = (mask.grid.rows if query_rows else mask.grid.columns) if mask else 0
    indptr, table, *plane_strides = kernel.map_arguments(problem, runs, rows)
    key_batches = inputs.key.shape[0]
    arguments = [
        *inputs, d_out, *targets, *statistics, indptr, table, problem.scale,
        *kernel.dropout_arguments(problem),
        problem.heads, problem.group, problem.batch // key_batches,
        problem.q_len, problem.kv_len,
        *kernel.strides(inputs, d_out), *plane_strides,
        *kernel.mod_arguments(problem, found, gradient=True),
        *plan.arguments(problem, buffers),
    ]  # fmt: skip
    if query_rows:
        programs = -(-problem.q_len // tiles.q) * problem.batch * problem.heads
    else:
        programs = -(-problem.kv_len // tiles.kv) * key_batches * problem.kv_heads
    return kernel.Launch(getattr(module, f"backward_{name}"), programs, arguments, fields, tiles)
