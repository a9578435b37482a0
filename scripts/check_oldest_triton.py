"""Compile the Gluon kernels with the oldest Triton that pyproject.toml admits.

The tests compile them with the one that is installed. Gluon is young: its names change.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    (version,) = re.findall(r'"triton>=([\d.]+)', (ROOT / "pyproject.toml").read_text())
    with tempfile.TemporaryDirectory() as place:
        wanted = f"triton=={version}.*"
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        subprocess.run([*pip, "--no-deps", "--target", place, wanted], check=True)
        rows = compiled(place)
    for row in rows:
        assert row["triton"].startswith(f"{version}."), f"compiled with Triton {row['triton']}"
        case, usage = row["case"], row["usage"]
        name = f"{case['kernel']} {case['mod']} D{case['head_dim']}"
        assert usage and not usage["error"], f"{name}: {usage and usage['error']}"
        assert usage["shared"] <= usage["planned"], f"{name}: {usage['shared']} bytes are shared"
        assert row["may_spill"] or not usage["spills"], f"{name}: {usage['spills']} bytes spilled"
    assert len(rows) > 10, rows
    print(f"{len(rows)} Gluon kernels compile with Triton {version}")


def compiled(place: str) -> list[dict[str, Any]]:
    """What each kernel uses, with the Triton that lies in a folder."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([place, str(ROOT)]),
        "TRITON_CACHE_DIR": f"{place}/cache",
        "FLEXMOD_CACHE_DIR": f"{place}/kernels",
    }
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(ROOT / "tests/kernels/compile_targets.py"), "hopper", "--json"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


if __name__ == "__main__":
    main()
