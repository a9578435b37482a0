"""How the tensors are cut: few heads at a time, rows of query blocks, runs of key blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexmod.blocks.grid import Grid
from flexmod.kernels import dropout
from flexmod.kernels.problem import Inputs, Problem
from flexmod.program.evaluate import evaluate, on_grid, raise_if_invalid

_QUERY_ROWS = 1024  # heads x query rows at a time: scores stay in cache
_KEYS = 1024  # keys at a time
_DENSE_BLOCK = 128
_LOG2_E = math.log2(math.e)
Run = tuple[int, int, bool]  # first block, one past the last, full


@dataclass(frozen=True)
class Keys:
    """Keys that one step visits: [start, stop), and whether the mask may be skipped."""

    start: int
    stop: int
    full: bool

    @property
    def span(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Row:
    """A row of query blocks of a few heads, and the keys it sees."""

    batches: slice
    heads: slice
    rows: slice
    kv_batches: slice
    kv_heads: slice
    steps: list[Keys]

    @property
    def queries(self) -> tuple[slice, slice, slice]:
        """Where its queries lie in a [B, Hq, Q, ...] tensor."""
        return self.batches, self.heads, self.rows

    @property
    def keys(self) -> tuple[slice, slice]:
        """Where its keys lie in a [B | 1, Hkv, KV, ...] tensor."""
        return self.kv_batches, self.kv_heads

    @property
    def is_one_batch(self) -> bool:
        """Whether it lies in a single batch entry."""
        return self.batches.stop - self.batches.start == 1

    @property
    def group(self) -> int:
        """Query heads of it that share a key/value head."""
        count = self.kv_heads.stop - self.kv_heads.start
        return (self.heads.stop - self.heads.start) // count

    @property
    def span(self) -> slice:
        """From its first key to its last."""
        return slice(self.steps[0].start, self.steps[-1].stop)


def walk(problem: Problem, inputs: Inputs) -> Iterator[Row]:
    """All rows of a call; neighbours in the order share their keys."""
    grid, runs = grid_of(problem)
    batch_step = 1 if grid.batch > 1 else max(problem.batch, 1)
    wanted = max(1, _QUERY_ROWS // (grid.block_q * batch_step))
    head_step = 1 if grid.heads > 1 else max(1, wanted // problem.group) * problem.group
    for b in range(0, problem.batch, batch_step):
        for h in range(0, problem.heads, head_step):
            batches, heads = slice(b, b + batch_step), slice(h, min(h + head_step, problem.heads))
            plane = (b if grid.batch > 1 else 0) * grid.heads + (h if grid.heads > 1 else 0)
            for row in range(grid.rows):
                rows = span(row, row + 1, grid.block_q, grid.q_len)
                found = steps(grid, runs[plane * grid.rows + row])
                yield row_of(problem, inputs, batches, heads, rows, found)


def grid_of(problem: Problem) -> tuple[Grid, Sequence[Sequence[Run]]]:
    """The blocks of a call, and the runs of their rows: a full one each without a mask."""
    if problem.mask is not None:
        return problem.mask.grid, problem.mask.runs.host
    grid = Grid(1, 1, problem.q_len, problem.kv_len, _DENSE_BLOCK, _DENSE_BLOCK)
    return grid, [[(0, grid.columns, True)]] * grid.rows


def row_of(
    problem: Problem, inputs: Inputs, batches: slice, heads: slice, rows: slice, steps: list[Keys]
) -> Row:
    """With the key/value batches and heads that serve those of the query."""
    kv_heads = slice(heads.start // problem.group, -(-heads.stop // problem.group))
    kv_batches = batches if inputs.key.shape[0] > 1 else slice(0, 1)
    return Row(batches, heads, rows, kv_batches, kv_heads, steps)


def steps(grid: Grid, runs: Sequence[Run]) -> list[Keys]:
    """The keys that a row of query blocks visits, at most _KEYS at a time."""
    spans = [(span(a, b, grid.block_kv, grid.kv_len), full) for a, b, full in runs]
    return [
        Keys(start, min(start + _KEYS, keys.stop), full)
        for keys, full in spans
        for start in range(keys.start, keys.stop, _KEYS)
    ]


def span(first: int, last: int, block: int, length: int) -> slice:
    """Positions of blocks, up to the last exclusively."""
    return slice(first * block, min(last * block, length))


class Products:
    """Products of a step that are kept only until the next one, each in memory of its own.

    Fresh pages for every step would cost more than a pass over them.
    """

    def __init__(self) -> None:
        self.memory: dict[str, Tensor] = {}

    def __call__(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """x @ y, valid until the next product of this name."""
        shape = (*x.shape[:-1], y.shape[-1])
        size = math.prod(shape)
        if name not in self.memory or self.memory[name].numel() < size:
            self.memory[name] = x.new_empty(size)
        return torch.matmul(x, y, out=self.memory[name][:size].view(shape))


def index_tensors(problem: Problem, row: Row, keys: Keys) -> dict[str, Tensor]:
    """The four indices of a step, to broadcast to [b, h, rows, keys]; none where nothing reads."""
    if keys.full and problem.score is None and not problem.dropout_p:
        return {}
    spans = (row.batches, row.heads, row.rows, keys.span)
    return on_grid(*(torch.arange(s.start, s.stop, device=problem.device) for s in spans))


def visible_positions(problem: Problem, keys: Keys, indices: dict[str, Tensor]) -> Tensor | None:
    """The mask of a step; None where all is visible."""
    if problem.mask_program is None or keys.full:
        return None
    (visible,), invalid = evaluate(problem.mask_program, indices)
    raise_if_invalid(problem.mask_program, invalid, None)
    return visible


def modified(
    problem: Problem, score: Tensor, indices: dict[str, Tensor], visible: Tensor | None
) -> Tensor:
    """score_mod, then -inf where the mask hides."""
    shape = score.shape
    if problem.score is not None:
        (value,), invalid = evaluate(problem.score, {**indices, "score": score})
        raise_if_invalid(problem.score, invalid, visible)
        score = value.expand(shape)
    if visible is None:
        return score
    hidden = score.new_full((), -torch.inf)
    return torch.where(visible, score, hidden, out=score if problem.score is None else None)


def exponential(problem: Problem, score: Tensor, origin: Tensor | None) -> Tensor:
    """exp(score - origin), in place unless a score_mod made the score: that may be a capture.

    As a power of 2, for which torch takes half the time; factors come after the difference, which
    is exact where it matters.
    """
    out = score if problem.score is None else torch.empty_like(score)
    if origin is not None:
        score = torch.sub(score, origin, out=out)
    return torch.mul(score, _LOG2_E, out=out).exp2_()


def is_finite(x: Tensor) -> bool:
    """Whether nothing is NaN or infinite, in one pass; False as well if only the sum overflows."""
    return bool(x.sum().isfinite())


def kept(problem: Problem, indices: dict[str, Tensor]) -> Tensor | None:
    """Dropout's multiplier of the probabilities: 0 or 1 / (1 - p); None without dropout."""
    if not problem.dropout_p:
        return None
    keep = dropout.keep(problem.dropout_seed, problem.dropout_p, indices)
    return keep.to(problem.work_dtype) / (1 - problem.dropout_p)


def add(target: Tensor, part: Tensor) -> None:
    """Add to key/value gradients; one shared key/value batch receives the sum over batches."""
    target += part.sum(0, keepdim=True) if target.shape[0] < part.shape[0] else part
