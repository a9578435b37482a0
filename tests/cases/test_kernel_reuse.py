"""Which calls share a kernel, and which must not."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flexmod
from flexmod.testing import assert_matches, naive

SCALES = [0.1, 0.2, 0.3, 0.4, 0.5]


def test_P080_five_scales_one_compile(lane, check, compiles):
    q, k, v = lane.qkv((1, 2, 20, 16))
    before = compiles()
    outs = [check(lane, q, k, v, scale=scale)[0] for scale in SCALES]
    assert compiles() - before <= 1
    assert all(float((a - b).abs().max()) > 1e-3 for a, b in itertools.pairwise(outs))


def test_P080_a_new_body_is_one_compile(compiles):
    def body(s, b, h, i, j):
        return s + torch.cos(i * 3.0) * torch.sin(j * 2.0) - h

    q, k, v = torch.randn(3, 1, 2, 20, 16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (x.to(device) for x in (q, k, v))
    before = compiles()
    for scale in SCALES:
        flexmod.flex_attention(q, k, v, body, scale=scale, backend="fa2")
    assert compiles() - before == 1


BODIES = {
    "minus": "def helper(i, j):\n    return (i - j) * 0.125\n",
    "times": "def helper(i, j):\n    return (i * j + i) * 0.0625  # longer\n",
}
EXPECTED = {
    "minus": lambda s, b, h, i, j: s + (i - j) * 0.125,
    "times": lambda s, b, h, i, j: s + (i * j + i) * 0.0625,
}


@pytest.fixture
def helper(tmp_path, monkeypatch):
    """`helper(body)`: a module on disk rewritten with that body and reloaded."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = tmp_path / "flexmod_case_helper.py"

    def rewritten(body):
        path.write_text(BODIES[body])
        importlib.invalidate_caches()
        if path.stem in sys.modules:
            return importlib.reload(sys.modules[path.stem])
        return importlib.import_module(path.stem)

    yield rewritten
    sys.modules.pop(path.stem, None)


def test_P082_an_edited_helper(lane, check, compiles, helper):
    q, k, v = lane.qkv((1, 2, 12, 8))
    module = helper("minus")

    def score_mod(s, b, h, i, j):
        return s + module.helper(i, j)

    counts = []
    for body in ("minus", "times", "minus"):
        assert helper(body) is module
        out, _ = check(lane, q, k, v, score_mod)
        assert_matches(out, naive(q, k, v, EXPECTED[body])[0])
        counts.append(compiles())
    assert counts[1] == counts[2], "the old body's entry is still there"


SCRIPT = """
import json
import torch
import flexmod
from flexmod_case_helper import helper

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(3)
q, k, v = torch.randn(3, 1, 2, 12, 8).to(device)
out = flexmod.flex_attention(q, k, v, lambda s, b, h, i, j: s + helper(i, j), backend="fa2")
stats = flexmod.cache.stats()
print(json.dumps({"compiles": stats.compiles, "disk_hits": stats.disk_hits, "out": out.tolist()}))
"""


def _another_process(tmp_path: Path, body: str) -> dict:
    (tmp_path / "flexmod_case_helper.py").write_text(BODIES[body])
    root = Path(flexmod.__file__).parents[1]
    env = {
        **os.environ,
        "FLEXMOD_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join([str(root), str(tmp_path)]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_P082_another_process_with_the_disk_cache(tmp_path):
    torch.manual_seed(3)
    q, k, v = torch.randn(3, 1, 2, 12, 8)
    counted = []
    for body in ("minus", "times", "minus"):
        told = _another_process(tmp_path, body)
        assert_matches(torch.tensor(told["out"]), naive(q, k, v, EXPECTED[body])[0])
        counted.append((told["compiles"], told["disk_hits"]))
    assert counted == [(1, 0), (1, 0), (0, 1)]
