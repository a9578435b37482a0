"""`Problem`: everything that choosing, building and launching a kernel may depend on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmod.blocks import BlockMask
from flexmod.program import Program


class Inputs(NamedTuple):
    """query [B, Hq, Q, E], key [B|1, Hkv, KV, E], value [B|1, Hkv, KV, Ev]."""

    query: Tensor
    key: Tensor
    value: Tensor


class Result(NamedTuple):
    """out [B, Hq, Q, Ev] in the query's dtype; lse and max_scores [B, Hq, Q] in `work_dtype`."""

    out: Tensor
    lse: Tensor
    max_scores: Tensor


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
    needs_grad: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # tile hints of kernel_options

    @property
    def work_dtype(self) -> torch.dtype:
        """Type of scores, statistics and lse: float64 for float64 inputs, else float32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // max(self.kv_heads, 1)

    @property
    def is_empty(self) -> bool:
        return 0 in (self.batch, self.heads, self.q_len, self.kv_len)


def empty_result(problem: Problem, inputs: Inputs) -> Result:
    """What attention over no keys (or of no queries) is: out 0, lse and max -inf."""
    shape = (problem.batch, problem.heads, problem.q_len)
    lowest = torch.full(shape, -torch.inf, dtype=problem.work_dtype, device=problem.device)
    return Result(new_output(problem, inputs.query).zero_(), lowest, lowest.clone())


def new_output(problem: Problem, query: Tensor) -> Tensor:
    """Uninitialised out [B, Hq, Q, Ev], laid out in the query's stride order."""
    shape = (problem.batch, problem.heads, problem.q_len, problem.value_dim)
    order = sorted(range(4), key=lambda axis: (-query.stride(axis), axis))
    out = query.new_empty([shape[axis] for axis in order])
    return out.permute([order.index(axis) for axis in range(4)])
