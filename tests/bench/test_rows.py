"""The rows of the attention suites: what they stand for, and how much work they are."""

from __future__ import annotations

import pytest
import torch

from flexmod.bench import peers
from flexmod.bench.attention import operations
from flexmod.bench.case import BHSD, BSHD, PACKED
from flexmod.bench.errors import relative
from flexmod.bench.rows import MASKS, SCORES, document_lengths, rows, select, small_rows
from flexmod.testing import naive, visible


def test_every_row_runs_as_flexmod_and_by_its_definition(small_case):
    """The mods are usable by the oracle, so that every row's error can be worked out."""
    for row in (*rows(128), *small_rows(128)):
        case = small_case(row)
        shown = naive(*case.tensors, case.score_mod, case.mask_mod, rows=torch.tensor([3]))[0]
        own = peers.candidates([], "none")[0].make(case).attend()
        assert relative(own[:, :, [3]], shown) < 2e-6, row.name
        assert row.mask in MASKS and row.score in SCORES
        assert row.learns == bool(case.learned)
        assert case.query.shape[0] == (row.batch or 128 // row.seqlen)


def test_operations_count_visible_pairs(small_case):
    for row in rows(128):
        seen = visible(small_case(row).mask_mod, 1, 1, row.seqlen, row.seqlen).sum()
        batch = 128 // row.seqlen
        assert operations(small_case(row)) == pytest.approx(4 * batch * 2 * 16 * float(seen))
    dense = rows(128)[0]
    forward, backward = (operations(small_case(dense, d)) for d in ("forward", "backward"))
    assert backward == 2.5 * forward


def test_rows_are_selected_by_name_or_part():
    found = rows()
    names = lambda wanted: [row.name for row in select(found, wanted)]
    assert names("causal") == ["causal"]
    assert names("relative") == ["relative bias", "learned relative bias"]
    assert names("causal 512,dense") == ["dense", "causal 512"]
    assert names("") == [row.name for row in found]


def test_documents_fill_the_sequence():
    lengths = document_lengths(16, 16384)
    assert len(lengths) == 16 and sum(lengths) == 16384 and min(lengths) > 0


@pytest.mark.parametrize("layout", [BHSD, BSHD, PACKED], ids=["BHSD", "BSHD", "PACKED"])
def test_layouts_lead_back(layout):
    x = torch.randn(1, 2, 5, 3)
    assert torch.equal(layout.back(layout.to(x)), x)
