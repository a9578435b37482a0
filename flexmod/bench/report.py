"""Results as text: a line as soon as a row is measured, and one table at the end."""

from __future__ import annotations

from collections.abc import Mapping

from flexmod.bench.suites import Record, Suite, comparison, is_ours

_NOTE = 110  # characters of a reason
_YARDSTICKS = ("flash-attn 4", "flex FLASH", "SDPA flash", "SDPA CPU")  # whose error is shown


def label(record: Record) -> str:
    dim = f" D{record['head_dim']}" if "head_dim" in record else ""
    return f"{record['row']}{dim}"


def line(suite: Suite, record: Record) -> str:
    """One row: all figures, with half the interquartile range in percent, and why others failed."""
    parts = [f"{name} {amount(x)}{_spread(record, name)}" for name, x in _figures(suite, record)]
    found = comparison(suite, record)
    if found is not None:
        parts.append(f"{found[2]:.2f} x {found[1]}")
    parts += [f"{name} failed" for name in record["failed"]]
    return f"{suite.name} {label(record):<28} {'  '.join(parts)}"


def table(suite: Suite, records: list[Record], absent: Mapping[str, str] | None = None) -> str:
    """All rows, a column a candidate; errors beside them; below, why some failed or are absent."""
    names = list(dict.fromkeys(name for r in records for name in (*r[suite.figure], *r["failed"])))
    reasons = list(dict.fromkeys((n, why) for r in records for n, why in r["failed"].items()))
    with_errors = any(r.get("error") for r in records)
    head = [suite.name, *names, "ratio"] + (["error", "flash's"] if with_errors else [])
    rows = []
    for record in records:
        cells = [_cell(suite, record, name, reasons) for name in names]
        found = comparison(suite, record)
        cells.append(f"{found[2]:.2f}" if found else "")
        rows.append([label(record), *cells] + (_errors(suite, record) if with_errors else []))
    notes = [f"[{n}] {name}: {why[:_NOTE]}" for n, (name, why) in enumerate(reasons, 1)]
    notes += not_here(absent or {})
    return "\n".join([_aligned([head, *rows]), f"{suite.unit}; ratio to the best peer", *notes])


def not_here(absent: Mapping[str, str]) -> list[str]:
    """A line a reason, with the peers that it keeps away."""
    return [
        f"not here: {', '.join(name for name, its in absent.items() if its == why)} ({why})"
        for why in dict.fromkeys(absent.values())
    ]


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _figures(suite: Suite, record: Record) -> list[tuple[str, float]]:
    return list(record[suite.figure].items())


def _cell(suite: Suite, record: Record, name: str, reasons: list[tuple[str, str]]) -> str:
    if name in record["failed"]:
        return f"[{reasons.index((name, record['failed'][name])) + 1}]"
    figures = record[suite.figure]
    return amount(figures[name]) if name in figures else "-"


def _errors(suite: Suite, record: Record) -> list[str]:
    """Of our fastest candidate, and of the first yardstick that ran."""
    errors = record["error"]
    found = comparison(suite, record)
    own = found[0] if found else next(filter(is_ours, errors), "")
    flash = next((errors[name] for name in _YARDSTICKS if name in errors), None)
    shown = (errors.get(own), flash)
    return ["-" if error is None else f"{error:.1e}" for error in shown]


def _spread(record: Record, name: str) -> str:
    spread = (
        record["ms"][name]["spread"] if "tflops" in record else record.get("spread", {}).get(name)
    )
    return "" if spread is None else f" ±{50 * spread:.0f} %"


def amount(x: float) -> str:
    """Three digits or so."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"
