"""Launching a compiled kernel directly: once a call, with its arguments in their order.

The kernel and the driver are stand-ins that note what they are given.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from flexmod.errors import BackendError
from flexmod.kernels.launch import Launch
from flexmod.kernels.tuning import Tiles

triton = pytest.importorskip("triton")
TILES = Tiles(64, 64, 4, 2)
FIELDS = {"DESCRIPTORS": False, "TILE_Q": 64}


class Compiled:
    """What Triton's runner returns; called by index it is that runner."""

    function, packed_metadata = 7, "metadata"

    def __init__(self, notes):
        self.notes = notes
        self.run = lambda *arguments: notes.append(("direct", arguments))

    def __getitem__(self, grid):
        return lambda *arguments: self.notes.append(("runner", grid, arguments))


class Kernel:
    arg_names = ("X", "Y", "length", "seed", "DESCRIPTORS", "TILE_Q")

    def __init__(self, notes):
        self.notes = notes

    def __getitem__(self, grid):
        def first(*arguments, **fields):
            self.notes.append(("first", grid, arguments))
            return Compiled(self.notes)

        return first


@pytest.fixture
def notes(monkeypatch):
    importlib.import_module("triton.runtime.driver")
    active = SimpleNamespace(get_current_stream=lambda device: "stream")
    monkeypatch.setattr(
        sys.modules["triton.runtime.driver"], "driver", SimpleNamespace(active=active)
    )
    return []


@pytest.fixture
def module(notes):
    made = ModuleType("kernels")
    made.forward = Kernel(notes)
    return made


def launch(module, length=5, fields=None):
    device = torch.device("cpu")
    return Launch(module, "forward", 3, (length,), fields or FIELDS, TILES, device)


def test_every_run_launches_once(module, notes):
    tensors, made = [torch.zeros(8), torch.ones(8)], launch(module)
    for seed in range(4):
        made.run(tensors, (seed,))
    assert [note[0] for note in notes] == ["first", "direct", "direct", "direct"]
    pointers = [x.data_ptr() for x in tensors]
    metadata = (3, 1, 1, "stream", 7, "metadata", None, None, None)
    assert notes[-1][1] == (*metadata, *pointers, 5, 3, False, 64)


def test_launches_alike_share_what_was_compiled(module, notes):
    tensors = [torch.zeros(8), torch.ones(8)]
    launch(module).run(tensors, (0,))
    launch(module, length=6).run(tensors, (1,))  # launched too, not only found
    assert [note[0] for note in notes] == ["first", "direct"]
    assert notes[-1][1][-4:] == (6, 1, False, 64)


@pytest.mark.parametrize("change", ["alignment", "width", "field"])
def test_what_machine_code_depends_on_is_compiled(change, module, notes):
    tensors = [torch.zeros(8), torch.ones(8)]
    launch(module).run(tensors, (0,))
    if change == "alignment":
        launch(module).run([tensors[0][1:], tensors[1]], (0,))
    elif change == "width":
        launch(module, length=2**40).run(tensors, (0,))
    else:
        launch(module, fields={**FIELDS, "TILE_Q": 32}).run(tensors, (0,))
    assert [note[0] for note in notes] == ["first", "first"]


def test_a_profiler_is_told(module, notes):
    tensors, made = [torch.zeros(8), torch.ones(8)], launch(module)
    made.run(tensors, (0,)), made.run(tensors, (0,))
    hook = triton.knobs.runtime.launch_enter_hook
    listener = lambda metadata: None
    hook.add(listener)
    try:
        made.run(tensors, (0,))
    finally:
        hook.remove(listener)
    made.run(tensors, (0,))
    assert [note[0] for note in notes] == ["first", "direct", "runner", "direct"]


def test_what_triton_raises_is_one_error(module, notes):
    tensors, made = [torch.zeros(8), torch.ones(8)], launch(module)
    made.run(tensors, (0,)), made.run(tensors, (0,))
    with pytest.raises(BackendError, match="could not be built or launched"):
        made.run([None, None], (0,))
