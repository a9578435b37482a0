"""Intervals of random programs hold all that the programs yield."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flexmod
from flexmod.program.bounds import bounds
from flexmod.program.evaluate import evaluate
from flexmod.program.intervals import Interval
from flexmod.program.specialize import specialize
from flexmod.program.tables import Pyramid, Tables

GRAMMAR = runpy.run_path(str(Path(__file__).parent / "mask_grammar.py"))
NAMES = ("b", "h", "q_idx", "kv_idx")
EXTENTS = {"b": 3, "h": 4, "q_idx": 60, "kv_idx": 70}


def spans(extent):
    return st.tuples(st.integers(0, extent - 1), st.integers(0, 12)).map(
        lambda pair: (pair[0], min(pair[0] + pair[1], extent - 1))
    )


RANGES = st.fixed_dictionaries({name: spans(extent) for name, extent in EXTENTS.items()})


def everything(ranges):
    """Index tensors of all positions in some ranges, one axis each."""
    found = {}
    for axis, name in enumerate(NAMES):
        low, high = ranges[name]
        found[name] = torch.arange(low, high + 1).view([-1] + [1] * (3 - axis))
    return found


@pytest.mark.parametrize("special", [False, True], ids=["traced", "specialized"])
@settings(max_examples=150, deadline=None)
@given(mask=GRAMMAR["MASKS"], cells=st.lists(RANGES, min_size=1, max_size=3))
def test_no_value_lies_outside(special, mask, cells):
    program = flexmod.trace(mask)
    if special:
        program = specialize(program, EXTENTS)
    ranges = {
        name: Interval(*(torch.tensor([cell[name][end] for cell in cells]) for end in (0, 1)))
        for name in NAMES
    }
    result = bounds(program, ranges, Tables(program))[program.outputs[0]]
    low, high = (end.expand(len(cells)) for end in result)
    for n, cell in enumerate(cells):
        seen = mask(*everything(cell).values())
        assert low[n] <= int(seen.min()) and int(seen.max()) <= high[n], f"{mask} on {cell}"


@settings(max_examples=150, deadline=None)
@given(mask=GRAMMAR["MASKS"], cell=RANGES)
def test_single_positions_are_exact(mask, cell):
    """Without float operations, a range of one position decides what is visible."""
    program = flexmod.trace(mask)
    at = {name: torch.tensor([cell[name][0]]) for name in NAMES}
    ranges = {name: Interval(index, index) for name, index in at.items()}
    result = bounds(program, ranges, Tables(program))[program.outputs[0]]
    seen = mask(*at.values()).long()
    assert torch.equal(result.lo.expand(1), seen) and torch.equal(result.hi.expand(1), seen)


@settings(max_examples=150, deadline=None)
@given(mask=GRAMMAR["MASKS"])
def test_specializing_changes_no_value(mask):
    extents = {"b": 2, "h": 2, "q_idx": 30, "kv_idx": 20}
    program = specialize(flexmod.trace(mask), extents)
    at = everything({name: (0, extent - 1) for name, extent in extents.items()})
    value, invalid = evaluate(program, at)
    assert torch.equal(value[0].expand(2, 2, 30, 20), mask.dense(2, 2, 30, 20))
    assert invalid is None or not invalid.any()


@settings(max_examples=100, deadline=None)
@given(
    table=st.lists(st.integers(-50, 50), min_size=1, max_size=70),
    pairs=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=9),
)
def test_range_extremes_of_a_table(table, pairs):
    rows = torch.stack([torch.tensor(table), torch.tensor(table).flip(0)])
    row = torch.tensor([a % 2 for a, _ in pairs])
    ends = [sorted((a % len(table), b % len(table))) for a, b in pairs]
    low, high = (torch.tensor(e) for e in zip(*ends, strict=True))
    found = Pyramid(rows).query(row, low, high)
    for n, (first, last) in enumerate(ends):
        part = rows[row[n], first : last + 1]
        assert rows[row[n]].min() <= found.lo[n] <= part.min()
        assert part.max() <= found.hi[n] <= rows[row[n]].max()
        if first == last:
            assert found.lo[n] == found.hi[n] == part[0]


FLOATS, LOST = torch.linspace(-1, 1, 70), torch.full((70,), torch.nan)
FLOAT_MASKS = {
    "a comparison near a tie": lambda b, h, q, k: q / 3 > k / 3,
    "an exact tie": lambda b, h, q, k: (q * 0.1 - k * 0.1) >= 0.0,
    "a square root": lambda b, h, q, k: (q * q + k * k).float().sqrt() < 40.0,
    "a table of floats": lambda b, h, q, k: FLOATS[k] > 0,
    "a sign of nan": lambda b, h, q, k: torch.sign(LOST[k]) == 0,
    "nan": lambda b, h, q, k: ~(LOST[k] < 0),
    "infinity": lambda b, h, q, k: 1.0 / (q - 30.0) > 0.0,
    "exp": lambda b, h, q, k: torch.exp(-(q - k).abs() * 0.5) > 0.01,
    "log of 0": lambda b, h, q, k: torch.log(k.float()) > 1.0,
    "tanh": lambda b, h, q, k: torch.tanh((q - k) * 0.1) > 0.5,
    "a cast": lambda b, h, q, k: (q * 0.37).long() > k,
    "rounding": lambda b, h, q, k: torch.round(q * 0.5) > k,
    "half precision": lambda b, h, q, k: (q + 0.3).half() > k,
    "powers": lambda b, h, q, k: (q * 0.1) ** 3 > k,
    "sine": lambda b, h, q, k: torch.sin(q * 0.3) > 0.0,
}  # fmt: skip


@pytest.mark.parametrize("name", FLOAT_MASKS)
def test_float_masks_are_never_wrongly_decided(name):
    mask = FLOAT_MASKS[name]
    program = flexmod.trace(mask)
    at = everything({n: (0, extent - 1) for n, extent in EXTENTS.items()})
    seen = evaluate(program, at).values[0].expand(*EXTENTS.values())[0, 0]
    q, k = torch.cartesian_prod(torch.arange(60), torch.arange(70)).T
    for size in (1, 4, 16):
        ends = [(n, (n + size - 1).clamp(max=most)) for n, most in ((q, 59), (k, 69))]
        ranges = {"q_idx": Interval(*ends[0]), "kv_idx": Interval(*ends[1])}
        low, high = bounds(program, ranges, Tables(program))[program.outputs[0]]
        low, high = low.expand(len(q)).bool(), high.expand(len(q)).bool()
        padded = torch.nn.functional.pad(seen, (0, size - 1, 0, size - 1))
        windows = padded.unfold(0, size, 1).unfold(1, size, 1).flatten(2).flatten(0, 1)
        counts = torch.nn.functional.pad(torch.ones_like(seen), (0, size - 1, 0, size - 1))
        inside = counts.unfold(0, size, 1).unfold(1, size, 1).flatten(2).flatten(0, 1)
        assert not (low & (inside & ~windows).any(1)).any()
        assert not (~high & windows.any(1)).any()
