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
    query, key, value, d_out = kernel.prepared([*inputs, saved.d_out], found)
    ready = Inputs(query, key, value)
    statistics = (saved.lse.contiguous(), saved.delta.contiguous())
    plan = sums.plan(problem)
    in_order = problem.deterministic and plan.uses_atomics
    plan = sums.NOTHING if in_order else plan
    buffers: list[Tensor] = []
    d_query = torch.empty(query.shape, dtype=query.dtype, device=problem.device)
    d_key = torch.empty(key.shape, dtype=key.dtype, device=problem.device)
    d_value = torch.empty(value.shape, dtype=value.dtype, device=problem.device)
    for name, targets in (("backward_query", [d_query]), ("backward_key", [d_key, d_value])):
        tiles = tuning.plan(problem, found, name)
        assert tiles is not None  # `refuses` has looked
        fit, tiles = fitted(problem, tiles)
        buffers = buffers or plan.buffers(fit, tiles)
        _run(name, fit, ready, d_out, statistics, targets, tiles, plan, buffers, found)
    if in_order:
        captured = captures.in_order(problem, inputs, saved)
    else:
        captured = plan.scatter(problem, buffers)
    return Gradients(d_query, d_key, d_value, captured)


def _run(
    name: str,
    problem: Problem,
    inputs: Inputs,
    d_out: Tensor,
    statistics: tuple[Tensor, Tensor],
    targets: list[Tensor],
    tiles: tuning.Tiles,
    plan: sums.Plan,
    buffers: list[Tensor],
    found: tuning.Target,
) -> None:
    """Launch one of the two kernels."""
    noted = kernel.fields(problem, inputs, tiles, found)
    noted["HAS_GRADIENT"] = problem.gradient is not None
    noted["HAS_SCORE_GRADIENT"] = problem.gradient is None or problem.gradient.score is not None
    noted["ALIGNED"] = noted["ALIGNED"] and all(s % 8 == 0 for s in d_out.stride()[:3])
    module = kernel.load("fa2_backward.py.jinja", problem, noted, tiles, found, plan)
    mask = problem.mask
    by_query = name == "backward_query"
    runs = (mask.runs if by_query else mask.transposed) if mask else None
    rows = (mask.grid.rows if by_query else mask.grid.columns) if mask else 0
    indptr, table, *plane_strides = kernel.map_arguments(problem, runs, rows)
    arguments = [
        *inputs, d_out, *targets, *statistics, indptr, table, problem.scale,
        *kernel.dropout_arguments(problem),
        problem.heads, problem.group, problem.batch // inputs.key.shape[0],
        problem.q_len, problem.kv_len,
        *kernel.strides(inputs, d_out), *plane_strides,
        *kernel.mod_arguments(problem, found, gradient=True),
        *plan.arguments(problem, buffers),
    ]  # fmt: skip
    if by_query:
        programs = -(-problem.q_len // tiles.q) * problem.batch * problem.heads
    else:
        programs = -(-problem.kv_len // tiles.kv) * inputs.key.shape[0] * problem.kv_heads
    kernel.launch(getattr(module, name), programs, arguments, noted, tiles)
