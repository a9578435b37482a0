"""Results as files: JSON, rewritten after every row, and a picture made from it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import flexmod
from flexmod.bench.setting import Setting, environment, slug
from flexmod.bench.suites import SUITES, Record, Suite, is_ours
from flexmod.errors import ArgumentError, UnsupportedError

_CHECKOUT = Path(flexmod.__file__).resolve().parent.parent
PNG_DPI = 130


def results_folder() -> Path | None:
    """benchmarks/results of a source checkout; None for an installed package."""
    found = _CHECKOUT / "benchmarks" / "results"
    return found if found.is_dir() else None


def result_path(folder: Path, suite: Suite, setting: Setting) -> Path:
    return folder / f"{slug(setting.device)}_{suite.name}.json"


def write(path: Path, suite: Suite, setting: Setting, records: list[Record]) -> None:
    """All that is known so far, atomically."""
    found = {
        "suite": suite.name, "environment": environment(setting.device),
        "tokens": setting.tokens, "absent": setting.absent, "left": setting.left,
        "rows": records,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read(path: Path) -> tuple[Suite, dict[str, Any]]:
    """The suite and the contents of a result file.

    Raises:
        ArgumentError: it cannot be read, or is no result of a suite.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return SUITES[found["suite"]], found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"{path} is no result file of a suite: {error!r}") from None


def draw(path: Path) -> Path:
    """A picture of a result file, beside it: groups of bars, one group a row.

    Raises:
        ArgumentError: see `read`. UnsupportedError: matplotlib is not installed.
    """
    suite, found = read(path)
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise UnsupportedError(
            "a picture needs matplotlib: pip install matplotlib, then "
            f"python -m flexmod bench --picture {path}"
        ) from None
    records = found["rows"]
    figure, axes = pyplot.subplots(figsize=(max(6.0, 0.9 * len(records)), 4.8))
    _bars(axes, suite, records)
    where = found["environment"]
    axes.set_title(f"{suite.name}, {where['device']}, torch {where['torch']}, {where['date']}")
    figure.tight_layout()
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=PNG_DPI)
    pyplot.close(figure)
    return target


def _bars(axes: Any, suite: Suite, records: list[Record]) -> None:
    names = list(dict.fromkeys(name for r in records for name in r[suite.figure]))
    names.sort(key=lambda name: not is_ours(name))
    width = 0.8 / max(len(names), 1)
    for at, name in enumerate(names):
        places = [n + (at - (len(names) - 1) / 2) * width for n in range(len(records))]
        heights = [r[suite.figure].get(name, 0.0) for r in records]
        axes.bar(places, heights, width, label=name, edgecolor="white", linewidth=0.3)
    labels = [
        f"{r['row']}\nD{r['head_dim']}" if "head_dim" in r else r["row"].replace(", ", "\n")
        for r in records
    ]
    axes.set_xticks(range(len(records)), labels, rotation=60, ha="right", fontsize=7)
    axes.set_ylabel(suite.unit)
    if not suite.more_is_better:
        axes.set_yscale("log")
    axes.legend(fontsize=7, ncols=2)
