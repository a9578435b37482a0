"""Kernels on disk and in memory: keyed by content, rebuilt when damaged, private, and few."""

from __future__ import annotations

import os
import stat

import pytest
import torch

import flexmod
from flexmod import cache, masks, mods
from flexmod.kernels import compile as kernels
from flexmod.kernels import templates

pytest.importorskip("triton")


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache directory, an empty memory and counts of 0."""
    monkeypatch.setenv("FLEXMOD_CACHE_DIR", str(tmp_path / "kernels"))
    cache.clear_memory()
    cache.reset_stats()
    yield tmp_path / "kernels"
    cache.clear_memory()


def counts():
    found = cache.stats()
    return found.compiles, found.memory_hits, found.disk_hits


def load(text="x = 1\n", signature="a", fields=None, toolchain="triton 0, sm_90"):
    return kernels.load(signature, lambda: text, fields or {"TILE_Q": 64}, toolchain)


def test_a_kernel_is_built_once_then_found(fresh):
    first = load()
    assert first.x == 1 and counts() == (1, 0, 0)
    assert load() is first and counts() == (1, 1, 0)
    cache.clear_memory()
    assert load().x == 1 and counts() == (1, 1, 1)
    assert len(list(fresh.glob("*.py"))) == 1


def test_equal_texts_of_other_signatures_are_one_kernel(fresh):
    first = load(signature="a")
    assert load(signature="b") is first and counts() == (1, 1, 0)


@pytest.mark.parametrize(
    "change",
    [{"text": "x = 2\n"}, {"fields": {"TILE_Q": 128}}, {"fields": {"TILE_Q": 64, "more": 1}},
     {"toolchain": "triton 0, sm_80"}, {"toolchain": "triton 1, sm_90"}],
    ids=str,
)  # fmt: skip
def test_text_fields_and_toolchain_are_all_part_of_the_key(fresh, change):
    load()
    load(**change, signature="b")
    assert counts()[0] == 2 and len(list(fresh.glob("*.py"))) == 2


@pytest.mark.parametrize("damage", ["", "x = 7\n", "x = (", "\x00", None], ids=repr)
def test_a_damaged_entry_is_rebuilt(fresh, damage):
    load()
    (path,) = fresh.glob("*.py")
    path.write_bytes(b"\xff\xfe") if damage is None else path.write_text(damage)
    cache.clear_memory()
    assert load().x == 1
    assert counts() == (2, 0, 0) and path.read_text().endswith("x = 1\n")
    assert not list(fresh.glob("*.tmp"))


@pytest.mark.parametrize("kept", ["all", "start", "garbage"])
def test_parsed_templates_are_kept_and_rebuilt_when_damaged(fresh, kept):
    def text():
        templates._environment.cache_clear()
        return templates.device_functions("tanh(")

    first = text()
    whole = {path: path.read_bytes() for path in fresh.glob("*.jinja")}
    assert whole
    damage = {"all": lambda b: b, "start": lambda b: b[:40], "garbage": lambda _: b"j2" + bytes(90)}
    for path, content in whole.items():
        path.write_bytes(damage[kept](content))
    assert text() == first
    assert {path: path.read_bytes() for path in fresh.glob("*.jinja")} == whole
    templates._environment.cache_clear()


def test_the_directory_is_private(fresh):
    load()
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o700
    (path,) = fresh.glob("*.py")
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


def test_a_place_that_cannot_be_written_is_left_for_a_temporary_one(fresh, tmp_path, monkeypatch):
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("FLEXMOD_CACHE_DIR", str(tmp_path / "a file" / "below"))
    assert load().x == 1
    elsewhere = cache.directory()
    assert elsewhere != tmp_path / "a file" / "below" and elsewhere.is_dir()
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o700
    assert len(list(elsewhere.glob("*.py"))) == 1
    assert cache.directory() == elsewhere  # the same one for the whole process


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory_is_left_for_a_temporary_one(fresh, tmp_path, monkeypatch):
    fresh.mkdir(mode=0o500)
    assert load().x == 1 and cache.directory() != fresh


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"FLEXMOD_CACHE_DIR": "own", "XDG_CACHE_HOME": "xdg"}, "own"),
        ({"XDG_CACHE_HOME": "xdg"}, "xdg/flexmod"),
        ({"HOME": "home"}, "home/.cache/flexmod"),
    ],
    ids=str,
)
def test_where_the_directory_is(variables, expected, tmp_path, monkeypatch):
    for name in ("FLEXMOD_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    assert cache.directory() == tmp_path / expected


def attend(q_len=32, kv_len=None, score=None, mask=None, dim=16, batch=1, heads=2, **options):
    """One call on the kernel engine, in Triton's interpreter where there is no GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    query = torch.randn(batch, heads, q_len, dim, device=device)
    key = torch.randn(batch, heads, kv_len or q_len, dim, device=device)
    return flexmod.flex_attention(query, key, key, score, mask, backend="fa2", **options)


def compiles(calls):
    """How many kernels were built for some calls of `attend`, each given as its arguments."""
    cache.clear_memory()
    before = cache.stats().compiles
    for arguments in calls:
        attend(**arguments)
    return cache.stats().compiles - before


SHIFT = lambda value: lambda s, b, h, q, k: s * value + q
SAME = {
    "scales": [{"scale": 0.1 * n} for n in range(1, 6)],
    "numbers of a closure": [{"score": SHIFT(v)} for v in (0.5, 2, 3.0, -1e9)],
    "caps and windows": [
        {"score": mods.softcap(c), "mask": masks.sliding_window(w)}
        for c, w in ((5.0, 4), (9.0, 20))
    ],
    "tables of other contents": [{"score": mods.head_bias(torch.randn(2))} for _ in range(3)],
    "tables of other lengths": [
        {"score": mods.relative_bias(torch.randn(2, n))} for n in (21, 41, 51)
    ],
    "batches": [{"batch": n} for n in (1, 2, 3)],
    "heads": [{"heads": n} for n in (1, 2, 4)],
    "long sequences": [{"q_len": n} for n in (64, 65, 100, 128, 130)],
    "long sequences with a mask": [
        {"q_len": n, "mask": masks.causal()} for n in (64, 65, 100, 128, 130)
    ],
}


@pytest.mark.parametrize("name", SAME)
def test_what_is_a_run_time_argument_compiles_nothing_anew(fresh, name):
    assert compiles(SAME[name]) == 1


FLOATS, INTEGERS = torch.zeros(2), torch.arange(2)
OTHER = {
    "dims": [{"dim": n} for n in (16, 32)],
    "structures": [{"score": SHIFT(2.0)}, {"score": lambda s, b, h, q, k: s + 2.0 - q}],
    "with and without a mask": [{}, {"mask": masks.causal()}],
    "tables that need a clamp and that do not": [
        {"score": mods.relative_bias(torch.randn(2, n))} for n in (41, 63)
    ],
    "types of a table": [{"score": lambda s, b, h, q, k: s + FLOATS[h]},
                         {"score": lambda s, b, h, q, k: s + INTEGERS[h]}],
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_what_changes_the_text_is_compiled(fresh, name):
    assert compiles(OTHER[name]) == 2


def test_seven_lengths_need_as_many_kernels_as_tile_shapes(fresh):
    """Tiles shrink with sequences shorter than they are: 16, 32 and 64 rows in the interpreter."""
    lengths = (1, 7, 16, 17, 33, 50, 100)
    assert compiles([{"q_len": n, "mask": masks.causal()} for n in lengths]) == 3
    assert compiles([{"q_len": n, "mask": masks.causal()} for n in lengths]) == 0  # on disk


def test_steps_of_a_decode_loop_compile_once(fresh):
    steps = [{"q_len": 1, "kv_len": n, "score": mods.alibi(2)} for n in range(70, 75)]
    assert compiles(steps) == 1


def test_traces_are_counted_and_handles_spare_them(fresh):
    program = flexmod.trace(SHIFT(2.0))
    cache.reset_stats()
    attend(score=program), attend(score=program)
    assert cache.stats().traces == 0
    attend(score=SHIFT(2.0))
    assert cache.stats().traces == 1
    snapshot = cache.stats()
    cache.reset_stats()
    assert snapshot.traces == 1 and cache.stats().traces == 0
