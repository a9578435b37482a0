"""The suites. To add one, add a row to SUITES: its records have "row", figures and "failed"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from flexmod.bench import attention, latency, masks, rows
from flexmod.bench.setting import Setting

Record = dict[str, Any]


@dataclass(frozen=True)
class Suite:
    """A suite: what yields its records, the key of their figures, and which way is better."""

    name: str
    measure: Callable[[Setting], Iterator[Record]]
    figure: str
    unit: str
    more_is_better: bool = False
    table: attention.Table | None = None  # its rows, if it is one of attention


def _attention(name: str, direction: str, table: attention.Table) -> Suite:
    measure = partial(attention.measure, direction, table)
    return Suite(name, measure, "tflops", "TFLOP/s", True, table)


SUITES = {
    suite.name: suite
    for suite in (
        _attention("forward", "forward", rows.rows),
        _attention("backward", "backward", rows.rows),
        _attention("small-forward", "forward", rows.small_rows),
        _attention("small-backward", "backward", rows.small_rows),
        Suite("masks", masks.measure, "ms", "ms"),
        Suite("latency", latency.measure, "us", "us"),
    )
}


def is_ours(name: str) -> bool:
    return name.startswith("flexmod")


def comparison(suite: Suite, record: Record) -> tuple[str, str, float] | None:
    """Our best candidate, the best peer, and how many times faster ours is; None without either."""
    figures = record[suite.figure]
    sign = 1 if suite.more_is_better else -1
    ours = [name for name in figures if is_ours(name)]
    peers = [name for name in figures if not is_ours(name)]
    if not ours or not peers:
        return None
    own, peer = (max(some, key=lambda name: sign * figures[name]) for some in (ours, peers))
    return own, peer, (figures[own] / figures[peer]) ** sign
