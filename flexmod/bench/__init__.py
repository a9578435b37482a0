"""`python -m flexmod bench`: flexmod beside every peer that is installed, in one process.

Each part is one table entry: a row of `rows`, a peer of `peers`, a suite of `suites`.
"""

from flexmod.bench.command import SUMMARY, add_arguments, run

__all__ = ["SUMMARY", "add_arguments", "run"]
