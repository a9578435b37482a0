"""Comparisons of sums: for each row of blocks, the columns where their answer changes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexmod.blocks.sums import Part, Sum, known

COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


class Step(NamedTuple):
    """True from column `at` of blocks on, or only before it."""

    at: Tensor  # int32 [planes or 1, rows or 1]
    rising: bool

    def holds(self, start: Tensor) -> Tensor:
        """At columns [planes, rows, n]."""
        at = self.at[..., None]
        return start >= at if self.rising else start < at


class Truth(NamedTuple):
    """What is known of a truth in some blocks: bool tensors."""

    every: Tensor  # true everywhere
    some: Tensor  # true somewhere, perhaps
    mixed: Tensor  # surely true at one element and false at another


class Atom(NamedTuple):
    """A truth that changes a few times along a row of blocks."""

    steps: tuple[Step, ...]
    negated: bool = False
    ends: bool = False  # what is compared takes both ends of its range in every block
    dense: bool = False  # and all between

    def at(self, start: Tensor) -> Truth:
        found = [step.holds(start) for step in self.steps]
        certain: Tensor | bool = self.ends
        if len(found) == 4:
            not_below, above, reached, past = found  # lo >= 0, hi >= 1, hi >= 0, lo >= 1
            every, some = not_below & ~above, reached & ~past
            # 0 may lie in a gap, unless it is an end itself.
            certain = self.dense or (self.ends and (not_below | ~above))
        else:
            every, some = found
        mixed = (some & ~every) & certain
        return Truth(~some, ~every, mixed) if self.negated else Truth(every, some, mixed)


class Frame(NamedTuple):
    """How many columns of blocks there are, and where."""

    columns: int
    device: torch.device


def compare(op: str, x: Sum, y: Sum, frame: Frame) -> Atom:
    """`x op y`."""
    x, y = (each.cast(torch.int64) for each in known(x, y))
    (difference,) = known(x.plus(y.each(Part.minus), torch.int64))
    ends = all(part.ends for part in difference.parts)
    dense = all(part.width for part in difference.parts)
    if op in ("eq", "ne"):
        steps = (_reached(difference, *at, frame) for at in ((0, 0), (1, 1), (1, 0), (0, 1)))
        return Atom(tuple(steps), op == "ne", ends, ends and dense)
    limit = 0 if op in ("lt", "ge") else 1
    # lt is "not ge", le is "not gt".
    steps = (_reached(difference, end, limit, frame) for end in (0, 1))
    return Atom(tuple(steps), op in ("lt", "le"), ends)


def row_atom(every: Tensor, some: Tensor, ends: bool, frame: Frame) -> Atom:
    """A truth of the query alone."""
    return Atom((_throughout(every, frame), _throughout(some, frame)), ends=ends)


def _throughout(holds: Tensor, frame: Frame) -> Step:
    return Step(torch.where(_placed(holds, frame), 0, frame.columns).int(), True)


def _reached(difference: Sum, end: int, limit: int, frame: Frame) -> Step:
    """Where an end of a sum, the low (0) or the high one (1), is at least `limit`."""
    row, column = difference.row, difference.column
    needed = limit - row.span[end] if row is not None else torch.tensor(limit, device="cpu")
    if column is None or not column.span[end].ndim:  # of the query alone: see `Sum`
        return _throughout(needed <= 0, frame)
    reach = column.span[end]
    needed = _placed(needed.to(reach.dtype), frame)
    if reach.ndim == 2:
        needed = needed.expand(len(reach), -1).contiguous()
    if column.rising:
        return Step(torch.searchsorted(reach, needed, out_int32=True), True)
    return Step(torch.searchsorted(-reach, -needed, right=True, out_int32=True), False)


def _placed(value: Tensor, frame: Frame) -> Tensor:
    """A number of the program as a tensor of the device [1, 1], without a copy from the host."""
    if value.ndim:
        return value
    return torch.full((1, 1), value.item(), dtype=value.dtype, device=frame.device)
