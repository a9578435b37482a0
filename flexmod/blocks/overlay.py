"""Runs laid over each other: what the combination, the transpose and the sharing of maps are.

All of it works on the ends of runs, never on single blocks, so that it costs what is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexmod.blocks.runs import Runs, Segments

FIRST = 4  # the kind of an overlay is FIRST * the kind in the first runs + that in the second


def overlay(first: Segments, second: Segments, columns: int) -> Segments:
    """Where anything lies in either of two sets of segments, by row and column.

    The kind of a segment is FIRST * kind in the first set + kind in the second.
    """
    width = columns + 1
    keys, steps = [], []
    for (row, start, stop, kind), weight in ((first, FIRST), (second, 1)):
        keys += [row * width + start, row * width + stop]
        steps += [kind * weight, kind * -weight]
    key, order = torch.cat(keys).sort()
    state = torch.cat(steps)[order].cumsum(0)[:-1]  # back to 0 at the end of each row
    begin, end = key[:-1], key[1:]
    kept = ((state != 0) & (begin != end)).nonzero().flatten()
    begin, end = begin[kept], end[kept]
    row = begin // width
    return Segments(row, begin - row * width, end - row * width, state[kept])


def combine(first: Runs, second: Runs, columns: int, kinds: Tensor) -> Segments:
    """Segments of `kinds[kind in first, kind in second]`, where that is not 0.

    `kinds` is [3, 3]; its entry for two empty blocks must be 0.
    """
    both = overlay(first.segments(), second.segments(), columns)
    return live(both._replace(kind=kinds[both.kind // FIRST, both.kind % FIRST]))


def live(segments: Segments) -> Segments:
    """Those whose kind is not empty."""
    return segments.take((segments.kind != 0).nonzero().flatten())


def transpose(runs: Runs, planes: int, columns: int) -> Runs:
    """The runs of query blocks in each column of key blocks, plane by plane.

    A column's runs end where the kind differs between a row and the row above it: rows are laid
    over themselves one row down, and only the differences are spread over columns.
    """
    rows = runs.rows // max(planes, 1)
    row, start, stop, kind = runs.segments()
    here = row + row // max(rows, 1)  # each plane gets one empty row at its end
    segments = Segments(here, start, stop, kind)
    both = overlay(segments, segments._replace(row=here + 1), columns)
    changed = both.take((both.kind // FIRST != both.kind % FIRST).nonzero().flatten())
    at, column, _, kind = changed.blocks()
    plane, at = at // (rows + 1), at % (rows + 1)
    key, order = ((plane * columns + column) * (rows + 1) + at).sort()
    kind = kind[order] // FIRST
    owner, begin = key // (rows + 1), key % (rows + 1)
    # The last event of a column empties it, so the end of a live run is in the same column.
    end = torch.cat([begin[1:], begin[:0].new_zeros(min(len(begin), 1))])
    return Runs.from_sorted(live(Segments(owner, begin, end, kind)), planes * columns)


def shared(runs: Runs, planes: int) -> Runs:
    """The same runs, stored once for planes that are alike."""
    if planes < 2 or not len(runs.table):
        return runs
    rows = runs.rows // planes
    row, start, stop, kind = runs.segments()
    plane = row // rows
    starts = torch.searchsorted(plane, torch.arange(planes + 1, device=row.device))
    sizes = starts[1:] - starts[:-1]
    # A fingerprint of each plane finds the candidates; then they are compared entry by entry.
    place = torch.arange(len(row), device=row.device) - starts[plane]
    digest = _mixed(_mixed(_mixed(row - plane * rows) + start) + stop * 4 + kind + _mixed(place))
    prints = torch.zeros(planes, dtype=torch.long, device=row.device).index_add_(0, plane, digest)
    _, group = torch.unique(torch.stack([prints, sizes], 1), dim=0, return_inverse=True)
    leader = torch.full_like(prints, planes).scatter_reduce_(
        0, group, torch.arange(planes, device=row.device), "amin"
    )[group]
    twin = starts[leader[plane]] + place
    same = torch.stack([(row - plane * rows), start, stop, kind], 1)
    if not bool((same == same[twin]).all()):
        return runs
    kept = (leader[plane] == plane).nonzero().flatten()
    alone = Runs.from_sorted(Segments(row, start, stop, kind).take(kept), runs.rows)
    return Runs(alone.spans.view(planes, rows, 2)[leader].reshape(-1, 2), alone.table)


def _mixed(x: Tensor) -> Tensor:
    """int64 -> int64, well spread (the finaliser of splitmix64)."""
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31)
