"""`patch_torch`: whoever has torch's functions, by whatever way, calls flexmod's; and back."""

from __future__ import annotations

import functools
import inspect
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.attention.flex_attention as theirs
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import flexmod
from flexmod import masks, mods
from flexmod.testing import assert_matches, naive

held = functools.partial(flex_attention, scale=0.25)
CAUSAL = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx


@pytest.fixture
def qkv():
    return [torch.randn(1, 2, 20, 8).requires_grad_() for _ in range(3)]


@pytest.fixture
def importer(monkeypatch):
    """Another module, which imported torch's names before the patch."""
    module = ModuleType("somebody_elses_module")
    exec("from torch.nn.attention.flex_attention import *", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def trains(call, qkv, **named):
    """It runs with gradients on a CPU, which torch's refuses, and is right."""
    out = call(*qkv, **named)
    out.sum().backward()
    return out


def test_every_way_to_torchs_function(qkv, importer):
    wanted = naive(*qkv, None, CAUSAL, 0.25)[0]
    before = importer.BlockMask
    with flexmod.patch_torch():
        made = create_block_mask(CAUSAL, None, None, 20, 20, device="cpu")
        assert isinstance(made, flexmod.BlockMask) and isinstance(made, importer.BlockMask)
        for call in (theirs.flex_attention, flex_attention, importer.flex_attention):
            assert_matches(trains(call, qkv, block_mask=made, scale=0.25), wanted)
        assert_matches(trains(held, qkv, block_mask=made), wanted)
        assert theirs.create_mask(CAUSAL, 1, 1, 4, 4, device="cpu").sum() == 10
        _, aux = flex_attention(*qkv, return_aux=theirs.AuxRequest(lse=True))
        assert aux.lse.shape == (1, 2, 20) and aux.max_scores is None
    assert importer.BlockMask is theirs.BlockMask is before
    assert type(create_block_mask(CAUSAL, 1, 1, 128, 128, device="cpu")) is before


def test_compiled_before_the_patch(qkv):
    compiled = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    with flexmod.patch_torch():
        out = trains(compiled, qkv, score_mod=mods.softcap(3.0))
    assert_matches(out, naive(*qkv, mods.softcap(3.0))[0])


def test_a_call_without_with_nested_and_undone(qkv):
    signature = inspect.signature(flex_attention)
    outer = flexmod.patch_torch()
    with flexmod.patch_torch():
        trains(flex_attention, qkv)
    trains(flex_attention, qkv, sink=torch.zeros(2))
    outer.undo()
    outer.undo()
    assert inspect.signature(flex_attention) == signature
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        flex_attention(*qkv)


def test_maps_of_torch_made_before_the_patch(qkv):
    made = create_block_mask(masks.causal(), None, None, 20, 20, device="cpu", BLOCK_SIZE=8)
    with flexmod.patch_torch():
        out = trains(flex_attention, qkv, block_mask=made)
    assert_matches(out, naive(*qkv, None, CAUSAL)[0])


def test_an_error_inside_undoes_it():
    code = flex_attention.__code__
    with pytest.raises(KeyError), flexmod.patch_torch():
        raise KeyError("somebody's")
    assert flex_attention.__code__ is code
