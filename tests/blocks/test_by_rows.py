"""Maps made row by row: the same as coarse to fine, in a fixed number of steps at any length."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flexmod
from flexmod import masks
from flexmod.blocks import classify
from flexmod.blocks.by_rows import segments_by_row

GENERATOR = torch.Generator().manual_seed(0)
LENGTHS = torch.randint(1, 400, (30,), generator=GENERATOR)
IDS = torch.repeat_interleave(torch.arange(30), LENGTHS)[:3000]
BATCHED = torch.stack([IDS, (IDS - 29).abs()])  # one rises, the other falls
FALLING = IDS.flip(0).int()
BY_ROWS = {
    "causal": masks.causal(),
    "window": masks.sliding_window(300),
    "prefix": masks.prefix_lm([700, 20]),
    "padding": masks.padding([1500, 2900], [900, 3000]),
    "causal documents": masks.and_masks(masks.causal(), masks.document(IDS)),
    "not documents": masks.not_mask(masks.document(IDS)),
    "falling ids": masks.document(FALLING),
    "small ids": masks.document((IDS // 8).to(torch.int16)),
    "dilated": masks.dilated_window(100, 4),
    "strided": masks.strided(33),
    "chunks": masks.chunked(300),
    "heads": lambda b, h, q, k: (q - k <= 50 * h) & (q >= k),
    "a row's reach": lambda b, h, q, k: q - k < IDS[q] * 5,
    "a key's reach": lambda b, h, q, k: (k - q < FALLING[k]) ^ (q < 1000),
    "far": lambda b, h, q, k: q * 100_000 >= k * 99_999,
    "one comparison twice": lambda b, h, q, k: (q >= k) & ~((q >= k) & (q < 2000)),
    "a float of the query": lambda b, h, q, k: (q * 0.5 < 700.0) & (q >= k),
    "never": lambda b, h, q, k: (q >= k) & (q < k),
}
BOTH_WAYS = {
    "ids of each batch": masks.document(torch.stack([IDS, IDS // 2])),
    "ids that rise and fall": masks.document(BATCHED),
    "floats": lambda b, h, q, k: (q - k) * 0.5 < 100.0,
    "both at once": lambda b, h, q, k: (q - k).abs() < 100,
    "overflow": lambda b, h, q, k: (q - k) * 2**45 < 2**50,
    "large ids": masks.document(IDS * 2**50),
    "a power of numbers": (lambda n: lambda b, h, q, k: q - k < n**2)(torch.tensor(9)),
    "the same range in all blocks": lambda b, h, q, k: (q // 24 == k // 24) & (q % 24 >= k % 24),
    "the same range, falling": lambda b, h, q, k: q % 50 + k % 24 < 40,
    "a table of pairs": (lambda t: lambda b, h, q, k: t[q // 40, k // 40])(
        torch.rand(75, 75, generator=GENERATOR) < 0.5
    ),
}


def _made(mask_mod, lengths=(3000, 2777)):
    return flexmod.create_block_mask(mask_mod, 2, 2, *lengths, "cpu", BLOCK_SIZE=64)


@pytest.mark.parametrize("name", [*BY_ROWS, *BOTH_WAYS])
def test_both_ways_say_the_same(name, monkeypatch):
    mask_mod = {**BY_ROWS, **BOTH_WAYS}[name]
    asked = []

    def spy(*args):
        asked.append(segments_by_row(*args))
        return asked[-1]

    monkeypatch.setattr(classify, "segments_by_row", spy)
    for lengths in ((3000, 2777), (2944, 3000), (2944, 2816)):
        by_rows = _made(mask_mod, lengths)
        monkeypatch.setattr(classify, "segments_by_row", lambda *_: None)
        coarse = _made(mask_mod, lengths)
        monkeypatch.setattr(classify, "segments_by_row", spy)
        assert torch.equal(by_rows.tiles(), coarse.tiles())
        assert by_rows.runs.host == coarse.runs.host
    if name in BY_ROWS:
        assert all(segments is not None for segments in asked)


class Counter(TorchDispatchMode):
    """Counts operations, and those for whose result a GPU would have to be waited for."""

    WAITS = ("nonzero", "equal", "unique", "repeat_interleave")

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.waits = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations += 1
        name = str(function)
        lengths_known = (kwargs or {}).get("output_size") is not None
        self.waits += any(wait in name for wait in self.WAITS) and not lengths_known
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name,operations,waits", [("causal", 150, 4), ("window", 220, 4)])
def test_length_adds_no_steps(name, operations, waits):
    seen = []
    for length in (1 << 14, 1 << 20):
        flexmod.create_block_mask(BY_ROWS[name], None, None, length, length, "cpu")
        with Counter() as counter:
            flexmod.create_block_mask(BY_ROWS[name], None, None, length, length, "cpu")
        seen.append((counter.operations, counter.waits))
    assert seen[0] == seen[1]
    assert seen[0][0] <= operations and seen[0][1] <= waits


def test_partial_blocks_of_one_comparison_are_not_looked_at(monkeypatch):
    def refuse(*_):
        raise AssertionError("looked at elements")

    monkeypatch.setattr(classify, "look", refuse)
    for name in ("causal", "window", "chunks"):
        _made(BY_ROWS[name], (2944, 2816))
    with pytest.raises(AssertionError, match="looked at"):
        _made(BY_ROWS["causal documents"])
