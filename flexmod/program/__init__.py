"""Programs: traced mods, and what can be done with them.

`trace` records a mod as a `Program` (ir); `evaluate` runs it on tensors, `bounds` on intervals,
`emit` writes it as kernel text; `specialize` makes it cheaper for known extents. What each
operation means in all of them is one row of `ops.TABLE`.
"""

from flexmod.program.ir import Program
from flexmod.program.trace import trace

__all__ = ["Program", "trace"]
