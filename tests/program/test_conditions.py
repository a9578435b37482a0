"""Comparisons as the forward of the hopper engine spells them: the text, run by Python."""

from __future__ import annotations

import operator
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flexmod
from flexmod import masks
from flexmod.program.emit import emit, values
from flexmod.program.evaluate import evaluate, on_grid
from flexmod.program.specialize import specialize

LENGTH = 24
IDS = torch.arange(LENGTH) // 5
LARGE = torch.where(IDS % 2 == 0, IDS, IDS + (1 << 40))  # alike in their lower 32 bits
ROWS, COLUMNS = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None, :]
TRUTH = runpy.run_path(str(Path(__file__).parent / "machine.py"))["truth"]
ATOMS = {
    "causal": lambda b, h, q, k: q >= k,
    "before": lambda b, h, q, k: k < q,
    "near": lambda b, h, q, k: q - k < 7,
    "apart": lambda b, h, q, k: k - q != 3,
    "prefix": lambda b, h, q, k: k < 5,
    "ids": lambda b, h, q, k: IDS.int()[q] == IDS.int()[k],
    "large": lambda b, h, q, k: LARGE[q] == LARGE[k],
    "even": lambda b, h, q, k: (q + k) % 2 == 0,
    "head": lambda b, h, q, k: h < 1,
}


def run(program):
    """A mask on all pairs by its text for tiles whose columns are keys."""
    function = emit(program, "m_", columns="kv_idx")
    stand_ins = {
        "triton": SimpleNamespace(jit=lambda f: f),
        "gluon": SimpleNamespace(jit=lambda f: f),
        "tl": SimpleNamespace(
            load=lambda at: at.tensor[at.index], cast=lambda x, _: torch.as_tensor(x),
            int32=None, int64=None,
        ),
        "spread": lambda found, like: found,
        "near": lambda rows, columns, corner: (rows - 4, columns - 4),
        "truth": TRUTH,
    }  # fmt: skip
    exec(function.text, stand_ins)
    tensors = [Place(c, 0) for c in program.captures]
    given = [*tensors, *values(program)]
    found = torch.zeros(2, LENGTH, LENGTH, dtype=torch.bool)
    for h in range(2):
        head = torch.tensor(h)
        of_rows = stand_ins["mask_rows"](0, head, ROWS, *given)
        of_columns = stand_ins["mask_columns"](0, head, COLUMNS, *given)
        found[h] = stand_ins["mask_mod"](0, head, ROWS, COLUMNS, of_rows, of_columns, (0,), *given)
    return found, function.text


class Place:
    """A pointer into a tensor of one axis."""

    def __init__(self, tensor, index):
        self.tensor, self.index = tensor, index

    def __add__(self, index):
        return Place(self.tensor, self.index + index)


def traced(mask_mod):
    extents = {"b": 1, "h": 2, "q_idx": LENGTH, "kv_idx": LENGTH}
    return specialize(flexmod.trace(mask_mod, "mask"), extents)


def expected(program):
    index = [torch.arange(n) for n in (1, 2, LENGTH, LENGTH)]
    (visible,), _ = evaluate(program, on_grid(*index))
    return visible.expand(1, 2, LENGTH, LENGTH)[0]


TREES = st.recursive(
    st.sampled_from([*ATOMS]),
    lambda inner: st.tuples(st.sampled_from(["and", "or"]), inner, inner),
    max_leaves=9,
)


def built(tree):
    if isinstance(tree, str):
        return ATOMS[tree]
    join = {"and": operator.and_, "or": operator.or_}[tree[0]]
    one, other = map(built, tree[1:])
    return lambda *index: join(one(*index), other(*index))


@settings(deadline=None, max_examples=150)
@given(tree=TREES)
def test_a_mask_means_what_it_says(tree):
    program = traced(built(tree))
    found, _ = run(program)
    assert torch.equal(found, expected(program))


PACKED = masks.and_masks(masks.causal(), masks.document(IDS))


@pytest.mark.parametrize(
    ("mask_mod", "is_chain", "reads_near"),
    [
        (masks.causal(), False, True),
        (PACKED, True, True),
        (masks.sliding_window(5), True, False),
        (masks.and_masks(PACKED, masks.sliding_window(5)), True, False),
        (lambda b, h, q, k: ((q >= k) | (k < 3)) & ((q < 9) | (k > 4)), False, False),
    ],
)
def test_what_is_spelled_for_the_machine(mask_mod, is_chain, reads_near):
    program = traced(mask_mod)
    found, text = run(program)
    assert torch.equal(found, expected(program))
    result = text.rsplit("return ", 1)[1].strip()
    assert (f"{result} = truth(" in text) == is_chain
    assert ("near(" in text) == reads_near
