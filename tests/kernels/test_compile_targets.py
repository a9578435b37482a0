"""Every rendered kernel compiles for GPUs that are not there, and fits them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.xdist_group("compile")  # one worker: the fixture takes minutes

HERE = Path(__file__).parent
GROUPS = ("mods", "heads", "backward", "hopper", "bounds")
LIMITS = {
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "gfx942": 64 << 10,
}


@pytest.fixture(scope="module")
def usages(tmp_path_factory):
    """Per target: what each kernel uses. The targets are compiled side by side."""
    running = {arch: _start(arch, tmp_path_factory.mktemp(arch)) for arch in LIMITS}
    found = {}
    for arch, process in running.items():
        output, errors = process.communicate(timeout=1500)
        assert process.returncode == 0, errors
        found[arch] = [json.loads(line) for line in output.splitlines()]
    return found


def _start(arch, folder):
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)  # it makes triton.compile impossible
    environment |= {
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "FLEXMOD_CACHE_DIR": str(folder / "flexmod"),
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), environment.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(HERE / "compile_targets.py"), *GROUPS]
    command += ["--json", "--only", f" {arch} "]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, **pipes)


def _label(case):
    return f"{case['kernel']} {case['mod']} {case['arch']} {case['dtype']} D{case['head_dim']}"


@pytest.mark.parametrize("arch", LIMITS)
def test_every_kernel_compiles_and_fits(usages, arch):
    assert len(usages[arch]) >= (3 if arch == "sm_86" else 10)
    for row in usages[arch]:
        usage = row["usage"]
        assert usage is not None, f"{_label(row['case'])}: the engine refuses it"
        assert not usage["error"], f"{_label(row['case'])}: {usage['error']}"
        assert usage["registers"] > 0
        assert usage["shared"] <= LIMITS[arch], _label(row["case"])


@pytest.mark.parametrize("arch", LIMITS)
def test_no_forward_kernel_spills(usages, arch):
    spilling = {
        _label(row["case"]): row["usage"]["spills"]
        for row in usages[arch]
        if row["usage"]["spills"] and not row["may_spill"]
    }
    assert not spilling


@pytest.mark.parametrize("arch", LIMITS)
def test_the_planned_shared_memory_is_enough(usages, arch):
    short = {
        _label(row["case"]): (row["usage"]["planned"], row["usage"]["shared"])
        for row in usages[arch]
        if row["usage"]["shared"] > row["usage"]["planned"]
    }
    assert not short
