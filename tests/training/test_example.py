"""examples/train_tiny_lm.py learns: a few steps of it, in this process."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_tiny_lm.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_tiny_lm", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_loss_goes_down(example, capsys, tmp_path):
    picture = tmp_path / "loss.png"
    example.main(["--steps", "12", "--length", "256", "--picture", str(picture)])
    shown = capsys.readouterr().out
    losses = [float(x) for x in re.findall(r"^step +\d+  loss (\S+)  █+$", shown, re.M)]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 1.0
    before, after = map(float, re.search(r"held-out loss (\S+) -> (\S+) nats", shown).groups())
    assert after < before - 1.0
    if importlib.util.find_spec("matplotlib") is None:
        assert "no picture: matplotlib is not installed" in shown
    else:
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_every_parameter_learns_and_excerpts_do_not_see_each_other(example):
    torch.manual_seed(0)
    model = example.Model()
    row = example.pack(torch.randint(256, (4096,)), 256, torch.Generator().manual_seed(0))
    example.loss_of(model, row).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    tokens, _, ids = row
    changed = tokens.clone()
    changed[ids == 1] = 0
    with torch.no_grad():
        same = model(tokens, ids) == model(changed, ids)
    assert same[ids != 1].all() and not same[ids == 1].all()
