"""Mods that have no file: cells of a notebook, exec, `python -c`, standard input."""

from __future__ import annotations

import linecache
import subprocess
import sys

import pytest
import torch

import flexmod
import flexmod.testing
from flexmod import IndexRangeError, TraceError

CODE = """
TABLE = torch.zeros(3)
def branching(score, b, h, q_idx, kv_idx):
    return score if q_idx > kv_idx else 0
beyond = lambda score, b, h, q_idx, kv_idx: score + TABLE[q_idx]
nothing = lambda score, b, h, q_idx, kv_idx: None
fading = lambda score, b, h, q_idx, kv_idx: score - 0.5 * (q_idx - kv_idx)
"""
PLACES = ["<ipython-input-7-0a1b>", "<string>", "<stdin>"]


@pytest.fixture(params=PLACES)
def cell(request):
    """The names that CODE defines, run as a notebook runs it: with its lines, or without."""
    names = {"torch": torch, "__name__": "__main__"}
    exec(compile(CODE, request.param, "exec"), names)
    if "ipython" in request.param:
        linecache.cache[request.param] = len(CODE), None, CODE.splitlines(True), request.param
        yield request.param, names
        del linecache.cache[request.param]
    else:
        yield request.param, names


def test_it_traces_and_runs(cell):
    query = torch.randn(1, 1, 8, 4)
    expected = flexmod.testing.naive(query, query, query, cell[1]["fading"])[0]
    out = flexmod.flex_attention(query, query, query, cell[1]["fading"])
    flexmod.testing.assert_matches(out, expected)


@pytest.mark.parametrize(
    ("name", "line", "expression", "error"),
    [
        ("branching", 4, "q_idx > kv_idx", TraceError),
        ("beyond", 5, "TABLE[q_idx]", IndexRangeError),
        ("nothing", 6, "", TraceError),
    ],
)
def test_errors_name_the_line(cell, name, line, expression, error):
    place, names = cell
    query = torch.randn(1, 1, 8, 4)
    with pytest.raises(error) as caught:
        flexmod.flex_attention(query, query, query, names[name])
    shown = expression if "ipython" in place else ""
    assert str(caught.value).splitlines()[0] == f"{place}:{line}" + (shown and f": {shown}")


def test_a_script_on_the_command_line():
    code = "import flexmod, torch\nflexmod.trace(lambda s, b, h, q, k: s if q > k else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "TraceError: <string>:2\n" in done.stderr


def test_a_map_shows_itself_in_a_notebook():
    made = flexmod.create_block_mask(lambda b, h, q, k: q >= k, None, None, 512, 512)
    shown = made._repr_html_()
    assert shown.count("<") == shown.count(">") and "BlockMask" in shown
