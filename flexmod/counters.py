"""How often something was traced, compiled or found again; read by `flexmod.cache.stats()`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counts:
    """Running totals of this process."""

    traces: int = 0
    compiles: int = 0
    memory_hits: int = 0
    disk_hits: int = 0


COUNTS = Counts()
