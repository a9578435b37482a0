"""What a Gluon kernel computes once a row, column or diagonal, and that values stay the same."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import flexmod
from flexmod import masks, mods
from flexmod.kernels.launch import readable
from flexmod.kernels.templates import device_functions
from flexmod.program import diagonals
from flexmod.program.emit import absent, emit, values
from flexmod.program.evaluate import evaluate
from flexmod.program.parts import split
from flexmod.program.scale import SCALE, of_products
from flexmod.program.specialize import specialize

pytest.importorskip("triton")

Q_LEN, KV_LEN, HEADS = 32, 64, 2
EXTENTS = {"b": 1, "h": HEADS, "q_idx": Q_LEN, "kv_idx": KV_LEN}
IDS = torch.arange(KV_LEN) // 9
FLAGS = torch.arange(KV_LEN) % 5 > 0
BIAS = torch.linspace(-1, 1, HEADS * KV_LEN).view(HEADS, KV_LEN)
OFFSETS = torch.randn(HEADS, Q_LEN + KV_LEN, generator=torch.Generator().manual_seed(0))
EVERY_THIRD = torch.arange(Q_LEN + KV_LEN) % 3 == 0
PAIRS = torch.linspace(-2, 2, 81).view(9, 9)


def both_ways(score, b, h, q_idx, kv_idx):
    return score * torch.exp(-IDS[kv_idx] / 9.0) + PAIRS[IDS[q_idx], IDS[kv_idx]]


def past_the_ends(score, b, h, q_idx, kv_idx):
    return score + BIAS[h, kv_idx - 20] * BIAS[h, q_idx + 45]


def of_columns(score, b, h, q_idx, kv_idx):
    return BIAS[h, kv_idx] + BIAS[h, q_idx]


def by_difference(score, b, h, q_idx, kv_idx):
    distance = kv_idx - q_idx + Q_LEN - 1
    return score * OFFSETS[0, distance] + OFFSETS[h, distance] * score


def bucketed(score, b, h, q_idx, kv_idx):
    distance = (q_idx - kv_idx).abs()
    far = torch.log2((distance + 1).float()) * 3
    return score + BIAS[h, torch.where(distance < 5, distance, far.int())]


def dilated(b, h, q_idx, kv_idx):
    return EVERY_THIRD[kv_idx - q_idx + Q_LEN] & (q_idx >= 3)


def many_rows(b, h, q_idx, kv_idx):
    return (IDS[q_idx] == kv_idx) | (IDS[q_idx + 9] < kv_idx) | (IDS[q_idx * 2] > kv_idx)


def conditions(b, h, q_idx, kv_idx):
    same = IDS[q_idx] == IDS[kv_idx]
    return same & FLAGS[kv_idx] & (q_idx // 16 >= kv_idx // 16) & (kv_idx % 7 < 5) & (kv_idx < 60)


MODS = {
    "alibi": ("score", mods.alibi(HEADS)),
    "bias": ("score", lambda score, b, h, q_idx, kv_idx: score + BIAS[h, kv_idx]),
    "both ways": ("score", both_ways),
    "past the ends": ("score", past_the_ends),
    "of columns": ("score", of_columns),
    "by difference": ("score", by_difference),
    "bucketed": ("score", bucketed),
    "softcap": ("score", mods.softcap(0.7)),
    "by head": ("score", lambda score, b, h, q_idx, kv_idx: BIAS[h, 3] * score),
    "squared": ("score", lambda score, b, h, q_idx, kv_idx: score * score),
    "reciprocal": ("score", lambda score, b, h, q_idx, kv_idx: 3.0 / score),
    "both": ("score", lambda score, b, h, q_idx, kv_idx: torch.tanh(score * 2.0) + score),
    "itself": ("score", lambda score, b, h, q_idx, kv_idx: score),
    "dilated": ("mask", dilated),
    "many rows": ("mask", many_rows),
    "documents": ("mask", masks.document(IDS)),
    "conditions": ("mask", conditions),
}
APART = [  # (mod, columns, results of rows, of columns, loads that are left to pairs)
    ("alibi", "kv_idx", 2, 1, 0),
    ("alibi", "q_idx", 2, 1, 0),
    ("bias", "kv_idx", 0, 1, 0),
    ("bias", "q_idx", 1, 0, 0),
    ("both ways", "kv_idx", 1, 2, 1),
    ("documents", "q_idx", 1, 1, 0),
    ("conditions", "kv_idx", 2, 4, 0),
    ("many rows", "kv_idx", 1, 0, 2),
]
_KERNEL = """import runpy
import triton
import triton as gluon
import triton.language as gl
import triton.language as tl


@triton.jit
def difference(corner, block, SIGN, DTYPE):  # of the whole tile at once
    return corner.to(DTYPE)


@triton.jit
def along_diagonals(found, NUMBER, q_idx, kv_idx):
    return found[0][NUMBER]


@triton.jit
def spread(value, like):
    return value[None, :]


@triton.jit
def near(rows, columns, corner):
    return rows - 7, columns - 7


truth = runpy.run_path({machine!r})["truth"]


{functions}


{function}

@triton.jit
def kernel(OUT, {parameters}Q: tl.constexpr, KV: tl.constexpr):
    q_idx, kv_idx = tl.arange(0, Q), tl.arange(0, KV)
    across = {columns}
    place = {place}
    of_rows = {kind}_rows(0, 1, {row}{passed})
    of_columns = {kind}_columns(0, 1, across{passed})
    value = {kind}_mod({score}0, 1, {indices}, of_rows, of_columns, {corner}{scale}{passed})
    tl.store(OUT + place, tl.broadcast_to(value, place.shape).to(OUT.dtype.element_ty))
"""


def traced(name):
    kind, mod = MODS[name]
    return specialize(flexmod.trace(mod, kind), EXTENTS)


@pytest.mark.parametrize(("name", "columns", "rows", "across", "loads"), APART)
def test_what_costs_is_computed_apart(name, columns, rows, across, loads):
    parts = split(traced(name), columns)
    row = "q_idx" if columns == "kv_idx" else "kv_idx"
    assert len(parts.rows.outputs) == rows and parts.rows.reads <= {row, "b", "h"}
    assert len(parts.columns.outputs) == across and parts.columns.reads <= {columns, "b", "h"}
    assert sum(line.op == "load" for line in parts.pairs.instructions) == loads


ALONG = [  # (mod, values that are computed along diagonals)
    ("by difference", 2),
    ("bucketed", 1),
    ("dilated", 1),
    ("alibi", 0),
    ("bias", 0),
    ("both ways", 0),
]


@pytest.mark.parametrize(("name", "count"), ALONG)
def test_what_depends_on_the_difference_alone_is_computed_along_diagonals(name, count):
    inner, outer = diagonals.split(traced(name))
    assert (len(inner.outputs) if inner else 0) == count
    assert any(line.op == "load" for line in outer.instructions) == (count == 0)


FOLDED = ["softcap", "by head"]  # their scores are only multiplied, by a number a head
PRODUCTS = [*FOLDED, "squared", "reciprocal", "both", "itself", "bias", "both ways", "of columns"]


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_scale_joins_a_number_of_the_head(name):
    program = traced(name)
    found = of_products(program)
    readers = [line for line in found.instructions if 0 in line.args]
    if "score" not in program.reads:
        assert found is program
        return
    assert found.instructions[0].attr == SCALE and len(readers) == 1
    meets_score = any(found.instructions[a].attr == "score" for a in readers[0].args)
    assert meets_score == (name not in FOLDED)


def test_a_table_that_may_be_too_short_is_read_pair_by_pair():
    short = OFFSETS[:, :40]

    def mod(score, b, h, q_idx, kv_idx):
        return score + short[h, kv_idx - q_idx + 20]

    assert diagonals.split(specialize(flexmod.trace(mod), EXTENTS))[0] is None


def test_cheap_arithmetic_stays_with_the_pairs():
    causal = specialize(flexmod.trace(masks.causal(), "mask"), EXTENTS)
    parts = split(causal, "kv_idx")
    assert parts.pairs.instructions == causal.instructions
    assert not parts.rows.instructions and not parts.columns.instructions


def test_what_is_absent_has_the_same_functions():
    found = traced("alibi")
    for columns in ("", "kv_idx"):
        whole, nothing = emit(found, "x_", columns=columns), absent("score", columns)
        assert not nothing.parameters
        names = [text.count(f"def score_{n}(") for text in (whole.text, nothing.text)
                 for n in ("mod", "rows", "columns")]  # fmt: skip
        assert names == ([1, 1, 1] if columns else [1, 0, 0]) * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where a GPU is")
@pytest.mark.parametrize("columns", ["kv_idx", "q_idx"])
@pytest.mark.parametrize("name", MODS)
def test_values_are_those_of_the_mod(name, columns, tmp_path):
    program = traced(name)
    at = {"b": torch.tensor(0), "h": torch.tensor(1), "score": torch.tensor(0.5)}
    q_idx, kv_idx = torch.arange(Q_LEN)[:, None], torch.arange(KV_LEN)[None, :]
    found = evaluate(program, {**at, "q_idx": q_idx, "kv_idx": kv_idx})
    expected = found.values[0].expand(Q_LEN, KV_LEN)
    if found.invalid is not None:
        expected = torch.where(found.invalid > 0, torch.nan, expected)
    assert bool(expected.isnan().any()) == (name == "past the ends")
    actual = run(program, columns, expected.dtype, tmp_path)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


def run(program, columns, dtype, folder):
    """The values of a mod's text for Gluon in head 1, from a plain kernel: [Q_LEN, KV_LEN]."""
    function = emit(program, "x_", columns=columns)
    is_score = program.kind == "score"  # of a product of 2 with a scale of 0.25
    across = columns == "kv_idx"  # else a tile is transposed, as in the backward kernel
    indices = "q_idx[:, None], kv_idx[None, :]" if across else "q_idx[None, :], kv_idx[:, None]"
    path = folder / "module.py"  # Triton reads the source of its functions
    path.write_text(
        _KERNEL.format(
            machine=str(Path(__file__).parent / "machine.py"),
            functions=device_functions(function.text),
            function=function.text,
            parameters="".join(f"{name}, " for name, _ in function.parameters),
            columns=columns,
            row="q_idx[:, None]" if across else "kv_idx[:, None]",
            place="q_idx[:, None] * KV + kv_idx[None, :]" if across
            else "q_idx[None, :] * KV + kv_idx[:, None]",
            kind=program.kind,
            score="2.0, " if is_score else "",
            scale=", 0.25" if is_score else "",
            indices=indices,
            corner="kv_idx[None, :] - q_idx[:, None]" if across
            else "kv_idx[:, None] - q_idx[None, :]",
            passed="".join(f", {name}" for name, _ in function.parameters),
        )
    )  # fmt: skip
    spec = importlib.util.spec_from_file_location("module_under_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    out = torch.empty(Q_LEN, KV_LEN, dtype=torch.int8 if dtype == torch.bool else dtype)
    tensors = map(readable, program.captures)
    module.kernel[(1,)](out, *tensors, *values(program), Q=Q_LEN, KV=KV_LEN)
    return (out != 0) if dtype == torch.bool else out
