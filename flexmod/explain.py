"""`explain`: what `flex_attention` would run for a call, and why. Nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flexmod import checks
from flexmod.attention import make_problem
from flexmod.errors import BackendError
from flexmod.formula import formula
from flexmod.given import Map, Mod
from flexmod.kernels import choose, tuning
from flexmod.kernels.memory import shared_bytes
from flexmod.kernels.problem import Inputs, Problem
from flexmod.program import Program, trace

_DENSE_BLOCK = 128  # blocks that a call without a mask is counted in


@dataclass(frozen=True)
class Work:
    """How much there is to do in one forward pass, over all batches and heads.

    flops: 2 (E + Ev) for each element of a visited block. dense_flops: the same without a map.
    moved: values read and written with queries as the outer loop (FlashAttention-2, Dao 2023).
    dense_moved: values moved when scores and weights are written out.
    """

    flops: int
    dense_flops: int
    moved: int
    dense_moved: int


@dataclass(frozen=True)
class Explanation:
    """What would run. `print` it, or read its fields.

    Attributes:
        engine: the one that serves the call; None if the backend asked for cannot.
        refusals: each engine, in order of preference, and why it is not taken (None: it could be).
        tiles: of the Triton engine, as text; None for the others.
        blocks: (empty, partial, full) blocks of the map, over its B and H; None without a mask.
        score, mask: the traced programs. score_formula, mask_formula: the same as formulas.
        work: see `Work`.
        ignored: keys of kernel_options that change nothing here.
        call: shapes and dtype in one line.
    """

    engine: str | None
    refusals: dict[str, str | None]
    tiles: str | None
    blocks: tuple[int, int, int] | None
    score: Program | None
    mask: Program | None
    score_formula: str | None
    mask_formula: str | None
    work: Work
    ignored: tuple[str, ...]
    call: str

    def __str__(self) -> str:
        parts = [self._engines(), self._blocks(), self._work()]
        for program, text in ((self.score, self.score_formula), (self.mask, self.mask_formula)):
            if program is not None:
                parts.append(f"{program.kind} = {text}\n{program}")
        return "\n\n".join(parts)

    def _engines(self) -> str:
        lines = [self.call, f"engine: {self.engine or 'none'}"]
        for name, reason in self.refusals.items():
            if name != self.engine:
                lines.append(
                    f"  not {name}: {reason or 'it could, but it comes later in the order'}"
                )
        if self.tiles:
            lines.append(f"tiles: {self.tiles}")
        if self.ignored:
            lines.append(f"kernel_options without effect: {', '.join(self.ignored)}")
        return "\n".join(lines)

    def _blocks(self) -> str:
        if self.blocks is None:
            return "blocks: no mask, every key is visited"
        total = max(sum(self.blocks), 1)
        rows = zip(("empty", "partial", "full"), self.blocks, strict=True)
        does = {"empty": "skipped", "partial": "mask evaluated", "full": "mask not evaluated"}
        lines = [f"  {name:<8}{n:>10,}  {100 * n / total:5.1f} %  {does[name]}" for name, n in rows]
        return "\n".join(["blocks:", *lines])

    def _work(self) -> str:
        work = self.work
        return (
            f"work:\n  {_scaled(work.flops)}FLOP, {_scaled(work.dense_flops)}FLOP without a map\n"
            f"  {_scaled(work.moved).strip()} values moved, "
            f"{_scaled(work.dense_moved).strip()} if scores were written out"
        )


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    block_mask: Map | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    backend: str | None = None,
) -> Explanation:
    """What `flex_attention` would do with these arguments, and why.

    Takes the arguments of `flex_attention`, checks them in the same way and raises the same
    errors, but a `backend` that refuses is reported instead of raised.

    Example:
        >>> import torch, flexmod
        >>> q = k = v = torch.zeros(1, 2, 512, 64)
        >>> report = flexmod.explain(q, k, v, flexmod.mods.softcap(20.0), flexmod.masks.causal())
        >>> report.score_formula, report.mask_formula
        ('20*tanh(score/20)', 'q_idx >= kv_idx')
        >>> report.blocks
        (12, 8, 12)
    """
    checks.tensors(query, key, value, enable_gqa)
    score = None
    if score_mod is not None:
        work = torch.float64 if query.dtype == torch.float64 else torch.float32
        score = trace(score_mod, "score", score_dtype=work, device=query.device)
        checks.captures(score, query.device)
    checks.sink(sink, query)
    problem = make_problem(Inputs(query, key, value), score, block_mask, scale, kernel_options)
    problem = replace(
        problem, sink=sink, dropout_p=checks.dropout(dropout_p), deterministic=deterministic
    )
    refusals = choose.refusals(problem)
    engine = _engine(problem, backend)
    mask = problem.mask
    return Explanation(
        engine=engine,
        refusals=refusals
        if backend is None
        else {backend: choose.backend(backend).refuses(problem)},
        tiles=_tiles(problem, engine),
        blocks=mask.counts() if mask is not None else None,
        score=score,
        mask=mask.program if mask is not None else None,
        score_formula=_maybe(formula, score),
        mask_formula=_maybe(formula, mask.program if mask is not None else None),
        work=_count_work(problem),
        ignored=tuple(name for name in kernel_options or {} if not _steers(name)),
        call=_call(problem),
    )


def _engine(problem: Problem, backend: str | None) -> str | None:
    try:
        return choose.choose(problem, backend).name
    except BackendError:
        return None


def _maybe(function: Callable[[Program], str], program: Program | None) -> str | None:
    return None if program is None else function(program)


def _steers(option: str) -> bool:
    """Whether a key of kernel_options has any effect on the forward pass."""
    return option.removeprefix("fwd_") in checks.TILE_OPTIONS


def _tiles(problem: Problem, engine: str | None) -> str | None:
    if engine == "hopper":
        from flexmod.kernels.hopper.tiles import describe

        return describe(problem)
    if engine != "fa2":
        return None
    from flexmod.kernels import fa2

    target = fa2.target(problem.device)
    if isinstance(target, str):
        return None
    tiles = tuning.plan(problem, target, "forward")
    if tiles is None:
        return None
    if problem.mask is not None:
        tiles = tuning.fit_blocks(tiles, problem.mask.block_size) or tiles
    work = tuning.work_of(problem, target, "forward")
    shared = shared_bytes(work, tiles.q, tiles.kv, tiles.stages) / 1024
    return (
        f"{tiles.q} queries x {tiles.kv} keys, {tiles.warps} warps, {tiles.stages} stages, "
        f"at most {shared:.3g} KiB of shared memory"
    )


def _call(problem: Problem) -> str:
    name = str(problem.dtype).removeprefix("torch.")
    heads = f"{problem.heads} heads"
    if problem.kv_heads != problem.heads:
        heads += f" on {problem.kv_heads} key/value heads"
    dims = f"head_dim {problem.head_dim}"
    if problem.value_dim != problem.head_dim:
        dims += f" and {problem.value_dim}"
    extras = [
        text
        for text, given in (
            (", a sink a head", problem.sink is not None),
            (f", dropout {problem.dropout_p:g}", problem.dropout_p > 0),
            (", deterministic", problem.deterministic),
        )
        if given
    ]
    return (
        f"call: batch {problem.batch}, {heads}, {problem.q_len} queries, {problem.kv_len} keys, "
        f"{dims}, {name} on {problem.device}{''.join(extras)}"
    )


def _count_work(problem: Problem) -> Work:
    """Blocks that a sequence's end cuts short count whole, so the figures may be a bit high."""
    copies = problem.batch * problem.heads
    q_len, kv_len = problem.q_len, problem.kv_len
    dims = problem.head_dim + problem.value_dim
    if problem.mask is None:
        visited = copies * q_len * kv_len
        rows_read = copies * -(-q_len // _DENSE_BLOCK) * kv_len
    else:
        block_q, block_kv = problem.mask.block_size
        _, partial, full = problem.mask.counts()
        planes = problem.mask.shape[0] * problem.mask.shape[1]
        live = (partial + full) * copies // max(planes, 1)
        visited, rows_read = live * block_q * block_kv, live * block_kv
    ends = copies * q_len * dims  # query read, output written
    return Work(
        flops=2 * dims * visited,
        dense_flops=2 * dims * copies * q_len * kv_len,
        moved=ends + rows_read * dims + copies * q_len,
        dense_moved=ends + copies * (kv_len * dims + 4 * q_len * kv_len),
    )


def _scaled(count: float) -> str:
    """Three digits and a prefix: 4_456_448 -> "4.46 M"."""
    for prefix in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.3g} {prefix}"
        count /= 1000
    return f"{count:.3g} T"
