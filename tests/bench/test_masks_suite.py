"""The suite `masks`: block maps, each in a process of its own."""

from __future__ import annotations

import threading

import pytest

from flexmod.bench import command, masks, report
from flexmod.bench.suites import SUITES


def test_masks_suite_measures_one_map():
    figures = masks.figures_of("flexmod", "causal", 512, "cpu")
    assert figures["ms"] > 0 and figures["mib"] >= 0


def test_a_map_that_cannot_be_built_ends_its_process(parse):
    setting = command.make_setting(parse("--suite=masks", "--device=cpu", "--seconds=100"))
    with pytest.raises(RuntimeError, match="nothing"):
        masks.in_own_process("flexmod", "nothing", 64, setting)
    with pytest.raises(ZeroDivisionError):
        masks.peak(lambda: 1 // 0, "cpu")
    assert not [thread for thread in threading.enumerate() if "watch" in thread.name]


def test_masks_suite_has_every_row_at_both_lengths(parse, monkeypatch):
    setting = command.make_setting(parse("--suite=masks", "--tokens=64", "--device=cpu"))
    names = list(masks.rows(128, "cpu"))
    figures = {"ms": 1.0, "mib": 0.5}

    def some(builder, row, length, _):
        if builder != "flexmod" and length > 64:
            raise RuntimeError("you tried to allocate 16 bytes\nat a place")
        return figures

    monkeypatch.setattr(masks, "figures", some)
    window, *records = masks.measure(setting)
    assert window["error"]["flexmod"] < 1e-5 and window["ms"]["flexmod"] > 0
    assert [r["row"] for r in records] == [f"{n} {t}" for t in (32768, 64) for n in names]
    assert all(r["ms"]["flexmod"] == 1.0 for r in records)
    if any("flex" in c.name for c in setting.candidates if not c.is_ours):
        assert all(set(r["ms"]) == set(masks.BUILDERS) for r in records if r["tokens"] == 64)
        assert records[0]["failed"] == {"torch eager": "you tried to allocate 16 bytes"}
    assert report.table(SUITES["masks"], [window, *records])


def test_a_wrong_window_is_no_figure(parse, monkeypatch):
    from flexmod.bench import window

    setting = command.make_setting(parse("--suite=masks", "--tokens=64", "--device=cpu"))
    monkeypatch.setattr(window, "flex_attention", lambda q, k, v, block_mask: q * 0)
    record = window.measure(setting, 3000)
    assert not record["ms"] and "wrong" in record["failed"]["flexmod"]
