"""Maps that a CUDA graph can make: nothing waits for the device, and shapes alone say how large."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flexmod import BlockMask, masks
from flexmod.testing import check_block_mask

GENERATOR = torch.Generator().manual_seed(0)
BLOCKS = {"BLOCK_SIZE": 16}


class Device(TorchDispatchMode):
    """Refuses what a device is waited for, or what a graph cannot record."""

    REFUSED = (
        "_local_scalar_dense", "nonzero", "masked_select", "unique", "aten.equal", "lift_fresh",
        "is_nonzero", "repeat_interleave.Tensor",
    )  # fmt: skip

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(name in str(function) for name in self.REFUSED):
            raise AssertionError(f"waits for the device: {function}")
        if "index" in str(function) and len(args) > 1 and isinstance(args[1], list | tuple):
            flags = [x for x in args[1] if isinstance(x, torch.Tensor) and x.dtype == torch.bool]
            assert not flags, f"waits for the device: {function} by flags"
        return function(*args, **kwargs)


def chosen():
    return torch.randint(-1, 8, (2, 1, 6, 3), generator=GENERATOR)


def kinds():
    return torch.randint(0, 3, (1, 2, 6, 8), generator=GENERATOR)


def lists():
    table = torch.rand(1, 2, 8, 8, generator=GENERATOR) < 0.4
    order = table.int().argsort(dim=-1, descending=True, stable=True).int()
    return table.sum(-1).int(), order


def starts():
    inner = torch.randint(0, 100, (3,), generator=GENERATOR).sort().values
    return torch.cat([torch.tensor([0]), inner, torch.tensor([100])])


MAKERS = {
    "documents": (starts, lambda x: BlockMask.from_documents(cu_seqlens=x, total=100, **BLOCKS)),
    "causal documents": (
        starts,
        lambda x: BlockMask.from_documents(cu_seqlens=x, total=100, causal=True, **BLOCKS),
    ),
    "prefixes": (
        lambda: torch.randint(0, 90, (3,), generator=GENERATOR),
        lambda x: BlockMask.from_prefix_lengths(x, 100, 128, **BLOCKS),
    ),
    "window": (lambda: None, lambda _: BlockMask.from_window(20, 100, device="cpu", **BLOCKS)),
    "topk": (chosen, lambda x: BlockMask.from_topk(x, 120, static=True, **BLOCKS)),
    "topk and a mask": (
        chosen,
        lambda x: BlockMask.from_topk(x, 120, masks.causal(), 90, static=True, **BLOCKS),
    ),
    "blocks": (
        kinds,
        lambda x: BlockMask.from_dense_blocks(x, masks.causal(), (95, 128), 16, static=True),
    ),
    "lists": (lists, lambda x: BlockMask.from_kv_blocks(*x, BLOCK_SIZE=16, static=True)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_making_and_updating_waits_for_nothing(name):
    data, make = MAKERS[name]
    held = make(data())
    for _ in range(3):
        given = data()
        with Device():
            other = make(given)
            held.update_(other)
        assert len(other.runs.table) == len(held.runs.table)
        assert torch.equal(held.tiles(), make(given).tiles())
        check_block_mask(held, exact=False)


@pytest.mark.parametrize("name", ["topk", "topk and a mask", "blocks", "lists"])
def test_with_room_and_without_are_the_same(name, monkeypatch):
    data, make = MAKERS[name]
    given = data()
    static = make(given)
    for method in ("from_topk", "from_dense_blocks", "from_kv_blocks"):
        plain = getattr(BlockMask, method)
        monkeypatch.setattr(
            BlockMask, method, staticmethod(lambda *a, static, f=plain, **k: f(*a, **k))
        )
    other = make(given)
    assert torch.equal(static.tiles(), other.tiles())
    assert torch.equal(static.dense(), other.dense())
    assert static.runs.host == other.runs.host
    rows = static.grid.rows
    assert torch.equal(static.transposed.tiles(rows), other.transposed.tiles(rows))


def test_an_index_out_of_range_lists_nothing():
    given = torch.tensor([[[[0, 99, -7, 2]]]])
    assert BlockMask.from_topk(given, 64, **BLOCKS, static=True).tiles().tolist() == [
        [[[1, 0, 1, 0]]]
    ]
    count, order = torch.tensor([[[9]]]), torch.tensor([[[[1, 1, -4, 77]]]])
    made = BlockMask.from_kv_blocks(count, order, BLOCK_SIZE=16, static=True, seq_lengths=(16, 64))
    assert made.tiles().tolist() == [[[[0, 1, 0, 0]]]]


def test_the_counter_notices_a_wait():
    with pytest.raises(AssertionError, match="waits"), Device():
        BlockMask.from_topk(chosen(), 120, **BLOCKS)
