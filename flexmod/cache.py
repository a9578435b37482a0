"""What was traced and compiled, and where kernels are kept."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from flexmod.counters import COUNTS, Counts
from flexmod.kernels import compile as kernels


def stats() -> Counts:
    """A snapshot of the running totals of this process.

    Returns:
        Counts: `traces` (mods traced), `compiles` (kernels built because neither memory nor disk
        had them), `memory_hits` and `disk_hits` (kernels found again).
    """
    return replace(COUNTS)


def reset_stats() -> None:
    """Set all totals to 0."""
    for field in fields(COUNTS):
        setattr(COUNTS, field.name, 0)


def clear_memory() -> None:
    """Forget the kernels of this process; those on disk stay."""
    kernels.forget()


def directory() -> Path:
    """Where rendered kernels are kept: FLEXMOD_CACHE_DIR, else `flexmod` in the XDG cache."""
    return kernels.directory()
