"""What was traced and compiled, and where kernels are kept."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from flexmod import memo
from flexmod.counters import COUNTS, Counts
from flexmod.kernels import compile as kernels
from flexmod.program import recognise


def stats() -> Counts:
    """A snapshot of the running totals of this process.

    Returns:
        Counts: `traces` (mods traced, those not counted that are known from an earlier trace),
        `compiles` (kernels built because neither memory nor disk had them), `memory_hits` and
        `disk_hits` (kernels found again).
    """
    return replace(COUNTS)


def reset_stats() -> None:
    """Set all totals to 0."""
    for field in fields(COUNTS):
        setattr(COUNTS, field.name, 0)


def clear_memory() -> None:
    """Forget the traces and kernels of this process; kernels on disk stay."""
    recognise.forget()
    kernels.forget()
    memo.forget()


def directory() -> Path:
    """Where rendered kernels are kept: FLEXMOD_CACHE_DIR, else `flexmod` in the XDG cache."""
    return kernels.directory()
