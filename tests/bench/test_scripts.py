"""The scripts in benchmarks/ that are no suites, at small sizes."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_training(monkeypatch, capsys):
    small = ["--device=cpu", "--seqlen=64", "--channels=128", "--rounds=2", "--runs=2"]
    monkeypatch.setattr("sys.argv", ["training.py", *small])
    runpy.run_path(str(SCRIPTS / "training.py"), run_name="__main__")
    *rows, last = capsys.readouterr().out.splitlines()
    found = [
        re.findall(r"([a-z ]+?) [\d.]+ ms \(([\d.]+)\)", row.split(maxsplit=1)[1]) for row in rows
    ]
    assert [[name.strip() for name, _ in row] for row in found] == [
        ["none", "relative bias", "head scale"]
    ] * 2
    assert all(row[0][1] == "1.00" for row in found)
    assert last == "deterministic: 2 of 2 runs equal the first"
