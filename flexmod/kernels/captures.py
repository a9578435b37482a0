"""Gradients of captured tensors: sums over the positions that read each entry.

Axes that an index does not depend on are summed first; only what is left is scattered. An index
that depends on kv_idx - q_idx alone (relative biases) is summed along diagonals.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexmod.kernels.problem import Inputs, Problem, Saved
from flexmod.program.dependence import dependence
from flexmod.program.gradient import LoadGradient


class Accumulator:
    """Running sums, one per captured tensor that needs a gradient, in the working precision."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.sums: dict[int, Tensor] = {}
        gradient = problem.gradient
        if gradient is None:
            return
        for load in gradient.loads:
            self.sums.setdefault(load.slot, self._zeros(load.slot))
        lines = dependence(gradient.program)
        self.diagonal = {
            load: all(lines[gradient.program.outputs[i]].by_difference for i in load.indices)
            and any(lines[gradient.program.outputs[i]].reads_both for i in load.indices)
            for load in gradient.loads
        }

    def _zeros(self, slot: int) -> Tensor:
        assert self.problem.score is not None
        tensor = self.problem.score.captures[slot]
        dtype = torch.promote_types(tensor.dtype, self.problem.work_dtype)
        return torch.zeros(tensor.numel(), dtype=dtype, device=tensor.device)

    def add(
        self,
        load: LoadGradient,
        outputs: tuple[Tensor, ...],
        indices: dict[str, Tensor],
        shape: torch.Size,  # [b, h, rows, keys] of the step
        unseen: Tensor,  # where the weight is 0
    ) -> None:
        """Add what one load receives in one step."""
        value = outputs[load.value].expand(shape).masked_fill(unseen, 0.0)
        assert self.problem.score is not None
        table = self.problem.score.captures[load.slot]
        where = flat_index([outputs[i] for i in load.indices], table.shape, table.device)
        if self.diagonal[load]:
            value = _diagonal_sums(value)
            where = _along_diagonals(where.expand(*where.shape[:-2], *shape[-2:]))
        self._scatter(load, value, where)

    def _scatter(self, load: LoadGradient, value: Tensor, where: Tensor) -> None:
        """Sum what shares an index by its shape, then add by index."""
        while where.ndim > value.ndim and where.shape[0] == 1:
            where = where.squeeze(0)
        where = where.view([1] * (value.ndim - where.ndim) + list(where.shape))
        rest = [axis for axis in range(value.ndim) if where.shape[axis] == 1 < value.shape[axis]]
        value = value.sum(rest, keepdim=True) if rest else value
        total = self.sums[load.slot]
        flat, value = where.expand_as(value).flatten(), value.flatten().to(total.dtype)
        if total.is_cuda and self.problem.deterministic:  # sorts, so that the order is fixed
            total.index_put_((flat,), value, accumulate=True)
        else:
            total.index_add_(0, flat, value)

    def totals(self) -> dict[int, Tensor]:
        """Slot of the captured tensor -> gradient in its shape and dtype."""
        if not self.sums:
            return {}
        assert self.problem.score is not None
        captured = self.problem.score.captures
        return {
            slot: total.view(captured[slot].shape).to(captured[slot].dtype)
            for slot, total in self.sums.items()
        }


def flat_index(indices: Sequence[Tensor], shape: Sequence[int], device: torch.device) -> Tensor:
    """Position in a flattened tensor, int64 [b, h, rows, keys], 1 where no index depends on one."""
    flat = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=device)
    for index, length in zip(indices, shape, strict=True):
        index = index.long()
        flat = flat * length + torch.where(index < 0, index + length, index).clamp(0, length - 1)
    return flat


def in_order(problem: Problem, inputs: Inputs, saved: Saved) -> dict[int, Tensor]:
    """Gradients of captured tensors in one fixed order, by torch operations: for determinism."""
    from flexmod.kernels.cpu.backward import backward

    return backward(problem, inputs, saved).captures


def _diagonal_sums(x: Tensor) -> Tensor:
    """[..., rows, keys] -> [..., rows + keys - 1]: sums over equal (key - row), ascending."""
    rows, keys = x.shape[-2:]
    width = rows + keys
    padded = torch.nn.functional.pad(x.flip(-2), (0, rows))  # a row more to the right each row
    skewed = padded.flatten(-2)[..., : rows * (width - 1)].unflatten(-1, (rows, width - 1))
    return skewed.sum(-2)


def _along_diagonals(index: Tensor) -> Tensor:
    """One entry a diagonal of [..., rows, keys], in the order of `_diagonal_sums`."""
    return torch.cat([index[..., :, 0].flip(-1), index[..., 0, 1:]], -1)
