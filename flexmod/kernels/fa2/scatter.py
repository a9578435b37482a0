"""From the sums that the backward kernels made to the gradients of captured tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flexmod.kernels.captures import flat_index
from flexmod.kernels.fa2.sums import Buffers, Plan
from flexmod.kernels.problem import Problem
from flexmod.program import Program
from flexmod.program.evaluate import evaluate
from flexmod.program.gradient import LoadGradient


@dataclass(frozen=True)
class Entries:
    """Where the sums of one load go.

    Attributes:
        axes: of the sums that the index does not depend on: they are summed first.
        flat: for each sum that is left, its entry in the flattened captured tensor; None: all
            entries have one sum, in their order.
    """

    axes: tuple[int, ...]
    flat: Tensor | None
    size: int = 0  # of the captured tensor

    def simplified(self) -> Entries:
        """Looks at the entries: on a GPU it has to wait for them."""
        if self.flat is None or len(self.flat) != self.size:
            return self
        in_order = torch.equal(self.flat, torch.arange(self.size, device=self.flat.device))
        return replace(self, flat=None) if in_order else self


class Scatter:
    """The last step of a backward, for all calls of one shape.

    Entries are known in advance unless the index is itself read from a captured tensor.
    """

    def __init__(self, problem: Problem, plan: Plan, buffers: Buffers) -> None:
        self.plan, self.buffers = plan, buffers
        self.calls = 0
        self.entries: list[Entries | None] = []  # None: read from tensors, which may change
        self.device = problem.device
        if problem.gradient is None or problem.score is None:
            return
        self.deterministic = problem.deterministic
        self.extents = (problem.batch, problem.heads, problem.q_len, problem.kv_len)
        self.work_dtype = problem.work_dtype
        self.tables = {
            load.slot: (c.shape, c.dtype)
            for load in plan.loads
            for c in [problem.score.captures[load.slot]]
        }
        program = problem.gradient.program
        self.program = replace(program, captures=())
        for n, load in enumerate(plan.loads):
            known = not _reads_tensors(program, load)
            self.entries.append(self._entries(program, n) if known else None)

    def __call__(self, sums: list[Tensor], captures: tuple[Tensor, ...]) -> dict[int, Tensor]:
        """Gradients by slot. `captures`: of score_mod's derivative."""
        if not sums:
            return {}
        self._look()
        found: dict[int, Tensor] = {}
        for n, (load, value) in enumerate(zip(self.plan.loads, sums, strict=True)):
            part = self._part(n, load, value, captures)
            found[load.slot] = found[load.slot] + part if load.slot in found else part
        return {
            slot: total.view(self.tables[slot][0]).to(self.tables[slot][1])
            for slot, total in found.items()
        }

    def _look(self) -> None:
        """Simplify entries once: not in a first call, which may be the only one, nor in a graph."""
        self.calls += 1
        is_captured = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self.calls == 2 and not is_captured:
            self.entries = [entries and entries.simplified() for entries in self.entries]

    def _part(
        self, n: int, load: LoadGradient, value: Tensor, captures: tuple[Tensor, ...]
    ) -> Tensor:
        """What one load adds to the flattened gradient."""
        if self.plan.kinds[n] == "element":
            return value
        entries = self.entries[n]
        if entries is None:
            entries = self._entries(replace(self.program, captures=captures), n)
        value = self.buffers.inner(n, value)
        value = value.sum(entries.axes) if entries.axes else value
        shape, dtype = self.tables[load.slot]
        dtype = torch.promote_types(dtype, self.work_dtype)
        if entries.flat is None:
            return value.flatten().to(dtype)
        total = torch.zeros(shape.numel(), dtype=dtype, device=value.device)
        value = value.flatten().to(dtype)
        if total.is_cuda and self.deterministic:  # sorts, so that the order is fixed
            return total.index_put_((entries.flat,), value, accumulate=True)
        return total.index_add_(0, entries.flat, value)

    def _entries(self, program: Program, n: int) -> Entries:
        load, kind = self.plan.loads[n], self.plan.kinds[n]
        if kind == "element":
            return Entries((), None)
        where, shape = self._where(program, load, kind), self.buffers.inner_shape(n)
        axes = tuple(a for a in range(3) if where.shape[a] == 1 < shape[a])
        left = [1 if a in axes else size for a, size in enumerate(shape)]
        return Entries(axes, where.expand(left).flatten(), self.tables[load.slot][0].numel())

    def _where(self, program: Program, load: LoadGradient, kind: str) -> Tensor:
        """Entry of the flattened captured tensor for each sum: [b, h, sums], or 1 for an axis."""
        batch, heads, q_len, kv_len = self.extents
        count = lambda n: torch.arange(n, device=self.device)  # noqa: E731
        zero = count(1)
        offset = count(q_len + kv_len - 1) - (q_len - 1)  # kv_idx - q_idx of each diagonal
        q_idx, kv_idx = {
            "plane": (zero, zero),
            "product": (zero, zero),
            "row": (count(q_len), zero),
            "column": (zero, count(kv_len)),
            "diagonal": ((-offset).clamp(min=0), offset.clamp(min=0)),
        }[kind]
        unread = torch.zeros((), device=self.device, dtype=self.work_dtype)
        outputs, _ = evaluate(program, {
            "b": count(batch)[:, None, None], "h": count(heads)[:, None],
            "q_idx": q_idx, "kv_idx": kv_idx, "grad": unread, "score": unread,
        })  # fmt: skip
        shape = self.tables[load.slot][0]
        return flat_index([outputs[i] for i in load.indices], shape, self.device)[0]


def _reads_tensors(program: Program, load: LoadGradient) -> bool:
    """Whether the index of a load depends on what captured tensors hold."""
    needed = {program.outputs[i] for i in load.indices}
    for position in range(max(needed, default=-1), -1, -1):
        if position in needed:
            needed.update(program.instructions[position].args)
    return any(program.instructions[position].op == "load" for position in needed)
