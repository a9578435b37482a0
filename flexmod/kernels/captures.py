"""Gradients of captured tensors: sums over the positions that read each entry.

Axes that an index does not depend on are summed first; only what is left is scattered. An index
that depends on kv_idx - q_idx alone (relative biases) is summed along diagonals.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from flexmod.kernels.problem import Inputs, Problem, Saved
from flexmod.program.dependence import dependence
from flexmod.program.evaluate import evaluate
from flexmod.program.gradient import LoadGradient

_places: OrderedDict[object, Tensor] = OrderedDict()  # where reduced sums go, by program
_PLACES_KEPT = 32


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
        where = self._flat_index(load, outputs)
        if self.diagonal[load]:
            value = _diagonal_sums(value)
            where = _along_diagonals(where.expand(*where.shape[:-2], *shape[-2:]))
        self._scatter(load, value, where)

    def add_reduced(self, load: LoadGradient, kind: str, value: Tensor) -> None:
        """Add sums that a kernel made; kinds and shapes as in `fa2.sums`."""
        q_len, kv_len = self.problem.q_len, self.problem.kv_len
        count = lambda n: torch.arange(n, device=value.device)  # noqa: E731
        zero = count(1)
        places = {
            "plane": (zero, zero),
            "row": (count(q_len), zero),
            "column": (zero, count(kv_len)),
        }
        if kind == "diagonal":
            offset = count(q_len + kv_len - 1) - (q_len - 1)
            start = (value.shape[-1] - q_len - kv_len) // 2 + 1
            places[kind] = ((-offset).clamp(min=0), offset.clamp(min=0))
            value = value[..., start : start + len(offset)]
        q_idx, kv_idx = places[kind]
        value = value.sum(-1, keepdim=True) if kind == "plane" else value
        inputs = {
            "b": count(self.problem.batch)[:, None, None],
            "h": count(self.problem.heads)[:, None],
            "q_idx": q_idx,
            "kv_idx": kv_idx,
            "grad": torch.zeros((), device=value.device, dtype=value.dtype),
            "score": torch.zeros((), device=value.device, dtype=value.dtype),
        }
        assert self.problem.gradient is not None
        program = self.problem.gradient.program
        assert self.problem.score is not None
        table = self.problem.score.captures[load.slot].shape
        extents = (self.problem.batch, self.problem.heads, q_len, kv_len)
        known = (program.key, program.numbers, load, kind, table, extents, value.device)
        if program.captures or known not in _places:  # captured indices may have changed
            outputs, _ = evaluate(program, inputs)
            _places[known] = self._flat_index(load, outputs)
            if len(_places) > _PLACES_KEPT:
                _places.popitem(last=False)
        self._scatter(load, value, _places[known])

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

    def _flat_index(self, load: LoadGradient, outputs: tuple[Tensor, ...]) -> Tensor:
        """Position in the flattened captured tensor; axes it does not depend on have length 1."""
        assert self.problem.score is not None
        flat = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=self.problem.device)
        for position, length in zip(
            load.indices, self.problem.score.captures[load.slot].shape, strict=True
        ):
            index = outputs[position].long()
            index = torch.where(index < 0, index + length, index).clamp(0, length - 1)
            flat = flat * length + index
        return flat

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
