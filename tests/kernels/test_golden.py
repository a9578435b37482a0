"""Rendered kernels are kept as text: a change of them is seen, and meant.

`pytest tests/kernels/test_golden.py --refresh-golden` writes them anew.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import runpy
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

import flexmod
from flexmod.attention import make_problem
from flexmod.autograd import with_gradient
from flexmod.kernels import compile as kernels
from flexmod.kernels.problem import Inputs, Saved
from flexmod.kernels.tuning import Target

pytest.importorskip("triton")

GOLDEN = Path(__file__).parents[1] / "golden"
MODS = runpy.run_path(str(Path(__file__).parent / "kernel_mods.py"))["MODS"]
TARGET = Target("sm_90", 227 << 10)
TRAINED = ("none", "alibi_causal", "relative_bias", "softcap_causal")
HOPPER = ("softcap_causal",)
FILES = [
    *(f"forward_{name}" for name in MODS),
    *(f"backward_{name}" for name in TRAINED),
    *(f"hopper_{direction}_{name}" for name in HOPPER for direction in ("forward", "backward")),
    "hopper_backward_relative_bias",
]


@pytest.fixture
def rendered(monkeypatch):
    """`rendered(file)`: the text that the engine would compile for a GPU, without compiling it."""
    found = []

    def load(signature, render, fields, toolchain):
        found.append(render())
        return MagicMock()

    monkeypatch.setattr(kernels, "load", load)

    def text(file):
        engine = "hopper" if file.startswith("hopper_") else "fa2"
        direction, _, name = file.removeprefix("hopper_").partition("_")
        found.clear()
        {"forward": forward, "backward": backward}[direction](engine, *MODS[name]())
        assert len(set(found)) == 1
        return found[0]

    return text


def problem_of(score_mod, mask_mod):
    inputs = Inputs(*(torch.zeros(1, 2, 1024, 64, dtype=torch.bfloat16) for _ in range(3)))
    score = flexmod.trace(score_mod, "score") if score_mod else None
    return make_problem(inputs, score, mask_mod), inputs, score


def forward(engine, score_mod, mask_mod):
    module = importlib.import_module(f"flexmod.kernels.{engine}.forward")
    problem, inputs, _ = problem_of(score_mod, mask_mod)
    module.Forward(problem, inputs, TARGET)


def backward(engine, score_mod, mask_mod):
    from flexmod.kernels.fa2 import sums

    module = importlib.import_module(f"flexmod.kernels.{engine}.backward")
    problem, inputs, score = problem_of(score_mod, mask_mod)
    if score is not None:
        floats = frozenset(n for n, c in enumerate(score.captures) if c.is_floating_point())
        problem = with_gradient(problem, score, floats)
    saved = Saved(inputs.query, torch.zeros(1, 2, 1024), inputs.query, None)
    plan = () if engine == "hopper" else (sums.plan(problem),)
    module.Backward(problem, inputs, saved, *plan, TARGET)


@pytest.mark.parametrize("file", FILES)
def test_rendered_kernels_are_the_kept_ones(file, rendered, request):
    text, path = rendered(file), GOLDEN / f"{file}.txt"
    if request.config.getoption("--refresh-golden"):
        path.write_text(text)
        return
    assert path.exists(), f"{path.name} is missing: run with --refresh-golden and look at it"
    kept = path.read_text()
    change = difflib.unified_diff(kept.splitlines(), text.splitlines(), "kept", "rendered", n=1)
    assert text == kept, "\n".join([*change, "if this is meant: --refresh-golden"])


@pytest.mark.parametrize("file", FILES)
def test_rendered_kernels_read_as_python(file, rendered):
    text = rendered(file)
    functions = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    assert len(functions) == len(set(functions))  # none hides another
    assert "{{" not in text and "{%" not in text and "\n\n\n\n" not in text
    assert not [line for line in text.splitlines() if line != line.rstrip()]
    assert text.endswith("\n") and not text.endswith("\n\n")


def test_no_kept_kernel_is_left_over():
    assert sorted(path.stem for path in GOLDEN.glob("*.txt")) == sorted(FILES)


def test_a_text_depends_on_the_structure_alone(rendered):
    """Other numbers and other contents of tables: the same text."""
    first = rendered("forward_alibi_causal")
    MODS["other slopes"] = lambda: (flexmod.mods.alibi([0.3, 0.7]), flexmod.masks.causal())
    assert rendered("forward_other slopes") == first
    del MODS["other slopes"]
