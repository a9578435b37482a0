"""How the backward kernels sum the gradients of captured tensors.

Each load of a captured tensor is of one kind, by what its index depends on:

plane     b and h only (a slope a head): one sum a program
row       q_idx too: one sum a row            column  kv_idx too: one sum a column
diagonal  only kv_idx - q_idx (a relative bias): one sum a diagonal of a tile, then an atomic add
element   anything else: an atomic add an element

The sums go to buffers; `fa2.scatter` adds these to the tensors' gradients by the indices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flexmod.kernels.problem import Problem
from flexmod.kernels.tuning import Tiles
from flexmod.program import Program
from flexmod.program.dependence import dependence
from flexmod.program.gradient import LoadGradient

_BY_QUERY = ("plane", "row", "diagonal", "element")  # summed by the kernel that walks a query tile


@dataclass(frozen=True)
class Plan:
    """The loads of a gradient program, and the kind of each."""

    loads: tuple[LoadGradient, ...] = ()
    kinds: tuple[str, ...] = ()

    @property
    def uses_atomics(self) -> bool:
        return not {"diagonal", "element"}.isdisjoint(self.kinds)

    def buffers(self, problem: Problem, tiles: Tiles) -> Buffers:
        """Of the sums of each load, for the tiles of the kernel over queries."""
        planes, margin = (problem.batch, problem.heads), tiles.q + tiles.kv
        rows, keys = problem.q_len, problem.kv_len
        shapes = {
            "plane": (*planes, -(-rows // tiles.q)),
            "row": (*planes, rows),
            "column": (*planes, keys),
            "diagonal": (*planes, rows + keys + 2 * margin),
        }
        captures = problem.score.captures if problem.score else ()
        pairs = zip(self.loads, self.kinds, strict=True)
        found = [shapes.get(kind) or (captures[load.slot].numel(),) for load, kind in pairs]
        inside = slice(margin + 1, margin + rows + keys)
        return Buffers(self.kinds, tuple(found), inside, problem.work_dtype, problem.device)

    def sizes(self, problem: Problem) -> list[int]:
        """What `sizes` of the text stand for."""
        assert problem.score is not None or not self.loads
        captures = problem.score.captures if problem.score else ()
        pairs = zip(self.loads, self.kinds, strict=True)
        return [n for load, kind in pairs if kind == "element" for n in captures[load.slot].shape]


@dataclass(frozen=True)
class Buffers:
    """Where the kernels leave their sums: one tensor a load.

    inside: those of a diagonal buffer that are diagonals of the call; tiles that stick out of it
    write beside them.
    """

    kinds: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    inside: slice
    dtype: torch.dtype
    device: torch.device

    def make(self) -> list[Tensor]:
        """Zeros where kernels add; the others are written throughout."""
        adding = ("diagonal", "element")
        return [
            (torch.zeros if kind in adding else torch.empty)(
                shape, dtype=self.dtype, device=self.device
            )
            for kind, shape in zip(self.kinds, self.shapes, strict=True)
        ]

    def inner(self, n: int, value: Tensor) -> Tensor:
        """The part of a buffer that belongs to the call."""
        return value[..., self.inside] if self.kinds[n] == "diagonal" else value

    def inner_shape(self, n: int) -> tuple[int, ...]:
        *planes, last = self.shapes[n]
        if self.kinds[n] == "diagonal":
            last = self.inside.stop - self.inside.start
        return (*planes, last)


NOTHING = Plan()


def plan(problem: Problem) -> Plan:
    """The kinds of the loads of a problem's gradient."""
    if problem.gradient is None:
        return NOTHING
    lines = dependence(problem.gradient.program)
    loads = problem.gradient.loads
    return Plan(loads, tuple(_kind(problem.gradient.program, load, lines) for load in loads))


def _kind(program: Program, load: LoadGradient, lines: list[Any]) -> str:
    indices = [lines[program.outputs[i]] for i in load.indices]
    inputs = frozenset().union(*(i.inputs for i in indices))
    if inputs & {"score", "grad"}:
        return "element"
    match "q_idx" in inputs, "kv_idx" in inputs:
        case False, False:
            return "plane"
        case True, False:
            return "row"
        case False, True:
            return "column"
    return "diagonal" if all(i.by_difference for i in indices) else "element"


def tensors(plan: Plan) -> list[str]:
    """Names of the buffers in the signature of the backward kernels."""
    return [f"sum{n}" for n in range(len(plan.loads))]


def sizes(plan: Plan) -> list[str]:
    """Names of the lengths of captured tensors there."""
    return [
        f"sum{n}_size{axis}"
        for n, (load, kind) in enumerate(zip(plan.loads, plan.kinds, strict=True))
        if kind == "element"
        for axis in range(len(load.indices))
    ]


def parameters(plan: Plan) -> list[str]:
    return tensors(plan) + sizes(plan)


@lru_cache(maxsize=256)
def query_functions(plan: Plan) -> str:
    """Text of start_query_sums, add_query_sums and store_query_sums."""
    kept = [n for n, kind in enumerate(plan.kinds) if kind in ("plane", "row")]
    start = ["tl.zeros([TILE_Q], work)"] * len(kept)  # by rows: no warp waits for another
    signature = "".join(f", {name}" for name in parameters(plan))
    lines = []
    for n, (load, kind) in enumerate(zip(plan.loads, plan.kinds, strict=True)):
        if kind in _BY_QUERY:
            lines += [_value(n, load), *_ADDITIONS.get(kind, lambda *_: [])(n, load)]
    place = {n: position for position, n in enumerate(kept)}
    added = [f"sums[{place[n]}] + tl.sum(value{n}, 1)" for n in kept]
    stores = []
    for n in kept:
        if plan.kinds[n] == "plane":
            stores.append(f"tl.store(sum{n} + plane * tiles + tile, tl.sum(sums[{place[n]}]))")
        else:
            address = f"sum{n} + plane.to(tl.int64) * q_len + rows"
            stores.append(f"tl.store({address}, sums[{place[n]}], mask=rows < q_len)")
    return "\n\n\n".join([
        _function("start_query_sums(TILE_Q: tl.constexpr, work: tl.constexpr)", [], start),
        _function(
            "add_query_sums(sums, results, weight, plane, first_row, first_key, q_len, kv_len,\n"
            f"                   TILE_Q: tl.constexpr, TILE_KV: tl.constexpr{signature})",
            lines, added,
        ),
        _function(f"store_query_sums(sums, plane, tile, tiles, rows, q_len{signature})", stores),
    ])  # fmt: skip


@lru_cache(maxsize=256)
def key_functions(plan: Plan) -> str:
    """Text of start_key_sums, add_key_sums and store_key_sums."""
    kept = [n for n, kind in enumerate(plan.kinds) if kind == "column"]
    signature = "".join(f", {name}" for name in parameters(plan))
    lines = [_value(n, plan.loads[n]) for n in kept]
    added = [f"sums[{position}] + tl.sum(value{n}, 0)" for position, n in enumerate(kept)]
    stores = [
        f"tl.store(sum{n} + plane.to(tl.int64) * kv_len + keys, sums[{position}], "
        "mask=keys < kv_len)"
        for position, n in enumerate(kept)
    ]
    return "\n\n\n".join([
        _function("start_key_sums(TILE_KV: tl.constexpr, work: tl.constexpr)", [],
                  ["tl.zeros([TILE_KV], work)"] * len(kept)),
        _function("add_key_sums(sums, results, weight,\n"
                  "                 TILE_Q: tl.constexpr, TILE_KV: tl.constexpr)", lines, added),
        _function(f"store_key_sums(sums, plane, keys, kv_len{signature})", stores),
    ])  # fmt: skip


def _function(head: str, lines: list[str], results: list[str] | None = None) -> str:
    """A jit function; results are returned as a tuple, which may be empty."""
    body = list(lines)
    if results is not None:
        body.append(f"return ({''.join(f'{r}, ' for r in results)})")
    return f"@triton.jit\ndef {head}:\n    " + "\n    ".join(body or ["pass"])


def _value(n: int, load: LoadGradient) -> str:
    """What a load receives, 0 where nothing is seen."""
    value = f"tl.broadcast_to(results[{load.value}], [TILE_Q, TILE_KV])"
    return f"value{n} = tl.where(weight == 0.0, 0.0, {value})"


def _add_diagonals(n: int, load: LoadGradient) -> list[str]:
    """Rows are turned so that a diagonal becomes a column; a column then holds some diagonals."""
    return [
        "turn = tl.arange(0, TILE_Q)[:, None] + tl.arange(0, TILE_KV)[None, :]",
        f"turned{n} = tl.gather(value{n}, turn % TILE_KV, 1)",
        f"line{n} = sum{n} + plane.to(tl.int64) * (q_len + kv_len + 2 * (TILE_Q + TILE_KV))",
        f"line{n} += q_len + TILE_Q + TILE_KV + first_key - first_row + tl.arange(0, TILE_KV)",
        "for part in tl.static_range((TILE_Q + TILE_KV - 2) // TILE_KV + 1):",
        f"    piece = tl.sum(tl.where(turn // TILE_KV == part, turned{n}, 0.0), 0)",
        f'    tl.atomic_add(line{n} - part * TILE_KV, piece, sem="relaxed")',
    ]


def _add_elements(n: int, load: LoadGradient) -> list[str]:
    lines = [f"flat{n} = tl.zeros([TILE_Q, TILE_KV], tl.int64)"]
    for axis, position in enumerate(load.indices):
        size = f"sum{n}_size{axis}"
        lines += [
            f"index = results[{position}]",
            f"index = tl.where(index < 0, index + {size}, index)",
            f"index = tl.minimum(tl.maximum(index, 0), {size} - 1)",
            f"flat{n} = flat{n} * {size} + index",
        ]
    return [
        *lines,
        f'tl.atomic_add(sum{n} + flat{n}, value{n}, mask=weight != 0.0, sem="relaxed")',
    ]


_ADDITIONS = {"diagonal": _add_diagonals, "element": _add_elements}
