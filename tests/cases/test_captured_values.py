"""What a mod captures may change between calls: numbers, tables, the mod itself."""

from __future__ import annotations

import functools
import sys

import pytest
import torch

import flexmod
from flexmod.errors import FlexmodError
from flexmod.testing import assert_matches, naive, visible

FACTOR = 4


def _closure(n, monkeypatch):
    return lambda s, b, h, i, j: s * n


def _global(n, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", n)
    return _times_global


def _times_global(s, b, h, i, j):
    return s * FACTOR


def _default(n, monkeypatch):
    def score_mod(s, b, h, i, j, n=n):
        return s * n

    return score_mod


def _changed_default(n, monkeypatch):
    monkeypatch.setattr(_times_default, "__defaults__", (n,))
    return _times_default


def _times_default(s, b, h, i, j, n=FACTOR):
    return s * n


class _Factor:
    def __init__(self):
        self.n = FACTOR

    def __call__(self, s, b, h, i, j):
        return s * self.n

    def method(self, s, b, h, i, j):
        return s * self.n


_HELD = _Factor()


def _attribute(n, monkeypatch):
    monkeypatch.setattr(_HELD, "n", n)
    return _HELD


def _bound_method(n, monkeypatch):
    monkeypatch.setattr(_HELD, "n", n)
    return _HELD.method


def _partial(n, monkeypatch):
    return functools.partial(lambda n, s, b, h, i, j: s * n, n)


WAYS = [_closure, _global, _default, _changed_default, _attribute, _bound_method, _partial]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__.strip("_"))
@pytest.mark.parametrize("values", [(4, 8), (0.25, 0.75)], ids=["int", "float"])
def test_P079_a_number_that_changes(lane, check, compiles, monkeypatch, way, values):
    q, k, v = lane.qkv((1, 2, 8, 8))
    first, second = values
    outs = [check(lane, q, k, v, way(first, monkeypatch))[0]]
    compiled = compiles()
    outs.append(check(lane, q, k, v, way(second, monkeypatch))[0])
    assert compiles() == compiled
    assert float((outs[0] - outs[1]).abs().max()) > 1e-2
    assert_matches(outs[1], naive(q, k, v, lambda s, b, h, i, j: s * second)[0])


def test_P079_a_number_in_a_mask(lane, check, compiles):
    q, k, v = lane.qkv((1, 2, 24, 8))

    def nearer_than(n):
        return lambda b, h, i, j: (i - j).abs() < n

    check(lane, q, k, v, None, nearer_than(4), tile=16)
    compiled = compiles()
    check(lane, q, k, v, None, nearer_than(9), tile=16)
    assert compiles() == compiled


@pytest.mark.parametrize("n", [4, -4, 0, -12])
def test_P079_a_number_in_an_index(lane, check, n):
    # Index i + n is 4..11, -4..3, 0..7, -12..-5 of 12: what was proven of one n is not of the next.
    q, k, v = lane.qkv((1, 2, 8, 8))
    table = lane.floats([0.5, -1.0, 2.0, 0.25, -0.5, 1.5, 3.0, -2.0, 1.0, 0.0, -0.25, 4.0])

    def score_mod(s, b, h, i, j):
        return s * table[j + n]

    check(lane, q, k, v, score_mod)


@pytest.mark.parametrize("n", [5, -13])
def test_P079_a_number_that_leads_out_of_the_table(engine, n):
    q, k, v = engine.qkv((1, 2, 8, 8))
    table = engine.floats([0.5] * 12)

    def attend(n):
        return flexmod.flex_attention(
            q, k, v, lambda s, b, h, i, j: s * table[j + n], backend=engine.backend
        )

    assert torch.isfinite(attend(4)).all()
    try:
        out = attend(n)
    except IndexError:
        return
    # A kernel on a GPU cannot raise; what it must not do is to return a number.
    assert torch.isnan(out).all()


DOCUMENTS = ([0] * 9 + [1] * 11, [0] * 3 + [1] * 14 + [2] * 3, [5] * 16 + [1] * 4)


def _same_document(ids):
    return lambda b, h, i, j: ids[i] == ids[j]


@pytest.mark.parametrize("tile", [None, 8])
def test_P083_a_table_at_the_address_of_a_freed_one(lane, check, tile):
    q, k, v = lane.qkv((1, 2, 20, 8))
    memory = torch.empty(20, dtype=torch.int64, device=lane.device)
    addresses = set()
    for documents in DOCUMENTS:
        memory.copy_(torch.tensor(documents))
        ids = memory.view(20).detach()  # a new tensor each time, at one address
        addresses.add(ids.data_ptr())
        check(lane, q, k, v, None, _same_document(ids), tile=tile)
        del ids
    assert len(addresses) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="bytes of the CPU's memory")
@pytest.mark.parametrize("tile", [None, 8])
def test_P083_with_the_same_version_counter(lane, check, tile):
    q, k, v = lane.qkv((1, 2, 20, 8))
    memory = bytearray(20 * 8)
    seen = set()
    for documents in DOCUMENTS:
        memory[:] = torch.tensor(documents).numpy().tobytes()
        ids = torch.frombuffer(memory, dtype=torch.int64)
        seen.add((ids.data_ptr(), ids._version))
        check(lane, q, k, v, None, _same_document(ids), tile=tile)
        del ids
    assert len(seen) == 1


@pytest.mark.parametrize("tile", [None, 8])
def test_P083_a_table_changed_in_place(lane, check, tile):
    q, k, v = lane.qkv((1, 2, 20, 8))
    ids = lane.tensor(DOCUMENTS[0])
    mask_mod = _same_document(ids)
    for documents in DOCUMENTS:
        ids.copy_(torch.tensor(documents))
        check(lane, q, k, v, None, mask_mod, tile=tile)


@pytest.mark.parametrize("after", DOCUMENTS[1:], ids=["more", "other"])
def test_P083_a_map_held_while_its_table_changes(lane, after):
    q, k, v = lane.qkv((1, 2, 20, 8))
    ids = lane.tensor(DOCUMENTS[0])
    block_mask = flexmod.create_block_mask(
        _same_document(ids), None, None, 20, 20, device=lane.device, BLOCK_SIZE=8
    )
    ids.copy_(torch.tensor(after))
    try:
        out = flexmod.flex_attention(q, k, v, block_mask=block_mask, backend=lane.backend)
    except FlexmodError:
        return  # refusing a map that has gone stale is right too
    new, old = (_same_document(lane.tensor(table)) for table in (after, DOCUMENTS[0]))
    # Either is right, but not tiles of the one with tokens of the other.
    is_new = torch.equal(block_mask.dense(), visible(new, 1, 1, 20, 20, lane.device))
    assert_matches(out, naive(q, k, v, mask_mod=new if is_new else old)[0])


class _Wrapper:
    """A serving layer's view of attention: made once, called with one mask after another."""

    def __init__(self, lane):
        self.lane = lane
        self.attend = functools.partial(flexmod.flex_attention, backend=lane.backend)

    def __call__(self, q, k, v, mask_mod, tile):
        block_mask = mask_mod
        if tile is not None:
            block_mask = flexmod.create_block_mask(
                mask_mod, None, None, 6, 6, device=self.lane.device, BLOCK_SIZE=tile
            )
        return self.attend(q, k, v, block_mask=block_mask)


PARENTS = [-1, 0, 0, 1, 1, 2]


def _ancestors() -> torch.Tensor:
    table = torch.eye(6, dtype=torch.bool)
    for token, parent in enumerate(PARENTS):
        if parent >= 0:
            table[token] |= table[parent]
    return table


@pytest.mark.parametrize("tile", [None, 16])
def test_P085_a_tree_then_causal(lane, tile):
    q, k, v = lane.qkv((1, 2, 6, 8))
    table = _ancestors().to(lane.device)

    def tree(b, h, i, j):
        return table[i, j]

    def causal(b, h, i, j):
        return i >= j

    wrapper = _Wrapper(lane)
    expected = {mod: naive(q, k, v, mask_mod=mod)[0] for mod in (tree, causal)}
    assert float((expected[tree] - expected[causal]).abs().max()) > 1e-2
    for mask_mod in (tree, causal, tree):
        assert_matches(wrapper(q, k, v, mask_mod, tile), expected[mask_mod])
    library = flexmod.masks.tree(PARENTS, device=lane.device)
    assert torch.equal(visible(library, 1, 1, 6, 6, lane.device)[0, 0], table)


def _causal(b, h, i, j):
    return i >= j


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
def test_P089_no_device_named_and_no_cuda(lane, check):
    block_mask = flexmod.create_block_mask(_causal, None, None, 20, 20, BLOCK_SIZE=16)
    assert block_mask.kv_num_blocks.device.type == "cpu"
    assert block_mask.dense().device.type == "cpu"
    assert flexmod.create_mask(_causal, None, None, 20, 20).device.type == "cpu"
    q, k, v = lane.qkv((1, 2, 20, 8))
    out = flexmod.flex_attention(q, k, v, block_mask=block_mask, backend=lane.backend)
    assert_matches(out, naive(q, k, v, mask_mod=_causal)[0])
    check(lane, q, k, v, None, _causal)


def test_P089_the_device_comes_from_the_query():
    made = flexmod.create_block_mask(_causal, None, None, 20, 20, BLOCK_SIZE=16)
    query = torch.empty(1, 2, 20, 8, device="meta")
    assert flexmod.flex_attention(query, query, query, None, made).device.type == "meta"
    named = flexmod.create_block_mask(_causal, None, None, 20, 20, device="cpu", BLOCK_SIZE=16)
    with pytest.raises(flexmod.DeviceError, match=r"block_mask is on cpu, but query is on meta"):
        flexmod.flex_attention(query, query, query, None, named)
    table = torch.ones(20, 20, dtype=torch.bool)
    held = flexmod.create_block_mask(lambda b, h, i, j: table[i, j], None, None, 20, 20)
    with pytest.raises(flexmod.DeviceError, match=r"block_mask is on cpu"):
        flexmod.flex_attention(query, query, query, None, held)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
def test_P089_no_backend_named_either():
    q, k, v = torch.randn(3, 1, 2, 20, 8)
    out = flexmod.flex_attention(q, k, v, block_mask=_causal)
    assert out.device.type == "cpu"
    assert_matches(out, naive(q, k, v, mask_mod=_causal)[0])


def test_P089_the_default_device():
    with torch.device("meta"):
        assert flexmod.create_mask(_causal, 1, 1, 4, 4).device.type == "meta"
    with torch.device("cpu"):
        assert flexmod.create_mask(_causal, 1, 1, 4, 4).device.type == "cpu"
        block_mask = flexmod.create_block_mask(_causal, None, None, 20, 20, BLOCK_SIZE=16)
        assert block_mask.kv_num_blocks.device.type == "cpu"
    assert flexmod.create_mask(_causal, 1, 1, 4, 4, device="cpu").device.type == "cpu"


def test_P089_the_device_named_wins_over_the_default():
    with torch.device("meta"):
        mask = flexmod.create_mask(_causal, 1, 1, 4, 4, device="cpu")
        block_mask = flexmod.create_block_mask(
            _causal, None, None, 20, 20, device="cpu", BLOCK_SIZE=16
        )
        tiles = block_mask.tiles()
    assert mask.tolist() == [[[[i >= j for j in range(4)] for i in range(4)]]]
    assert tiles.tolist() == [[[[1, 0], [1, 1]]]]
