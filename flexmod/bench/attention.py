"""The suites of attention, forward and backward: TFLOP/s on visible elements, and errors."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch

from flexmod.bench.case import Call, Case, make_case, runner
from flexmod.bench.errors import reference
from flexmod.bench.peers import Candidate, flex
from flexmod.bench.rows import Row, select
from flexmod.bench.setting import Setting
from flexmod.bench.timing import interleaved, wait
from flexmod.blocks import create_block_mask
from flexmod.errors import ArgumentError

_FOLDERS = re.compile(r"""(?<=[\s'"(])(?:/[\w.+-]+)+/""")  # results are for any machine
_WRONG = 0.05  # relative error; half precision leaves a tenth of it
Table = Callable[[int], list[Row]]  # tokens -> rows


def jobs(table: Table, setting: Setting) -> list[tuple[Row, int]]:
    """Rows and head dimensions of a run, one head dimension after the other."""
    chosen = select(table(setting.tokens), setting.rows)
    found = [
        (row, dim)
        for dim in setting.head_dims
        for row in chosen
        if row.head_dims is None or dim in row.head_dims
    ]
    if not found:
        raise ArgumentError(f"--rows {setting.rows} are not measured with this --head-dim")
    return found


def measure(direction: str, table: Table, setting: Setting) -> Iterator[dict[str, Any]]:
    """One record a row, as it is measured."""
    found = jobs(table, setting)
    for done, (row, head_dim) in enumerate(found):
        if setting.budget.is_spent:
            setting.left += [f"{row.name} D{dim}" for row, dim in found[done:]]
            return
        show = partial(_show, setting, done / len(found), f"{direction} {row.name} D{head_dim}")
        yield measure_row(row, direction, head_dim, setting, show)
        flex.forget()
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()


def _show(setting: Setting, done: float, what: str, name: str) -> None:
    setting.progress.show(f"{what}: {name}", done)


def measure_row(
    row: Row, direction: str, head_dim: int, setting: Setting, show: Callable[[str], None]
) -> dict[str, Any]:
    """The record of a row. Every candidate that serves it has a figure or a reason in "failed"."""
    case = make_case(
        row, direction, head_dim, tokens=setting.tokens, width=setting.width,
        device=setting.device, dtype=setting.dtype,
    )  # fmt: skip
    failed: dict[str, str] = {}
    started = _start_all(case, setting, show, failed)
    errors = _errors(case, started, show, failed) if setting.rounds else {}
    show("timing")
    runs = {name: s.run for name, s in started.items() if name not in failed}
    times = interleaved(runs, setting.rounds, setting.device, setting.budget)
    work = operations(case)
    batch, heads, seqlen, _ = case.query.shape
    return {
        "row": row.name, "head_dim": head_dim, "direction": direction, "seqlen": seqlen,
        "batch": batch, "heads": heads, "dtype": str(setting.dtype).removeprefix("torch."),
        "tflops": {name: work / t.median / 1e9 for name, t in times.items()},
        "ms": {name: t._asdict() for name, t in times.items()},
        "error": errors, "first_s": {name: s.seconds for name, s in started.items()},
        "failed": failed, "kinds": asdict(row),
    }  # fmt: skip


class _Started(NamedTuple):
    """A candidate after its first call, and the seconds that this took."""

    call: Call
    run: Callable[[], Any]
    seconds: float


def _start_all(
    case: Case, setting: Setting, show: Callable[[str], None], failed: dict[str, str]
) -> dict[str, _Started]:
    found: dict[str, _Started] = {}
    for candidate in setting.candidates:
        if not candidate.serves(case.row, case.direction):
            continue
        if setting.budget.is_spent and found:
            failed[candidate.name] = "no time was left"
            continue
        show(candidate.name)
        try:
            found[candidate.name] = _start(candidate, case)
        except Exception as error:  # a peer that cannot serve a row shows why
            failed[candidate.name] = reason(error)
    return found


def _start(candidate: Candidate, case: Case) -> _Started:
    began = time.perf_counter()
    call = candidate.make(case)
    run = runner(call, case)
    run()
    wait(case.query.device)
    return _Started(call, run, time.perf_counter() - began)


def _errors(
    case: Case,
    started: dict[str, _Started],
    show: Callable[[str], None],
    failed: dict[str, str],
) -> dict[str, float]:
    """Of each candidate. What is wrong has failed: its speed would be that of something else."""
    show("float64 reference")
    try:
        distance = reference(case)
        found = {name: distance(s.call, s.run()) for name, s in started.items()}
    except Exception as error:  # no memory for float64, say: figures without errors
        failed["float64 reference"] = reason(error)
        return {}
    failed.update({n: f"wrong by {e:.1e}" for n, e in found.items() if not e < _WRONG})
    return found


def operations(case: Case) -> float:
    """Floating-point operations of the products, for visible pairs; a backward counts 2.5 times."""
    batch, heads, seqlen, head_dim = case.query.shape
    visible = 1.0
    if case.mask_mod is not None:
        shape = (None, None, seqlen, seqlen)
        visible = create_block_mask(case.mask_mod, *shape, case.query.device).density() / 100
    factor = 2.5 if case.direction == "backward" else 1.0
    return factor * 4 * batch * heads * seqlen**2 * head_dim * visible


def reason(error: Exception) -> str:
    """An exception in one line: the last that names an error, or the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    telling = [line for line in lines if "Error: " in line]
    line = telling[-1] if telling else f"{type(error).__name__}: {lines[0]}"
    return _FOLDERS.sub("", line)[:200]
