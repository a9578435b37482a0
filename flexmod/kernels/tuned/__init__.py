"""Tuning rows: which tiles a kernel runs with, as data in the files beside this one.

A file serves the architectures whose names start with its own: `sm_90.json`, `sm_10.json` (sm_100,
sm_103, ...), `gfx.json`; `any.json` serves all. `python -m flexmod bench --tune` measures and
writes rows. The most special row that serves a problem is taken: their order does not matter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Row:
    """Tiles for a kernel, and where they were measured.

    kernel: the start of a kernel's name: "forward", "backward", "backward_key".
    mods: "gather" (score_mod reads a table element by element), "long" (many instructions a pair),
        or "" for all.
    itemsize, dim: served are types up to that many bytes, padded head dimensions up to that.
    tiles: query rows, keys, warps, stages.
    measured: device, versions and date; empty for rows that were only reasoned out.
    """

    kernel: str
    itemsize: int
    dim: int
    tiles: tuple[int, int, int, int]
    mods: str = ""
    arch: str = ""
    measured: tuple[tuple[str, str], ...] = ()

    def serves(self, kernel: str, mods: str, arch: str, itemsize: int, dim: int) -> bool:
        return (
            kernel.startswith(self.kernel)
            and self.mods in ("", mods)
            and arch.startswith(self.arch)
            and itemsize <= self.itemsize
            and dim <= self.dim
        )

    @property
    def rank(self) -> tuple[int, bool, int, int, int]:
        """Higher for the more special row."""
        return len(self.arch), bool(self.mods), len(self.kernel), -self.itemsize, -self.dim

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        """Rows of one key replace each other."""
        return self.kernel, self.mods, self.arch, self.itemsize, self.dim


def find(kernel: str, mods: str, arch: str, itemsize: int, dim: int) -> Row | None:
    """The most special row that serves a problem."""
    serving = (row for row in rows() if row.serves(kernel, mods, arch, itemsize, dim))
    return max(serving, key=lambda row: row.rank, default=None)


def largest_dim(arch: str, itemsize: int) -> int:
    """The largest padded head dimension that there are rows for, of all kernels."""
    return max(row.dim for row in rows() if arch.startswith(row.arch) and itemsize <= row.itemsize)


@lru_cache(maxsize=1)
def rows() -> tuple[Row, ...]:
    """All rows of all files."""
    return tuple(row for path in sorted(FOLDER.glob("*.json")) for row in read(path))


def read(path: Path) -> list[Row]:
    arch = "" if path.stem == "any" else path.stem
    return [_row(arch, **entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


def _row(arch: str, *, tiles: list[int], measured: dict[str, str], **others: Any) -> Row:
    q, kv, warps, stages = tiles
    return Row(arch=arch, tiles=(q, kv, warps, stages), measured=tuple(measured.items()), **others)


def write(folder: Path, fresh: Iterable[Row]) -> list[Path]:
    """Put rows into the files of a folder, in place of those of the same key; one row a line."""
    written = []
    for arch in sorted({row.arch for row in fresh}):
        path = folder / f"{arch or 'any'}.json"
        known = {row.key: row for row in (read(path) if path.exists() else [])}
        known |= {row.key: row for row in fresh if row.arch == arch}
        lines = [json.dumps(_entry(row)) for row in sorted(known.values(), key=lambda r: r.key)]
        path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
        written.append(path)
    return written


def _entry(row: Row) -> dict[str, Any]:
    entry = asdict(row)
    del entry["arch"]
    return {**entry, "measured": dict(row.measured)}
