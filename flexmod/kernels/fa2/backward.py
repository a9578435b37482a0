"""Backward of the fa2 engine: two kernels, then the sums of captured tensors are scattered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexmod.errors import BackendError
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
    call = Backward(problem, inputs, saved, sums.NOTHING if in_order else plan, found)
    call.over_queries().run()
    call.over_keys().run()
    if in_order:
        captured = captures.in_order(problem, inputs, saved)
    else:
        captured = plan.scatter(problem, call.buffers)
    return Gradients(call.d_query, call.d_key, call.d_value, call.delta, captured)


class Backward:
    """Both launches of one call, and the tensors that they fill.

    `over_queries` fills d_query, delta and sums; `over_keys` reads delta and fills d_key, d_value
    and sums.
    """

    def __init__(
        self, problem: Problem, inputs: Inputs, saved: Saved, plan: sums.Plan, found: tuning.Target
    ) -> None:
        self.plan, self.found = plan, found
        query, key, value, self.out, self.d_out = kernel.prepared(
            [*inputs, saved.out, saved.d_out], found
        )
        self.inputs = Inputs(query, key, value)
        self.d_query, self.d_key, self.d_value = (
            torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in self.inputs
        )
        self.lse = saved.lse.contiguous()
        self.d_lse = None if saved.d_lse is None else saved.d_lse.contiguous()
        self.delta = torch.empty_like(self.lse)
        self.by_query = fitted(problem, self._tiles(problem, "backward_query"))
        self.by_key = fitted(problem, self._tiles(problem, "backward_key"))
        self.buffers = plan.buffers(*self.by_query)

    def _tiles(self, problem: Problem, name: str) -> tuning.Tiles:
        tiles = tuning.plan(problem, self.found, name)
        if tiles is None:
            raise BackendError(f"fa2 has no backward: {tuning.limit(problem, self.found)}")
        return tiles

    def over_queries(self) -> kernel.Launch:
        problem, tiles = self.by_query
        mask = problem.mask
        runs, rows = (mask.runs, mask.grid.rows) if mask else (None, 0)
        d_lse = self.lse if self.d_lse is None else self.d_lse  # lse: not read
        own = [self.out, self.d_query, d_lse, *self.out.stride()[:3]]
        programs = -(-problem.q_len // tiles.q) * problem.batch * problem.heads
        places = kernel.map_arguments(problem, runs, rows)
        return self._launch("backward_query", problem, tiles, own, places, programs)

    def over_keys(self) -> kernel.Launch:
        problem, tiles = self.by_key
        mask = problem.mask
        runs, rows = (mask.transposed, mask.grid.columns) if mask else (None, 0)
        own = [self.d_key, self.d_value]
        programs = -(-problem.kv_len // tiles.kv) * self.inputs.key.shape[0] * problem.kv_heads
        places = kernel.map_arguments(problem, runs, rows)
        return self._launch("backward_key", problem, tiles, own, places, programs)

    def _launch(
        self,
        name: str,
        problem: Problem,
        tiles: tuning.Tiles,
        own: list[Any],
        places: tuple[Tensor, Tensor, int, int],
        programs: int,
    ) -> kernel.Launch:
        fields = self._fields(problem, tiles)
        module = kernel.load("fa2_backward.py.jinja", problem, fields, tiles, self.found, self.plan)
        indptr, table, *plane_strides = places
        arguments = [
            *self.inputs, self.d_out, *own, self.lse, self.delta, indptr, table, problem.scale,
            *kernel.dropout_arguments(problem), problem.heads, problem.group,
            problem.batch // self.inputs.key.shape[0], problem.q_len, problem.kv_len,
            *kernel.strides(self.inputs, self.d_out), *plane_strides,
            *kernel.mod_arguments(problem, self.found, gradient=True),
            *self.plan.arguments(problem, self.buffers),
        ]  # fmt: skip
        return kernel.Launch(module, name, programs, arguments, fields, tiles)

    def _fields(self, problem: Problem, tiles: tuning.Tiles) -> dict[str, Any]:
        """Compile-time arguments of both kernels."""
        gradient = problem.gradient
        others = (self.out, self.d_out)
        fields = kernel.fields(problem, self.inputs, others, tiles, self.found)
        fields["HAS_D_LSE"] = self.d_lse is not None
        fields["HAS_GRADIENT"] = gradient is not None
        fields["HAS_SCORE_GRADIENT"] = gradient is None or gradient.score is not None
        return fields
