"""Backward of the hopper engine: before, over keys, after."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmod.kernels import fa2, tuning
from flexmod.kernels.blank import blank
from flexmod.kernels.fa2 import kernel, products, sums
from flexmod.kernels.fa2.backward import Backward as Portable
from flexmod.kernels.fa2.scatter import Scatter
from flexmod.kernels.fa2.sums_text import HOPPER
from flexmod.kernels.fa2.target import target
from flexmod.kernels.hopper import tiles
from flexmod.kernels.launch import Launch
from flexmod.kernels.problem import Gradients, Inputs, Operands, Problem, Saved
from flexmod.program.gradient import differentiate

_WARPS, _REGISTERS, _MOST = 8, 24, 168  # of a thread in the producer, and at the start
_ROWS = 64  # of queries, of the kernels before and after
_OF_BEFORE = ("HEAD_DIM", "VALUE_DIM", "PADDED_DIM", "PADDED_VALUE", "TILE_Q")
_OF_AFTER = ("HEAD_DIM", "PADDED_DIM", "TILE_Q", "HAS_PRODUCTS")
_TILES_A_PASS = 2048  # of keys: enough to fill the device, few enough to bound the sums' memory


def backward(problem: Problem, inputs: Inputs, saved: Saved) -> Gradients:
    run = prepare_backward(problem, inputs, saved)
    if run is None:
        return fa2.backward(problem, inputs, saved)
    return run(problem.operands(inputs), saved)


def prepare_backward(problem: Problem, inputs: Inputs, saved: Saved) -> Backward | Portable | None:
    """What runs this backward, and every other that differs in its operands alone.

    Sums in a fixed order, and by row or element, are fa2's work, and so are wide heads.
    """
    gradient = problem.gradient
    special = gradient is not None and gradient.score is None
    special = special or max(problem.head_dim, problem.value_dim) > tiles.WHOLE
    special = special or not HOPPER.issuperset(sums.plan(with_score(problem)).kinds)
    if special or problem.deterministic or not all(map(tiles.can_be_copied, inputs)):
        return fa2.prepare_backward(problem, inputs, saved)
    found = target(problem.device)
    assert isinstance(found, tuning.Target)
    return Backward(problem, inputs, saved, found)


def with_score(problem: Problem) -> Problem:
    """The problem with a derivative that yields the score too, of a gradient of 1."""
    if problem.score is None:
        return problem
    loads = problem.gradient.loads if problem.gradient else ()
    slots = frozenset(load.slot for load in loads)
    return replace(problem, gradient=differentiate(problem.score, slots, with_score=True))


class Pass(NamedTuple):
    """The three launches for some of the heads of keys, and the heads of queries they serve."""

    before: Launch
    over_keys: Launch
    after: Launch


class Backward:
    """All launches, for all calls of one shape. It keeps no tensor of the call it was made for.

    Gradients of queries are sums over programs in float32: of few heads at a time, as they take
    twice the memory of the gradients themselves.
    """

    def __init__(
        self, problem: Problem, inputs: Inputs, saved: Saved, found: tuning.Target
    ) -> None:
        self.device = problem.device
        shapes = [*((x.shape, problem.dtype) for x in inputs), (saved.lse.shape, torch.float32)]
        self.new = [blank(shape, dtype, self.device) for shape, dtype in shapes]
        self.has_d_lse = saved.d_lse is not None
        self.unreadable = [
            name for name in ("out", "d_out") if not tiles.can_be_copied(getattr(saved, name))
        ]
        problem, saved = with_score(problem), self._readable(saved)
        self.slots = problem.gradient.slots if problem.gradient else ()
        cut = tiles.backward(problem)
        size = tuning.Tiles(cut.queries, tiles.TILE_KV, _WARPS, cut.stages)
        plan = products.found(sums.plan(problem), problem.gradient)
        self.fields = self._fields(problem, plan, cut)
        self.captured = plan.buffers(problem, size, problem.kv_len, HOPPER)
        self.scatter = Scatter(problem, plan, self.captured)
        problem = replace(problem, score=None)  # its text is in the derivative's
        load = ("hopper_backward.py.jinja", problem, self.fields, size, found, plan)
        self._module, self._size = kernel.load(*load), size
        self.passes = self._make_passes(problem, inputs, saved)

    def _fields(self, problem: Problem, plan: sums.Plan, cut: tiles.Backward) -> dict[str, Any]:
        return tiles.fields(problem) | {
            "TILE_Q": cut.queries,
            "HAS_SLOPE": problem.gradient is not None and not problem.gradient.is_identity,
            "HAS_SUMS": not HOPPER.isdisjoint(plan.kinds),
            "HAS_PRODUCTS": "product" in plan.kinds,
            "EVEN": tuning.gathers(problem) and tiles.is_even(problem),
            "STAGES": cut.stages,
            "HOLDS_KEYS": cut.holds_keys,
            "HOLDS_VALUES": cut.holds_values,
            "REGISTERS": _REGISTERS,
        }

    def _make_passes(self, problem: Problem, inputs: Inputs, saved: Saved) -> list[Pass]:
        kv_batch = inputs.key.shape[0]
        kv_planes = kv_batch * problem.kv_heads
        rows = -(-problem.kv_len // tiles.TILE_KV)
        step = kv_planes  # keys that serve several batches have queries in planes far apart
        if kv_batch == problem.batch:
            step = min(kv_planes, -(-_TILES_A_PASS // rows))
        members = problem.group * (problem.batch // kv_batch)
        tile = self._size.q
        length = -(-problem.q_len // tile) * tile
        size = step * members * length * self.fields["PADDED_DIM"]
        self.new_totals = blank([size], torch.float32, self.device)
        self.new_counter = blank([1], torch.int32, self.device)
        made = []
        for first in range(0, kv_planes, step):
            count = min(step, kv_planes - first)
            made.append(self._pass(problem, inputs, saved, first, count, members, rows))
        return made

    def _pass(
        self,
        problem: Problem,
        inputs: Inputs,
        saved: Saved,
        first: int,
        count: int,
        members: int,
        rows: int,
    ) -> Pass:
        out, d_out = saved.out, saved.d_out
        mask, length = problem.mask, problem.q_len
        first_plane, planes = first * problem.group, count * members
        mods = [problem.mask_program, problem.gradient.program if problem.gradient else None]
        over_keys = (
            *kernel.mod_values(mods), problem.scale, problem.batch, inputs.key.shape[0],
            problem.heads, problem.group, first_plane, planes, length, problem.kv_len,
            *kernel.strides(inputs, d_out),
            *kernel.plane_strides(mask, mask.grid.columns if mask else 0),
        )  # fmt: skip
        before = (
            first_plane, problem.heads, length, *out.stride()[:3], *d_out.stride()[:3],
        )  # fmt: skip
        after = (
            *kernel.mod_values(mods), problem.scale, first_plane, problem.heads, length,
            *inputs.query.stride()[:3],
        )  # fmt: skip
        of_before = {name: self.fields[name] for name in _OF_BEFORE}
        of_before["HAS_D_LSE"] = self.has_d_lse
        of_after = {name: self.fields[name] for name in _OF_AFTER}
        row_tiles = -(-length // _ROWS) * planes
        programs = min(rows * count, tiles.multiprocessors(problem.device))
        return Pass(
            self._launch("before", row_tiles, before, of_before, 4),
            self._launch("backward", programs, over_keys, self.fields, _WARPS, {"maxnreg": _MOST}),
            self._launch("after", row_tiles, after, of_after, 8),
        )

    def _launch(
        self,
        name: str,
        programs: int,
        fixed: tuple[int | float, ...],
        fields: dict[str, Any],
        warps: int,
        options: dict[str, Any] | None = None,
    ) -> Launch:
        size = self._size._replace(warps=warps)
        return Launch(
            self._module, name, programs, fixed, fields, size, self.device, options=options or {}
        )

    def __call__(self, given: Operands, saved: Saved) -> Gradients:
        gradients, captured = self.empty(), self.captured.make()
        before, over_keys, after = self.tensors(given, saved, gradients, captured)
        for launch in self.passes:
            launch.before.run(before)
            launch.over_keys.run(over_keys)
            launch.after.run(after)
        derivatives = tuple(given.captures[slot] for slot in self.slots)
        return gradients._replace(captures=self.scatter(captured, derivatives))

    def empty(self) -> Gradients:
        """Of query, key, value, and delta; not filled yet."""
        query, key, value, delta = (new() for new in self.new)
        return Gradients(query, key, value, delta, {})

    def tensors(
        self, given: Operands, saved: Saved, gradients: Gradients, captured: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """What the three kernels read and write, in the order of their signatures."""
        query, key, value, delta, _ = gradients
        totals, counter = self.new_totals(), self.new_counter()
        saved = self._readable(saved)
        lse = saved.lse.contiguous()
        d_lse = lse if saved.d_lse is None else saved.d_lse.contiguous()  # lse: not read
        spans = runs = lse  # not read
        captures = [given.captures[slot] for slot in self.slots]
        if given.mask is not None:
            spans, runs = given.mask.transposed.spans, given.mask.transposed.table
            captures = [*given.mask.program.captures, *captures]
        over_keys = [
            counter, *given[:3], saved.d_out, key, value, totals, lse, delta, spans, runs,
            *captures, *captured,
        ]  # fmt: skip
        after = [totals, given.query, query, *captures, *captured]
        return [counter, saved.out, saved.d_out, d_lse, delta, totals], over_keys, after

    def _readable(self, saved: Saved) -> Saved:
        """As the bulk copy engine can read it."""
        if not self.unreadable:
            return saved
        return saved._replace(**{n: getattr(saved, n).contiguous() for n in self.unreadable})
