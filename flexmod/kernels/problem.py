"""`Problem`: everything that choosing, building and launching a kernel may depend on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmod.blocks import BlockMask
from flexmod.program import Program
from flexmod.program.gradient import Gradient


class Inputs(NamedTuple):
    """query [B, Hq, Q, E], key [B|1, Hkv, KV, E], value [B|1, Hkv, KV, Ev]."""

    query: Tensor
    key: Tensor
    value: Tensor


class Operands(NamedTuple):
    """What may differ between two calls of one shape, which then run the same machine code.

    captures: of score_mod. seed: of dropout, 64 bits.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    sink: Tensor | None
    captures: tuple[Tensor, ...]
    mask: BlockMask | None
    seed: int


class Result(NamedTuple):
    """out [B, Hq, Q, Ev] in the query's dtype; lse and max_scores [B, Hq, Q] in `work_dtype`.

    max_scores may be None where the problem does not want them.
    """

    out: Tensor
    lse: Tensor
    max_scores: Tensor | None


class Saved(NamedTuple):
    """What a backward needs beside the inputs.

    out and d_out [B, Hq, Q, Ev]; lse and, if something depends on it, its gradient [B, Hq, Q] in
    `work_dtype`.
    """

    out: Tensor
    lse: Tensor
    d_out: Tensor
    d_lse: Tensor | None


class Gradients(NamedTuple):
    """Of query, key and value, in `work_dtype` or the input's dtype; of captured tensors by slot.

    delta [B, Hq, Q], rowsum(out * d_out) - d_lse, is what the gradient of a sink is made of.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    delta: Tensor
    captures: dict[int, Tensor]


@dataclass(frozen=True, eq=False)
class Problem:
    """One attention call, checked. Programs are specialized to its extents."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    score: Program | None = None
    mask: BlockMask | None = None
    mask_program: Program | None = None
    gradient: Gradient | None = None  # of `score`, where a backward will run
    sink: Tensor | None = None  # [Hq]
    dropout_p: float = 0.0
    dropout_seed: int = 0
    deterministic: bool = False
    wants_max_scores: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # tile hints of kernel_options

    @property
    def work_dtype(self) -> torch.dtype:
        """Type of scores, statistics and lse: float64 for float64 inputs, else float32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def scales_first(self) -> bool:
        """Whether scores are scaled before they are compared.

        Else the largest product is the largest score, and the scale can wait for the exponent: not
        with one below 0, nor with one that is 0 to a kernel, as minus infinity times 0 is NaN.
        """
        return self.score is not None or not self.scale >= torch.finfo(torch.float32).tiny

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // max(self.kv_heads, 1)

    @property
    def extents(self) -> dict[str, int]:
        """How many values each index of a mod takes."""
        return {"b": self.batch, "h": self.heads, "q_idx": self.q_len, "kv_idx": self.kv_len}

    def operands(self, inputs: Inputs) -> Operands:
        """What is not the shape of this call."""
        captures = self.score.captures if self.score else ()
        return Operands(*inputs, self.sink, captures, self.mask, self.dropout_seed)

    def shell(self) -> Problem:
        """The problem without the tensors of its call, so that it may be kept."""
        score = self.score and replace(self.score, captures=(), sites={})
        mask_program = self.mask_program and replace(self.mask_program, captures=(), sites={})
        gradient = self.gradient
        if gradient is not None:
            gradient = replace(gradient, program=replace(gradient.program, captures=()))
        return replace(
            self, score=score, mask=None, mask_program=mask_program, gradient=gradient, sink=None
        )

    def filled(self, given: Operands) -> Problem:
        """A shell with the tensors of a call."""
        score, gradient, mask_program = self.score, self.gradient, self.mask_program
        if score is not None:
            score = replace(score, captures=given.captures)
        if gradient is not None:
            captures = tuple(given.captures[slot] for slot in gradient.slots)
            gradient = replace(gradient, program=replace(gradient.program, captures=captures))
        if mask_program is not None and given.mask is not None:
            mask_program = replace(mask_program, captures=given.mask.program.captures)
        return replace(
            self, score=score, mask=given.mask, mask_program=mask_program, gradient=gradient,
            sink=given.sink, dropout_seed=given.seed,
        )  # fmt: skip

    @property
    def is_empty(self) -> bool:
        return 0 in (self.batch, self.heads, self.q_len, self.kv_len)


def empty_result(problem: Problem, inputs: Inputs) -> Result:
    """What attention over no keys (or of no queries) is: out 0, lse and max -inf; lse of a sink."""
    shape = (problem.batch, problem.heads, problem.q_len)
    lowest = torch.full(shape, -torch.inf, dtype=problem.work_dtype, device=problem.device)
    lse = lowest
    if problem.sink is not None:
        lse = problem.sink.to(lse.dtype).view(-1, 1).expand(shape).clone()
    return Result(new_output(problem, inputs.query).zero_(), lse, lowest.clone())


def empty_gradients(problem: Problem, inputs: Inputs, saved: Saved) -> Gradients:
    """Zeros: no pair of positions reads anything. delta is that of a sink alone."""
    captured = {}
    if problem.gradient is not None and problem.score is not None:
        slots = {load.slot for load in problem.gradient.loads}
        captured = {slot: torch.zeros_like(problem.score.captures[slot]) for slot in slots}
    delta = torch.zeros_like(saved.lse) if saved.d_lse is None else -saved.d_lse
    query, key, value = (torch.zeros_like(x) for x in inputs)
    return Gradients(query, key, value, delta, captured)


def new_output(problem: Problem, query: Tensor) -> Tensor:
    """Uninitialised out [B, Hq, Q, Ev], laid out in the query's stride order."""
    order = stride_order(query)
    shape = (problem.batch, problem.heads, problem.q_len, problem.value_dim)
    out = query.new_empty([shape[axis] for axis in order])
    return out.permute([order.index(axis) for axis in range(4)])


def stride_order(x: Tensor) -> list[int]:
    """The axes of a tensor from the slowest to the fastest; repeated ones (stride 0) are slow."""
    strides = x.stride()
    return sorted(range(x.ndim), key=lambda axis: (bool(strides[axis]), -strides[axis], axis))
