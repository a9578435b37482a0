"""A mask function given to a call: its map is made once, unless it could have changed."""

from __future__ import annotations

import pytest
import torch

import flexmod
from flexmod.blocks import block_mask, memory
from flexmod.testing import assert_matches, naive


@pytest.fixture
def made(monkeypatch):
    """The masks for which blocks were decided."""
    memory._memory.clear()
    names, classify = [], block_mask.classify

    def spy(program, *others):
        names.append(program.name)
        return classify(program, *others)

    monkeypatch.setattr(block_mask, "classify", spy)
    return names


def _attend(mask_mod, length=200):
    q, k, v = torch.randn(3, 1, 2, length, 16, generator=torch.Generator().manual_seed(0))
    out = flexmod.flex_attention(q, k, v, block_mask=mask_mod)
    assert_matches(out, naive(q, k, v, mask_mod=mask_mod)[0])


def _window(reach):
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < reach)


def test_equal_functions_share_a_map(made):
    for _ in range(2):
        _attend(_window(30))
    assert len(made) == 1


def test_whatever_differs_makes_another(made):
    _attend(_window(30))
    _attend(_window(31))
    _attend(_window(30), length=180)
    _attend(lambda b, h, q_idx, kv_idx: (q_idx <= kv_idx) & (q_idx - kv_idx < 30))
    assert len(made) == 4
    for sign in (0.0, -0.0):
        _attend(lambda b, h, q_idx, kv_idx, s=sign: 1.0 / (s * (q_idx + 1.0)) > 0)


def test_captured_tensors_are_never_remembered(made):
    limit = torch.tensor([50])
    mask_mod = lambda b, h, q_idx, kv_idx: kv_idx < limit[b]
    for value in (50, 7):
        limit[0] = value
        _attend(mask_mod)
    assert len(made) == 2


def test_few_are_kept(made):
    for reach in range(memory._KEPT + 3):
        _attend(_window(reach + 1), length=8)
    assert len(memory._memory) == memory._KEPT
    _attend(_window(1), length=8)
    assert len(made) == memory._KEPT + 4


def test_a_map_of_inference_mode_trains(made):
    q = torch.randn(1, 1, 64, 16, requires_grad=True)
    with torch.inference_mode():
        flexmod.flex_attention(q, q, q, block_mask=_window(9))
    flexmod.flex_attention(q, q, q, block_mask=_window(9)).sum().backward()
    assert len(made) == 1 and q.grad.isfinite().all()
