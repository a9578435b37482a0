"""Every script of examples/ runs, prints what it is there to show, and is right."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
PROMISED = {  # script -> what its output must contain
    "own_mask.py": r"largest error against float64: (\S+)",
    "packed_documents.py": r"document of 1258 tokens: differs from its own attention by (\S+)",
    "transformers_model.py": r"logits: (\S+)\nthe same tokens: True\nloss of .*: 4\.\d+ -> [0-3]\.",
    "softcap_alibi.py": r"softcap, then alibi +head 0: largest weight \d",
}
NEEDS = {"transformers_model.py": "transformers"}
ELSEWHERE = {"train_tiny_lm.py"}  # tests/training/test_example.py: a few steps of it
LARGEST_ERROR = 1e-5


def test_every_script_is_tested() -> None:
    assert {path.name for path in SCRIPTS} == set(PROMISED) | ELSEWHERE


@pytest.mark.parametrize("name", PROMISED)
def test_example_runs(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{name} needs {NEEDS[name]}")
    script = ROOT / "examples" / name
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = re.search(PROMISED[script.name], done.stdout)
    assert found, done.stdout
    for error in found.groups():
        assert float(error) < LARGEST_ERROR


def test_softcap_alibi_draws_a_picture(tmp_path: Path) -> None:
    script, picture = ROOT / "examples" / "softcap_alibi.py", tmp_path / "weights.png"
    done = subprocess.run(
        [sys.executable, script, picture], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    if importlib.util.find_spec("matplotlib") is None:
        assert "no picture: matplotlib is not installed" in done.stdout
    else:
        assert picture.read_bytes().startswith(b"\x89PNG")
