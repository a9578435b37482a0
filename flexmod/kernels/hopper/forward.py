"""Forward of the hopper engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flexmod.blocks.memory import in_blocks_of
from flexmod.kernels import fa2, tuning
from flexmod.kernels.fa2 import kernel
from flexmod.kernels.fa2.forward import Forward as Portable
from flexmod.kernels.fa2.target import target
from flexmod.kernels.hopper import tiles
from flexmod.kernels.launch import Launch
from flexmod.kernels.problem import Inputs, Operands, Problem, Result


def forward(problem: Problem, inputs: Inputs) -> Result:
    return prepare(problem, inputs)(problem.operands(inputs))


def prepare(problem: Problem, inputs: Inputs) -> Portable:
    """What runs this call, and every other that differs in its operands alone.

    Tensors whose rows the bulk copy engine cannot read go to fa2.
    """
    if not all(map(tiles.can_be_copied, inputs)):
        return fa2.prepare(problem, inputs)
    found = target(problem.device)
    assert isinstance(found, tuning.Target)
    return Forward(problem, inputs, found)


class Forward(Portable):
    """As that of fa2, with another kernel."""

    def _plan(self, problem: Problem, found: tuning.Target) -> tuple[Problem, tuning.Tiles]:
        cut, mask = tiles.forward(problem), problem.mask
        size = tuning.Tiles(tiles.ROWS * cut.consumers, cut.keys, 4, cut.stages)
        if mask is not None and mask.block_size[0] % size.q:
            problem = replace(problem, mask=in_blocks_of(mask, (size.q, mask.block_size[1])))
        return problem, size

    def _launch(
        self, problem: Problem, ready: Inputs, out: Tensor, size: tuning.Tiles, found: tuning.Target
    ) -> Launch:
        cut = tiles.forward(problem)
        count = -(-problem.q_len // size.q) * problem.batch * problem.heads
        programs = min(count, tiles.multiprocessors(problem.device))
        # Where rows have unlike lengths, a program takes the next tile when it is done with one.
        self.is_dynamic = problem.mask is not None and count > programs
        fields = self._fields(problem, cut)
        module = kernel.load("hopper_forward.py.jinja", problem, fields, size, found)
        rows = problem.mask.grid.rows if problem.mask else 0
        fixed = (
            *kernel.mod_values([problem.score, problem.mask_program]), problem.scale,
            problem.batch, ready.key.shape[0], problem.heads, problem.group,
            problem.q_len, problem.kv_len, *kernel.strides(ready, out),
            *kernel.plane_strides(problem.mask, rows),
        )  # fmt: skip
        return Launch(
            module, "forward", programs, fixed, fields, size, problem.device,
            options={"maxnreg": cut.most},
        )  # fmt: skip

    def _fields(self, problem: Problem, cut: tiles.Forward) -> dict[str, Any]:
        looks_at_ends = problem.mask is not None or tuning.gathers(problem)
        shared = tiles.fields(problem)
        return shared | {
            "HEAD_PIECES": -(-problem.head_dim // shared["PADDED_DIM"]),
            "VALUE_PIECES": -(-problem.value_dim // shared["PADDED_VALUE"]),
            "TILE_KV": cut.keys,
            "HAS_SINK": problem.sink is not None,
            "HAS_MAXIMA": problem.wants_max_scores,
            "EVEN": looks_at_ends and tiles.is_even(problem, cut.keys),
            "DYNAMIC": self.is_dynamic,
            "CONSUMERS": cut.consumers,
            "SIDES": cut.sides,
            "STAGES": cut.stages,
            "REGISTERS": cut.registers,
        }

    def __call__(self, given: Operands) -> Result:
        result = self.empty(given.query)
        counter = result.lse  # not read
        if self.is_dynamic:
            counter = torch.zeros(1, dtype=torch.int32, device=given.query.device)
        self.launch.run([counter, *self.tensors(given, result)])
        return result
