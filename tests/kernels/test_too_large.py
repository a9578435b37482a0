"""A device that has no room for what was planned gets smaller tiles; nobody sees Triton's error."""

from __future__ import annotations

import logging

import pytest
import torch

import flexmod
from flexmod import masks, mods
from flexmod.attention import make_problem
from flexmod.errors import BackendError
from flexmod.kernels import choose, tuning
from flexmod.kernels.problem import Inputs

pytest.importorskip("triton")
LENGTH = 40


@pytest.fixture
def room(monkeypatch):
    """A function that says how many elements a score tile may have; what was refused and run."""
    from triton.runtime.errors import OutOfResources

    from flexmod.kernels.launch import Launch

    monkeypatch.setattr(tuning, "_refused", {})
    tuning._plan.cache_clear()
    flexmod.cache.clear_memory()
    first, refused, ran = Launch._first, [], []
    limit = {}

    def limited(launch, tensors, words):
        size = launch.tiles.q * launch.tiles.kv
        if size > limit["elements"]:
            refused.append((launch.name, launch.tiles))
            raise OutOfResources(size, limit["elements"], "shared memory")
        ran.append((launch.name, launch.tiles))
        first(launch, tensors, words)

    def allow(elements):
        limit["elements"] = elements
        return refused, ran

    monkeypatch.setattr(Launch, "_first", limited)
    yield allow
    tuning._plan.cache_clear()
    flexmod.cache.clear_memory()


def attend(lane, query, key, value, **others):
    return flexmod.flex_attention(
        query, key, value, mods.softcap(5.0), masks.causal(), backend=lane, **others
    )


def inputs():
    return [torch.randn(1, 1, LENGTH, 16, requires_grad=True) for _ in range(3)]


def test_smaller_tiles_are_tried_until_they_fit(room):
    refused, ran = room(16 * 32)
    tensors = inputs()
    expected = attend("reference", *tensors)
    d_out = torch.randn_like(expected)
    exact = torch.autograd.grad(expected, tensors, d_out)
    for call in range(2):
        found = attend("fa2", *tensors)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        gradients = torch.autograd.grad(found, tensors, d_out)
        for got, right in zip(gradients, exact, strict=True):
            torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)
        if call == 0:
            assert {name for name, _ in refused} == {"forward", "backward_query", "backward_key"}
            assert len(set(refused)) == len(refused), "no tiles are tried twice"
            refused.clear()
    assert refused == [], "what a device refused is remembered"
    assert all(tiles.q * tiles.kv <= 16 * 32 for _, tiles in ran)


def test_without_any_tiles_that_fit_the_cpu_engine_serves_with_one_warning(
    room, monkeypatch, caplog
):
    refused, _ = room(0)
    monkeypatch.setattr(choose, "_warned", set())
    # As on a GPU: fa2 is chosen, not forced.
    fa2_first = lambda problem, wanted=None: choose.Choice("fa2", False)
    monkeypatch.setattr(choose, "choose", fa2_first)
    tensors = inputs()
    with caplog.at_level(logging.WARNING, "flexmod"):
        found = [attend(None, *tensors) for _ in range(2)]
    expected = flexmod.flex_attention(*tensors, mods.softcap(5.0), masks.causal(), backend="cpu")
    assert refused and all(torch.equal(x, expected) for x in found)
    (record,) = caplog.records
    assert "using the slower cpu engine instead" in record.getMessage()
    assert "KiB of shared memory" in record.getMessage()


def test_a_forced_engine_says_so(room):
    room(0)
    with pytest.raises(BackendError, match=r"fa2 .*no tile of head_dim 16") as caught:
        attend("fa2", *inputs())
    assert "OutOfResources" not in str(caught.value)


def test_an_engine_that_cannot_build_hands_on_to_the_next(monkeypatch, caplog):
    class Broken:
        def __init__(self, name):
            self.name = name

        def forward(self, problem, inputs):
            raise BackendError(f"{self.name} cannot be built")

    real = choose.backend
    fake = {"hopper": Broken("hopper"), "fa2": Broken("fa2")}
    monkeypatch.setattr(choose, "backend", lambda name: fake.get(name) or real(name))
    monkeypatch.setattr(choose, "_warned", set())
    tensors = Inputs(*(x.detach() for x in inputs()))
    problem = make_problem(tensors, None, None)
    with caplog.at_level(logging.WARNING, "flexmod"):
        found = choose.forward(problem, tensors, choose.Choice("hopper", False))
    assert torch.equal(found.out, real("cpu").forward(problem, tensors).out)
    assert [record.getMessage() for record in caplog.records] == [
        "hopper cannot be built; using the slower fa2 engine instead",
        "fa2 cannot be built; using the slower cpu engine instead",
    ]
    with pytest.raises(BackendError, match="hopper cannot be built"):
        choose.forward(problem, tensors, choose.Choice("hopper", True))
