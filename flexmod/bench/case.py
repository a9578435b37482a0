"""A row made real: tensors, mods, and what a candidate does with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmod.bench.rows import MASKS, SCORES, Mod, Row


@dataclass(frozen=True)
class Case:
    """Inputs of one row. query, key, value and d_out are [B, H, S, D]."""

    row: Row
    direction: str  # "forward" or "backward"
    query: Tensor
    key: Tensor
    value: Tensor
    d_out: Tensor
    score_mod: Mod
    mask_mod: Mod
    learned: list[Tensor]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


def make_case(
    row: Row,
    direction: str,
    head_dim: int,
    *,
    tokens: int,
    width: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Case:
    """`tokens` is batch x seqlen where the row has no batch, `width` heads x head_dim."""
    batch, heads = row.batch or max(tokens // row.seqlen, 1), max(width // head_dim, 1)
    torch.manual_seed(0)
    shape = (batch, heads, row.seqlen, head_dim)
    query, key, value, d_out = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    score_mod, learned = SCORES[row.score](heads, row.seqlen, device, row.learns)
    mask_mod = MASKS[row.mask](row.size, row.seqlen, device)
    for x in (query, key, value):
        x.requires_grad_(direction == "backward")
    return Case(row, direction, query, key, value, d_out, score_mod, mask_mod, learned)


class Layout(NamedTuple):
    """How a candidate lays out its tensors: from [B, H, S, D], and back to it."""

    to: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]

    def leaves(self, case: Case) -> list[Tensor]:
        """query, key and value in this layout, as tensors of their own where they are moved."""
        moved = [self.to(x.detach()) for x in case.tensors]
        return [m.requires_grad_(case.direction == "backward") for m in moved]


BHSD = Layout(lambda x: x, lambda x: x)
BSHD = Layout(lambda x: x.transpose(1, 2).contiguous(), lambda x: x.transpose(1, 2))
PACKED = Layout(  # [S, H, D], one batch
    lambda x: x[0].transpose(0, 1).contiguous(), lambda x: x.transpose(0, 1)[None]
)


class Call(NamedTuple):
    """A candidate ready to run: one forward, the tensors that get gradients, and their layout."""

    attend: Callable[[], Tensor]
    inputs: list[Tensor]  # query, key and value first
    layout: Layout = BHSD


def runner(call: Call, case: Case) -> Callable[[], Any]:
    """What is timed: the forward without a graph, or the backward alone.

    It returns out, or the gradients, in the candidate's layout.
    """
    if case.direction == "forward":

        def forward() -> Tensor:
            with torch.no_grad():
                return call.attend()

        return forward
    out = call.attend()
    d_out = call.layout.to(case.d_out)
    return lambda: torch.autograd.grad(out, call.inputs, d_out, retain_graph=True)
