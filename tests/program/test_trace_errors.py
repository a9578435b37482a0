"""A mod that cannot be traced is told so: where, what, and what to write instead."""

from __future__ import annotations

import functools
import inspect
import math

import pytest
import torch

import flexmod
from flexmod import TraceError

TABLE, IDS, COMPLEX = torch.randn(8, 8), torch.arange(8), torch.zeros(8, dtype=torch.complex64)
SMALL = torch.arange(8, dtype=torch.int32)
COUNTS = {"calls": 0}


def branch(score, b, h, q_idx, kv_idx):
    if q_idx > kv_idx:
        return score
    return -score


def logical_and(b, h, q_idx, kv_idx):
    return q_idx > kv_idx and kv_idx > 3


def logical_or(b, h, q_idx, kv_idx):
    return q_idx > kv_idx or kv_idx > 3


def logical_not(b, h, q_idx, kv_idx):
    return not q_idx > kv_idx


def chained(b, h, q_idx, kv_idx):
    return 0 < q_idx - kv_idx < 5


def ternary(score, b, h, q_idx, kv_idx):
    return score if h == 0 else score * 2


def loop(score, b, h, q_idx, kv_idx):
    for _ in range(q_idx):
        score = score + 1
    return score


def in_place(score, b, h, q_idx, kv_idx):
    TABLE[0, 0] = 1.0
    return score


def in_place_by_index(score, b, h, q_idx, kv_idx):
    TABLE[q_idx, 0] = 1.0
    return score


def in_place_by_value(score, b, h, q_idx, kv_idx):
    TABLE[0, 0] = score
    return score


def in_place_method(score, b, h, q_idx, kv_idx):
    TABLE.add_(1)
    return score


def in_place_operator(score, b, h, q_idx, kv_idx):
    table = TABLE
    table += 1
    return score


def in_place_view(score, b, h, q_idx, kv_idx):
    TABLE[q_idx].add_(1)
    return score


def assertion(score, b, h, q_idx, kv_idx):
    assert q_idx >= 0
    return score


def nothing(score, b, h, q_idx, kv_idx):
    score + 1


def pair(score, b, h, q_idx, kv_idx):
    return score, q_idx


def raises(score, b, h, q_idx, kv_idx):
    return score + COUNTS["missing"]


def helper(x):
    return math.exp(x)


def through_a_helper(score, b, h, q_idx, kv_idx):
    return score + helper(q_idx)


# A mod, the expression that the text must show, and a part of the hint.
MODS = {
    "if": (branch, "q_idx > kv_idx", "torch.where"),
    "and": (logical_and, "q_idx > kv_idx", "&"),
    "or": (logical_or, "q_idx > kv_idx", "|"),
    "not": (logical_not, "q_idx > kv_idx", "~"),
    "chained comparison": (chained, "0 < q_idx - kv_idx < 5", "(a < b) & (b < c)"),
    "ternary": (ternary, "h == 0", "torch.where"),
    "min": (lambda s, b, h, q, k: s + min(q, k), "min(q, k)", "torch.minimum"),
    "max": (lambda s, b, h, q, k: s + max(q, 3), "max(q, 3)", "torch.maximum"),
    "any of a list": (lambda b, h, q, k: any([q > k, q < 3]), "any(", "&"),
    "assert": (assertion, "q_idx >= 0", "torch.where"),
    "range": (loop, "range(q_idx)", "no Python value"),
    "math": (lambda s, b, h, q, k: s * math.exp(q), "math.exp(q)", "torch functions"),
    "math.sqrt": (lambda s, b, h, q, k: math.sqrt(s), "math.sqrt(s)", "torch functions"),
    "a helper": (through_a_helper, "math.exp(x)", "torch functions"),
    "item": (lambda s, b, h, q, k: s + q.item(), "q.item", "compute with it as a tensor"),
    "tolist": (lambda s, b, h, q, k: s + q.tolist(), "q.tolist", "tensor"),
    "float": (lambda s, b, h, q, k: s + float(q), "float(q)", "torch functions"),
    "int": (lambda s, b, h, q, k: s + int(q), "int(q)", ".long()"),
    "complex": (lambda s, b, h, q, k: complex(s), "complex(s)", "torch functions"),
    "numpy": (lambda s, b, h, q, k: s.numpy(), "s.numpy", "numpy"),
    "f-string format": (lambda s, b, h, q, k: s + len(f"{q:d}"), "{q:d}", "no Python value"),
    "a list index": (lambda s, b, h, q, k: s + [1, 2, 3][q], "[1, 2, 3][q]", "index a tensor"),
    "len": (lambda s, b, h, q, k: s + len(q), "len(q)", "scalar"),
    "iteration": (lambda s, b, h, q, k: sum(q), "sum(q)", "scalar"),
    "rand": (lambda s, b, h, q, k: s + torch.rand(()), "torch.rand(())", "outside"),
    "rand_like": (lambda s, b, h, q, k: s + torch.rand_like(s), "rand_like(s)", "outside"),
    "dropout": (lambda s, b, h, q, k: torch.nn.functional.dropout(s), "dropout(s)", "outside"),
    "bernoulli": (lambda s, b, h, q, k: s * TABLE.bernoulli()[q, k], "bernoulli()", "outside"),
    "uniform_": (lambda s, b, h, q, k: s * torch.empty(8).uniform_()[q], "uniform_()", "outside"),
    "setitem": (in_place, "TABLE[0, 0]", "in place"),
    "setitem by an index": (in_place_by_index, "TABLE[q_idx, 0]", "in place"),
    "setitem of a value": (in_place_by_value, "TABLE[0, 0]", "in place"),
    "add_": (in_place_method, "TABLE.add_(1)", "new"),
    "+=": (in_place_operator, "table += 1", "new"),
    "a view's add_": (in_place_view, "TABLE[q_idx].add_(1)", "new"),
    "inplace=True": (
        lambda s, b, h, q, k: torch.relu_(s) + torch.nn.functional.silu(s, inplace=True),
        "inplace=True", "leave it out",
    ),
    "None": (nothing, "", "return"),
    "a tuple": (pair, "", "one traced scalar"),
    "a string": (lambda s, b, h, q, k: "high", "", "one traced scalar"),
    "a whole table": (lambda s, b, h, q, k: TABLE, "", "scalar"),
    "a table's row": (lambda s, b, h, q, k: TABLE[q], "", "scalar"),
    "an unindexed table": (lambda s, b, h, q, k: s + TABLE, "s + TABLE", "index it"),
    "a score from a mask": (lambda b, h, q, k: q - k, "", "bool"),
    "a float mask": (lambda b, h, q, k: (q > k).float(), "", "comparison"),
    "an unknown op": (lambda s, b, h, q, k: torch.digamma(s), "torch.digamma(s)", "not supported"),
    "a misspelt method": (lambda s, b, h, q, k: s.tahn(), "s.tahn", "tanh"),
    "a near op": (lambda s, b, h, q, k: torch.asinh(s), "torch.asinh(s)", "did you mean"),
    "cumsum": (lambda s, b, h, q, k: torch.cumsum(s, 0), "torch.cumsum(s, 0)", "not supported"),
    "a tensor index": (lambda s, b, h, q, k: s + TABLE[IDS, k].sum(), "TABLE[IDS, k]", "scalars"),
    "a list as index": (lambda s, b, h, q, k: s + TABLE[[0], k].sum(), "TABLE[[0], k]", "scalars"),
    "too many indices": (lambda s, b, h, q, k: s + TABLE[q, k, b], "TABLE[q, k, b]", "3 indices"),
    "an int out of range": (lambda s, b, h, q, k: s + TABLE[q, 8], "TABLE[q, 8]", "out of range"),
    "a negative int out of range": (lambda s, b, h, q, k: s + TABLE[-9, q], "TABLE[-9, q]", "-9"),
    "a float index": (lambda s, b, h, q, k: s + TABLE[q / 2, k], "TABLE[q / 2, k]", ".long()"),
    "a python float index": (lambda s, b, h, q, k: s + TABLE[0.5, k], "TABLE[0.5, k]", "integer"),
    "a bool index": (lambda s, b, h, q, k: s + TABLE[q > k, k], "TABLE[q > k, k]", ".long()"),
    "a string index": (lambda s, b, h, q, k: s + TABLE["a", k], 'TABLE["a", k]', ""),
    "an index of a score": (lambda s, b, h, q, k: s[0], "s[0]", "scalar"),
    "an empty table": (lambda s, b, h, q, k: s + torch.zeros(0)[q], "torch.zeros(0)[q]", "empty"),
    "a complex table": (lambda s, b, h, q, k: s + COMPLEX[q], "COMPLEX[q]", "real dtype"),
    "complex numbers": (lambda s, b, h, q, k: s.to(torch.complex64), "complex64", "complex"),
    "a complex number": (lambda s, b, h, q, k: s + 1j, "s + 1j", "complex"),
    "division by 0": (lambda s, b, h, q, k: s + q // 0, "q // 0", "0"),
    "a number past int32": (lambda b, h, q, k: SMALL[q] + 2**40 > k, "SMALL[q] + 2**40", ".long()"),
    "a limit past int32": (lambda b, h, q, k: SMALL[q] < -(2**31) - 1, "SMALL[q] < ", ".long()"),
    "a number past int64": (lambda b, h, q, k: q < 2**63, "q < 2**63", "int64"),
    "a string operand": (lambda s, b, h, q, k: s + "1", 's + "1"', ""),
    "a None operand": (lambda s, b, h, q, k: s + None, "s + None", ""),
    "a missing argument": (lambda s, b, h, q, k: torch.clamp(), "torch.clamp()", ""),
    "an unknown keyword": (lambda s, b, h, q, k: torch.tanh(s, fast=True), "fast=True", ""),
    "a wrong dot": (lambda s, b, h, q, k: TABLE[q] @ TABLE[0, :3], "TABLE[q] @", "entries"),
    "vectors of two lengths": (
        lambda s, b, h, q, k: s + (TABLE[q] * TABLE[0, :3]).sum(), "TABLE[q] *", "3 and 8 entries",
    ),
    "a matrix": (lambda s, b, h, q, k: s + TABLE[q].unsqueeze(0).sum(), "TABLE[q]", "one axis"),
    "another axis": (lambda s, b, h, q, k: s + q.unsqueeze(1), "q.unsqueeze(1)", "use -1"),
    "an attribute": (lambda s, b, h, q, k: s.shapes, "s.shapes", ""),
    "a data pointer": (lambda s, b, h, q, k: s.data_ptr(), "s.data_ptr", ""),
    "a wrong size": (lambda s, b, h, q, k: s.new_zeros(3), "s.new_zeros(3)", "shape"),
    "the mod's own error": (raises, 'COUNTS["missing"]', "missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODS)
def test_the_text_says_where_what_and_what_instead(name):
    mod, expression, hint = MODS[name]
    with pytest.raises(TraceError) as caught:
        flexmod.trace(mod)
    text = str(caught.value)
    first, last = lines_of(mod)
    assert f"{__file__}:" in text
    line = int(text.split(f"{__file__}:")[1].split(":")[0].split("\n")[0])
    assert line in range(first, last + 1) or mod is through_a_helper
    assert expression in text
    assert hint in text
    assert "flexmod/program" not in text.replace(str(flexmod.__path__[0]), "flexmod")


def lines_of(mod):
    source, first = inspect.getsourcelines(mod)
    return first, first + len(source) - 1


@pytest.mark.parametrize("name", MODS)
def test_flex_attention_raises_the_same(name):
    mod = MODS[name][0]
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(TypeError) as caught:
        if len(inspect.signature(mod).parameters) == 5:
            flexmod.flex_attention(q, q, q, mod)
        else:
            flexmod.create_block_mask(mod, 1, 1, 4, 4)
    assert isinstance(caught.value, TraceError)


ARITIES = {
    "none": lambda: 0,
    "three": lambda a, b, c: a,
    "six": lambda a, b, c, d, e, f: a,
    "a partial of all": functools.partial(lambda s, b, h, q, k: s, 1, 2),
    "a class": COUNTS.get,
}


@pytest.mark.parametrize("name", ARITIES)
def test_a_wrong_number_of_arguments(name):
    with pytest.raises(TraceError, match="positional arguments"):
        flexmod.trace(ARITIES[name])


def test_the_other_kind_of_mod():
    mask, score = (lambda b, h, q, k: q > k), (lambda s, b, h, q, k: s)
    for mod, kind in ((mask, "score"), (score, "mask")):
        with pytest.raises(TraceError, match="positional arguments"):
            flexmod.trace(mod, kind)
        with pytest.raises(TraceError, match="where a"):
            flexmod.trace(flexmod.trace(mod), kind)


@pytest.mark.parametrize("thing", [3, None, "causal", torch.zeros(3)], ids=repr)
def test_what_is_not_callable(thing):
    with pytest.raises(TraceError, match="callable"):
        flexmod.trace(thing)


def test_nothing_is_changed_by_a_refused_mod():
    before = TABLE.clone()
    for mod in (in_place, in_place_by_index, in_place_by_value, in_place_method, in_place_operator):
        with pytest.raises(TraceError):
            flexmod.trace(mod)
    assert torch.equal(TABLE, before)
