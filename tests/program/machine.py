"""What the machine makes of the comparisons that `program/conditions.py` writes down for it."""

from __future__ import annotations

import operator
import re

STEP = re.compile(r"setp\.(\w\w)(?:\.(and|or))?\.s(32|64) (\$0|p), \$(\d+), \$(\d+)(, p)?;")


def truth(operands, text, kinds):
    """What the machine makes of a chain of comparisons."""
    steps, found = STEP.findall(text), None
    assert not STEP.sub("", text).replace("{ .reg .pred p;", "").strip(" }")
    assert [s[3] for s in steps] == ["p"] * (len(steps) - 1) + ["$0"]
    assert kinds.split(",")[0] == "=b"
    for test, join, bits, _, one, other, again in steps:
        left, right = (operands[int(place) - 1] for place in (one, other))
        assert {kinds.split(",")[int(place)] for place in (one, other)} == {"rl"[bits == "64"]}
        now = getattr(operator, test)(left, right)
        assert bool(join) == bool(again) == (found is not None)
        found = now if found is None else getattr(operator, f"{join}_")(found, now)
    return found
