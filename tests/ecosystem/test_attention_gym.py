"""attention-gym's masks and mods run as they are: each public one, against the float64 reference.

docs/attention-gym.md lists them; FLEXMOD_REFRESH_DOCS=1 writes its tables anew.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import runpy
from pathlib import Path

import pytest
import torch

import flexmod
from flexmod.blocks.foreign import from_torch
from flexmod.testing import assert_matches, naive, visible

gym = pytest.importorskip("attn_gym", reason="attention-gym is not installed: pip install attn-gym")

CATALOGUE = runpy.run_path(str(Path(__file__).parent / "gym_cases.py"))
CASES, HELPERS = CATALOGUE["CASES"], CATALOGUE["HELPERS"]
PAGE = Path(__file__).parents[2] / "docs" / "attention-gym.md"


def public(package: str) -> dict[str, object]:
    """Public functions and classes that the modules of a package define, but their demos."""
    modules = pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}.")
    return {
        name: value
        for module in (importlib.import_module(m.name) for m in modules)
        for name, value in vars(module).items()
        if (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
        and not name.startswith("_")
        and name != "main"
    }


PUBLIC = {kind: public(f"attn_gym.{kind}") for kind in ("masks", "mods")}


def test_every_public_name_is_tried_or_has_a_reason():
    names = {name for found in PUBLIC.values() for name in found}
    assert not set(CASES) & set(HELPERS)
    assert names == set(CASES) | set(HELPERS)


def inputs(lane, case):
    batch, heads, q_len, kv_len = case.shape
    return lane.qkv((batch, heads, q_len, 16), (batch, heads, kv_len, 16))


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_on_cpu(name, lanes, check_gradients):
    lane = lanes("cpu", torch.float64)
    case = CASES[name](lane.device)
    learned = [x.double() for x in case.learned]
    found = check_gradients(
        lane, [*inputs(lane, case), *learned], case.score, case.mask, block_mask=case.block_mask
    )
    assert all(found[f"learned {n}"].any() for n in range(len(learned)))


@pytest.mark.parametrize("name", CASES)
def test_results_of_the_kernel(name, lanes):
    lane = lanes("fa2", torch.float32)
    case = CASES[name](lane.device)
    query, key, value = inputs(lane, case)
    score_mod = case.score(*case.learned) if case.score else None
    block_mask = case.mask if case.block_mask is None else case.block_mask
    out, lse = flexmod.flex_attention(
        query, key, value, score_mod, block_mask, return_lse=True, backend="fa2"
    )
    expected = naive(query, key, value, score_mod, case.mask)
    assert_matches(out, expected[0])
    assert_matches(lse, expected[1])


@pytest.mark.parametrize("name", [n for n in PUBLIC["masks"] if n in CASES])
def test_maps_are_right(name):
    case = CASES[name](torch.device("cpu"))
    if case.block_mask is not None:
        dense = from_torch(case.block_mask).dense()
        assert torch.equal(dense.expand(case.shape), visible(case.mask, *case.shape))
        return
    made = flexmod.create_block_mask(case.mask, *case.shape, BLOCK_SIZE=16)
    flexmod.testing.check_block_mask(made, case.mask)


def test_an_activation_in_the_place_of_softmax():
    from attn_gym.mods import generate_activation_score_mod, undo_softmax

    query, key, value = torch.randn(3, 1, 2, 70, 16, dtype=torch.float64)
    score_mod = generate_activation_score_mod(torch.relu, 0.5)
    out, lse = flexmod.flex_attention(query, key, value, score_mod, return_lse=True)
    scores = query @ key.mT / 4
    found = undo_softmax(out, lse, value.sum(-2, keepdim=True), 0.5)
    torch.testing.assert_close(found, torch.relu(scores) @ value)
    assert not torch.allclose(found, naive(query, key, value)[0])


def tables() -> str:
    parts = []
    for kind, names in PUBLIC.items():
        rows = [f"| `attn_gym.{kind}` | |", "|---|---|"]
        rows += [f"| `{n}` | {'pass' if n in CASES else f'not applicable: {HELPERS[n]}'} |"
                 for n in sorted(names, key=str.lower)]  # fmt: skip
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def test_the_page_lists_them():
    text = PAGE.read_text(encoding="utf-8")
    head = text[: text.index("| `attn_gym.")]
    if os.environ.get("FLEXMOD_REFRESH_DOCS") == "1":
        PAGE.write_text(head + tables(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == head + tables()
