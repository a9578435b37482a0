"""Peers get what a row stands for, and a row says why one of them has no figure."""

from __future__ import annotations

import json
import re
import sys
import types
from itertools import pairwise

import pytest
import torch

from flexmod.bench import peers
from flexmod.bench.case import runner
from flexmod.bench.errors import reference
from flexmod.bench.rows import rows


def attend(query, key, value, causal, window, softcap):
    """flash-attn's meaning of its arguments, for [B, S, H, D]."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    score = query @ key.mT / query.shape[-1] ** 0.5
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    distance = torch.arange(score.shape[-2])[:, None] - torch.arange(score.shape[-1])
    left, right = window[0], 0 if causal else window[1]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left is not None:
        hidden |= distance > left
    if right is not None:
        hidden |= -distance > right
    return (score.masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(1, 2)


@pytest.fixture
def flash(monkeypatch):
    """Its module, with functions that have the same names, arguments and results."""

    def flash_attn_func(q, k, v, *, causal=False, window_size=(None, None), softcap=0.0):
        return attend(q, k, v, causal, window_size, softcap), None

    def flash_attn_varlen_func(
        q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False,
        window_size=(None, None), softcap=0.0,
    ):  # fmt: skip
        assert cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_k)
        edges = cu_seqlens_q.tolist()
        assert max_seqlen_q == max_seqlen_k == max(b - a for a, b in pairwise(edges))
        parts = [[x[None, a:b] for x in (q, k, v)] for a, b in pairwise(edges)]
        return torch.cat([attend(*p, causal, window_size, softcap)[0] for p in parts]), None

    module = types.ModuleType("flash_attn.cute")
    module.flash_attn_func = flash_attn_func
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_flash_attn_gets_what_a_row_stands_for(flash, small_case, direction):
    (peer,) = peers.candidates([], "flash-attn")[1:]
    assert peer.absent(torch.device("cpu")) == "it needs a GPU"
    served = [row for row in rows(128) if peer.serves(row, direction)]
    assert {row.mask for row in served} == {"none", "causal", "window", "documents"}
    assert {row.score for row in served} == {"none", "softcap"}
    for row in served:
        case = small_case(row, direction)
        call = peer.make(case)
        assert reference(case)(call, runner(call, case)()) < 1e-6, row.name


def candidate(name, make, absent=None):
    return peers.Candidate(name, lambda device: absent, lambda row, direction: True, make)


def test_one_that_fails_becomes_a_footnote(bench, monkeypatch, tmp_path, capsys):
    def broken(case):
        raise RuntimeError("no such shape\nsecond line")

    def never(*arguments):
        raise AssertionError("asked for a row that it does not serve")

    serves_none = peers.Candidate("narrow", lambda d: None, lambda row, direction: False, never)
    gone = [candidate(name, never, "it is not installed") for name in ("gone", "lost")]
    monkeypatch.setattr(peers, "PEERS", (candidate("fragile", broken), serves_none, *gone))
    assert bench("--rows=dense,causal", f"--out={tmp_path}") == 0
    shown = capsys.readouterr()
    assert "not here: gone, lost (it is not installed)\n" in shown.err
    assert shown.out.count("not here: gone, lost (it is not installed)\n") == 1
    assert shown.out.count("[1] fragile: RuntimeError: no such shape\n") == 1
    assert re.search(r"^dense D64 +[\d.e-]+ +\[1\]", shown.out, re.M)
    found = json.loads((tmp_path / "cpu_forward.json").read_text())
    assert found["absent"] == {name: "it is not installed" for name in ("gone", "lost")}
    row = found["rows"][0]
    assert row["failed"] == {"fragile": "RuntimeError: no such shape"}
    assert list(row["tflops"]) == ["flexmod"]


@pytest.mark.parametrize("factor", [1.1, float("nan")])
def test_one_that_is_wrong_has_no_figure(bench, monkeypatch, tmp_path, factor):
    def wrong(case):
        call = peers.ours.make(None, case)
        return call._replace(attend=lambda: call.attend() * factor)

    monkeypatch.setattr(peers, "PEERS", (candidate("wrong", wrong),))
    assert bench("--rows=dense", f"--out={tmp_path}") == 0
    (row,) = json.loads((tmp_path / "cpu_forward.json").read_text())["rows"]
    assert list(row["tflops"]) == ["flexmod"] and set(row["error"]) == {"flexmod", "wrong"}
    assert re.fullmatch(r"wrong by (1.0e-01|nan)", row["failed"]["wrong"])


def test_one_for_which_no_time_is_left_is_named(bench, monkeypatch, tmp_path):
    from flexmod.bench.timing import Budget

    def never(case):
        raise AssertionError("begun after the end")

    spent = iter([False] * 2 + [True] * 100)
    monkeypatch.setattr(Budget, "is_spent", property(lambda self: next(spent)))
    monkeypatch.setattr(peers, "PEERS", (candidate("late", never),))
    assert bench("--rows=dense", f"--out={tmp_path}") == 0
    (row,) = json.loads((tmp_path / "cpu_forward.json").read_text())["rows"]
    assert list(row["tflops"]) == ["flexmod"] and row["failed"] == {"late": "no time was left"}
