"""The fuzzer of fuzz.py on a few hundred masks, and proof that it would notice a wrong rule."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from flexmod.blocks import ranges, separate
from flexmod.program.intervals import Interval

CHECK = runpy.run_path(str(Path(__file__).with_name("fuzz.py")))["check"]
WRONG = {
    "lt": lambda x, y: Interval(x.hi <= y.lo, x.lo < y.hi),
    "ge": lambda x, y: Interval(x.lo >= y.hi, x.hi > y.lo),
    "eq": lambda x, y: Interval((x.hi <= y.lo) & (x.lo >= y.hi), (x.hi > y.lo) & (x.lo < y.hi)),
}


@pytest.mark.parametrize("first", range(1_000_000, 1_000_500, 50))
def test_random_masks(first):
    for seed in range(first, first + 50):
        CHECK(seed)


@pytest.mark.parametrize("op", WRONG)
def test_a_wrong_rule_is_noticed(op, monkeypatch):
    monkeypatch.setitem(ranges._COMPARISONS, op, WRONG[op])
    with pytest.raises(AssertionError):
        for seed in range(2_000_000, 2_000_400):
            CHECK(seed)


@pytest.mark.parametrize("op,wrong", [("lt", "le"), ("ge", "gt"), ("eq", "le"), ("ne", "gt")])
def test_a_wrong_comparison_of_sums_is_noticed(op, wrong, monkeypatch):
    compare = separate.compare
    swapped = lambda name, *others: compare(wrong if name == op else name, *others)
    monkeypatch.setattr(separate, "compare", swapped)
    with pytest.raises(AssertionError):
        for seed in range(3_000_000, 3_000_400):
            CHECK(seed)


@pytest.mark.parametrize("claim", ["ends", "dense"])
def test_a_false_claim_of_mixed_blocks_is_noticed(claim, monkeypatch):
    """What an atom calls mixed is not looked at."""
    compare = separate.compare
    claims = {"ends": True, claim: True}
    monkeypatch.setattr(separate, "compare", lambda *given: compare(*given)._replace(**claims))
    with pytest.raises(AssertionError):
        for seed in range(4_000_000, 4_002_000):
            CHECK(seed)
