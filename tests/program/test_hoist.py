"""What is moved off the tile keeps every value, to the sign of a zero, and leaves the tile less."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flexmod
from flexmod import masks, mods
from flexmod.program import text
from flexmod.program.dependence import dependence
from flexmod.program.evaluate import evaluate
from flexmod.program.gradient import differentiate
from flexmod.program.ir import LEAVES
from flexmod.program.specialize import specialize
from flexmod.testing import naive

GRAMMAR = runpy.run_path(str(Path(__file__).parent / "mask_grammar.py"))
NAMES = ("b", "h", "q_idx", "kv_idx")
# Around the largest integers that a float32 and an int32 take.
LENGTHS = [1, 2, 60, 2**22, 2**23, 2**24 - 3, 2**24, 2**24 + 2, 2**30, 2**31 - 1, 2**31, 2**33]
EXTENTS = st.fixed_dictionaries(
    {"b": st.integers(1, 3), "h": st.integers(1, 4)}
    | dict.fromkeys(("q_idx", "kv_idx"), st.sampled_from(LENGTHS))
)


def positions(extents, seed):
    """Inputs of `evaluate`: both ends of each axis, and random positions between."""
    draw = torch.Generator().manual_seed(seed)
    found = {}
    for axis, name in enumerate(NAMES):
        last = extents[name] - 1
        middle = torch.randint(last + 1, (3,), generator=draw).tolist()
        places = {0, min(1, last), last // 2, max(last - 1, 0), last, *middle}
        found[name] = torch.tensor(sorted(places)).view([-1] + [1] * (3 - axis))
    return found


def same(program, extents, seed=0):
    """Plain and specialized, bit for bit, at the ends and in between."""
    at = positions(extents, seed)
    before, after = evaluate(program, at).values, evaluate(specialize(program, extents), at).values
    for one, other in zip(before, after, strict=True):
        one, other = torch.broadcast_tensors(one, other)
        torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True, check_dtype=False)
        if one.is_floating_point():
            assert torch.equal(one.signbit(), other.signbit())


@settings(max_examples=150, deadline=None)
@given(mask=GRAMMAR["MASKS"], extents=EXTENTS, seed=st.integers(0, 99))
def test_masks_keep_every_value(mask, extents, seed):
    same(flexmod.trace(mask), extents, seed)


@settings(max_examples=200, deadline=None)
@given(
    tree=GRAMMAR["NUMBERS"],
    kind=st.sampled_from([torch.float32, torch.float64]),
    extents=EXTENTS,
    seed=st.integers(0, 99),
)
def test_floats_of_integers_keep_every_value(tree, kind, extents, seed):
    number = GRAMMAR["Mask"](tree)
    program = flexmod.trace(lambda score, b, h, q, k: number(b, h, q, k).to(kind), "score")
    same(program, extents, seed)


FLOATS = {
    "difference": lambda q, k: q - k,
    "negated distance": lambda q, k: -(q - k).abs(),
    "negated difference": lambda q, k: -(q - k),
    "times a negative number": lambda q, k: (q - k) * -3,
    "times zero": lambda q, k: (q - k) * 0,
    "square": lambda q, k: (q - k) * (k - q),
    "negative sum": lambda q, k: -q - k - 5,
    "negative parts": lambda q, k: -(q - k).abs() - torch.minimum(q, k),
    "clamped": lambda q, k: torch.clamp(q - k, -7, 9),
    "chosen": lambda q, k: torch.where(q < k, q - k, k),
    "cancelled": lambda q, k: (q - k) + (k - q) + 1,
    "doubled": lambda q, k: (q - k) + (q - k),
    "one index left": lambda q, k: (q - k) + k,
    "int32 that overflows": lambda q, k: ((q - k).int() + (2**31 - 1)) - 7,
    "int8 that overflows": lambda q, k: q.to(torch.int8) * k.to(torch.int8),
}


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("length", LENGTHS)
def test_floats_at_the_ends(name, length):
    def mod(score, b, h, q_idx, kv_idx):
        return 1 / FLOATS[name](q_idx, kv_idx).float()

    extents = {"b": 1, "h": 1, "q_idx": length, "kv_idx": length}
    same(flexmod.trace(mod), extents)


COMPARED = {
    "a far window": lambda q, k: q - k < 2**31 - 1,
    "a farther window": lambda q, k: k - q <= 2**40,
    "int32 that overflows": lambda q, k: q.int() + (2**31 - 1) - k.int() < 3,
    "both sides negative": lambda q, k: -q - k - 5 >= -9,
    "the same on both sides": lambda q, k: q + 2**31 - k == q + 2**31 - 1,
    "equal": lambda q, k: (q - k).int() != 1 - k.int() + q.int(),
}


@pytest.mark.parametrize("name", COMPARED)
@pytest.mark.parametrize("length", LENGTHS)
def test_comparisons_at_the_ends(name, length):
    extents = {"b": 1, "h": 1, "q_idx": length, "kv_idx": length}
    same(flexmod.trace(lambda b, h, q_idx, kv_idx: COMPARED[name](q_idx, kv_idx)), extents)


def test_a_chain_of_shared_lines_takes_no_time():
    def mod(score, b, h, q_idx, kv_idx):
        value = q_idx - kv_idx
        for step in range(40):
            value = value + value if step % 2 else torch.minimum(value, value - 1)
        return score + value

    same_extents = {"b": 1, "h": 1, "q_idx": 5, "kv_idx": 5}
    assert specialize(flexmod.trace(mod), same_extents).instructions


def test_a_specialized_program_survives_as_text():
    program = flexmod.trace(mods.alibi(4))
    narrow = specialize(program, {"b": 1, "h": 4, "q_idx": 9, "kv_idx": 9})
    again = text.restored(text.structure(narrow), "alibi", narrow.numbers, narrow.captures)
    assert any(line.attr == "exact" for line in narrow.instructions)
    assert again.instructions == narrow.instructions and again.outputs == narrow.outputs


def on_tiles(program):
    """Names of the operations on whole tiles of indices."""
    pairs = zip(program.instructions, dependence(program), strict=True)
    return [i.op for i, d in pairs if d.reads_both and i.op not in LEAVES]


TABLE = torch.zeros(4, 199)


def biased(score, b, h, q_idx, kv_idx):
    return score - 0.5 * (-(q_idx - kv_idx).abs() * 3 + torch.clamp(kv_idx - q_idx + 5, min=-2))


SPARED = {  # operations left on a tile of indices and of scores
    "alibi": (mods.alibi(4), "add mul sub"),
    "symmetric alibi": (mods.alibi(4, symmetric=True), "abs mul sub sub"),
    "window": (lambda b, h, q, k: (q >= k) & (q - k < 7), "and ge lt"),
    "window as given": (masks.sliding_window(7), "and ge le"),
    "centred": (lambda b, h, q, k: (k - q + h <= 7) & (5 - k < h - q), "and le lt"),
    "both added": (lambda b, h, q, k: (q + k < 7) & (-q - k < -9), "and lt lt"),
    "relative bias": (mods.relative_bias(TABLE), "add add maximum minimum"),
}


@pytest.mark.parametrize("name", SPARED)
def test_what_is_left_on_a_tile(name):
    mod, left = SPARED[name]
    extents = {"b": 2, "h": 4, "q_idx": 4096, "kv_idx": 4096}
    program = specialize(flexmod.trace(mod), extents)
    assert " ".join(sorted(on_tiles(program))) == left
    same_inputs = dict.fromkeys(("q_idx", "kv_idx"), 300) | {"b": 2, "h": 4}
    if program.kind == "mask":
        same(flexmod.trace(mod), same_inputs)


@pytest.mark.parametrize("length", [2**12, 2**22 - 1, 2**22, 2**31 - 1])
def test_conversions_leave_the_tile_while_floats_are_exact(length):
    extents = {"b": 2, "h": 4, "q_idx": length, "kv_idx": length}
    program = flexmod.trace(biased)
    assert "cast" in on_tiles(program)
    after = on_tiles(specialize(program, extents))
    assert ("cast" in after) == (4 * length + 1 > 2**24)


def test_derivatives_have_no_conversions_either():
    slopes = torch.rand(4, requires_grad=True)
    gradient = differentiate(flexmod.trace(mods.alibi(slopes)), frozenset([0])).program
    extents = {"b": 2, "h": 4, "q_idx": 4096, "kv_idx": 4096}
    assert "cast" in on_tiles(gradient)
    assert "cast" not in on_tiles(specialize(gradient, extents))


DIAGONALS = {
    "a comparison": lambda q, k: torch.where(q - k < 5, (q - k).clamp(-9, 9) + 9, 0),
    "a float": lambda q, k: ((q - k).float() * 0.25).floor().long() + 9,
    "a clamped float": lambda q, k: (torch.clamp(k - q, -7, 7).float() * 0.5).long() + 9,
}


@pytest.mark.parametrize("name", DIAGONALS)
def test_an_index_by_difference_is_still_known_as_one(name):
    """Its gradient is summed along diagonals first."""
    table = torch.rand(19, dtype=torch.float64, requires_grad=True)

    def mod(score, b, h, q_idx, kv_idx):
        return score + table[DIAGONALS[name](q_idx, kv_idx)]

    gradient = differentiate(flexmod.trace(mod), frozenset([0]))
    extents = {"b": 1, "h": 1, "q_idx": 30, "kv_idx": 30}
    narrow = specialize(gradient.program, extents)
    (index,) = gradient.loads[0].indices
    assert dependence(narrow)[narrow.outputs[index]].by_difference
    inputs = [torch.randn(1, 1, 30, 8, dtype=torch.float64) for _ in range(3)]
    weight = torch.randn(1, 1, 30, 8, dtype=torch.float64)
    found, expected = (
        torch.autograd.grad((out * weight).sum(), table)[0]
        for out in (flexmod.flex_attention(*inputs, mod), naive(*inputs, mod)[0])
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_an_inexact_float_difference_is_not_taken_for_a_difference():
    program = flexmod.trace(lambda s, b, h, q, k: s + TABLE[0, (q.float() - k.float()).long()])
    extents = {"b": 1, "h": 1, "q_idx": 2**25, "kv_idx": 2**25}
    narrow = specialize(program, extents)
    pairs = zip(narrow.instructions, dependence(narrow), strict=True)
    assert [d.by_difference for i, d in pairs if i.op == "load"] == [False]
