"""`python -m flexmod bench --tune`: measures tiles for a class of problems and writes a tuning row.

A class is a kernel (forward or backward), what kind of mods, an element size and a head dimension.
Each selected row of the benchmarks stands for the class that it is in; candidates are tried as
kernel_options, interleaved, and the fastest is written with device, versions and date.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from math import log2
from pathlib import Path
from typing import Any

from flexmod.attention import flex_attention, make_problem
from flexmod.bench.attention import jobs, reason
from flexmod.bench.case import Call, Case, make_case, runner
from flexmod.bench.rows import rows
from flexmod.bench.setting import Setting, environment
from flexmod.bench.timing import interleaved
from flexmod.blocks import create_block_mask
from flexmod.errors import BackendError
from flexmod.kernels import fa2, memory, tuned, tuning
from flexmod.kernels.problem import Inputs, Problem
from flexmod.kernels.tuning import Target, Tiles
from flexmod.program import trace

_QUERIES, _KEYS, _WARPS, _STAGES = (128, 64, 32, 16), (128, 64, 32, 16), (4, 8), (4, 3, 2, 1)
_MOST = 24  # candidates of a class: each is a kernel to build
_KERNELS = {"forward": ("forward",), "backward": ("backward_query", "backward_key")}


def run(setting: Setting, directions: list[str], folder: Path) -> list[Path]:
    """Tune what the selected rows stand for; the files written.

    Raises:
        BackendError: the fa2 engine does not run on the device.
    """
    target = fa2.target(setting.device)
    if isinstance(target, str):
        raise BackendError(f"--tune needs the fa2 engine: {target}")
    found: list[tuned.Row] = []
    try:
        for row in measure(setting, directions, target):
            found.append(row)
            print(f"{row.kernel:<9} {row.mods:<7} D{row.dim}: {Tiles(*row.tiles)}", flush=True)
    except KeyboardInterrupt:
        setting.left.append("the rest of the classes (interrupted)")
    return tuned.write(folder, found)


def measure(setting: Setting, directions: list[str], target: Target) -> Iterator[tuned.Row]:
    """The best tiles of each class, as they are found."""
    known = set()
    for direction, (row, head_dim) in product(directions, jobs(rows, setting)):
        if setting.budget.is_spent:
            setting.left.append(f"{direction} {row.name} D{head_dim}")
            continue
        case = make_case(
            row, direction, head_dim, tokens=setting.tokens, width=setting.width,
            device=setting.device, dtype=setting.dtype,
        )  # fmt: skip
        mask, problem = _problem(case)
        mods, dim = tuning.mods_class(problem), tuning.padded(head_dim)
        if (direction, mods, dim) in known:
            continue
        known.add((direction, mods, dim))
        best = fastest(case, mask, candidates(problem, direction, target), setting)
        if best is not None:
            where = environment(setting.device)
            measured = {key: where[key] for key in ("device", "torch", "triton", "date")}
            yield tuned.Row(
                direction, problem.dtype.itemsize, dim, best, mods, target.arch,
                tuple(measured.items()),
            )  # fmt: skip


def _problem(case: Case) -> tuple[Any, Problem]:
    """The block map of a case, and the problem that the planner sees."""
    seqlen, device = case.row.seqlen, case.query.device
    mask: Any = case.mask_mod
    if mask is not None:
        mask = create_block_mask(mask, None, None, seqlen, seqlen, device)
    score = trace(case.score_mod, "score", device=device) if case.score_mod else None
    return mask, make_problem(Inputs(*(x.detach() for x in case.tensors)), score, mask)


def candidates(problem: Problem, direction: str, target: Target) -> list[Tiles]:
    """What the planner would do first, then the tiles most like it that fit into the device."""
    planned = tuning.plan(problem, target, _KERNELS[direction][0])
    if planned is None:
        return []
    others = (Tiles(*sizes) for sizes in product(_QUERIES, _KEYS, _WARPS, _STAGES))
    fitting = [t for t in others if t != planned and _fits(t, problem, direction, target)]
    return [planned, *sorted(fitting, key=lambda tiles: _unlike(tiles, planned))][:_MOST]


def _unlike(one: Tiles, other: Tiles) -> float:
    """How many halvings and doublings apart."""
    halvings = sum(abs(log2(a / b)) for a, b in zip(one[:3], other[:3], strict=True))
    return halvings + abs(one.stages - other.stages)


def _fits(tiles: Tiles, problem: Problem, direction: str, target: Target) -> bool:
    """Not more memory than there is, and accumulators that leave registers for the rest."""
    if tiles.q * max(tiles.kv, tuning.padded(problem.value_dim)) > 4096 * tiles.warps:
        return False  # 128 registers a thread for one float32 tile
    return all(
        memory.shared_bytes(
            tuning.work_of(problem, target, kernel), tiles.q, tiles.kv, tiles.stages
        )
        <= target.shared
        for kernel in _KERNELS[direction]
    )


def fastest(
    case: Case, mask: Any, tried: list[Tiles], setting: Setting
) -> tuple[int, int, int, int] | None:
    """The tiles of the smallest median; the first, planned ones unless others are 1 % faster."""
    runs: dict[str, Callable[[], Any]] = {}
    for n, tiles in enumerate(tried):
        if setting.budget.is_spent:
            break
        setting.progress.show(f"{case.direction} {case.row.name}: {tiles}", n / len(tried))
        options = dict(zip(tuning.HINTS, tiles, strict=True))
        attend = partial(
            flex_attention, *case.tensors, case.score_mod, mask, backend="fa2",
            kernel_options=options,
        )  # fmt: skip
        try:
            run = runner(Call(attend, list(case.tensors)), case)
            run()
        except (BackendError, RuntimeError) as error:
            print(f"  {tiles}: {reason(error)}")
            continue
        runs[str(n)] = run
    times = interleaved(runs, setting.rounds, setting.device, setting.budget)
    if not times:
        return None
    by_time = sorted(times, key=lambda name: times[name].median)
    for name in by_time[:3]:
        print(f"  {tried[int(name)]}: {times[name].median:.3f} ms")
    own = times.get("0")
    best = by_time[0]
    if own is not None and times[best].median > 0.99 * own.median:
        best = "0"
    return tried[int(best)]
