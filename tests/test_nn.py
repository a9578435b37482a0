"""`flexmod.nn`: mods as submodules: what they learn is loaded, moved, copied and trained."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import flexmod
from flexmod import ArgumentError, masks, mods
from flexmod.nn import FlexAttention, MaskMod, ScoreMod
from flexmod.testing import assert_matches, naive

HEADS, LENGTH = 4, 40


@pytest.fixture
def qkv():
    return torch.randn(3, 2, HEADS, LENGTH, 8).unbind()


class Slopes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.rand(HEADS))

    def forward(self, score, b, h, q_idx, kv_idx):
        return score - self.slope[h] * (q_idx - kv_idx)


def learned():
    table = torch.nn.Parameter(torch.randn(HEADS, 15))
    return FlexAttention(
        mods.softcap(5.0),
        ScoreMod(mods.relative_bias, table),
        Slopes(),
        masks.causal(),
        MaskMod(masks.document, torch.arange(LENGTH) // 15),
        sink=torch.nn.Parameter(torch.zeros(HEADS)),
    )


def test_it_is_flex_attention_with_those_mods(qkv):
    attention = learned()
    out, lse = attention(*qkv, return_lse=True)
    table, slopes = attention.mods[1].table, attention.mods[2]
    expected = flexmod.flex_attention(
        *qkv,
        flexmod.compose(mods.softcap(5.0), mods.relative_bias(table), slopes),
        flexmod.and_masks(masks.causal(), masks.document(torch.arange(LENGTH) // 15)),
        sink=attention.sink,
        return_lse=True,
    )
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_against_the_reference_and_shared_heads(qkv):
    query, key, value = qkv
    attention = FlexAttention(Slopes(), masks.sliding_window(7), scale=0.5)
    out = attention(query, key[:, :2], value[:, :2])
    mask = masks.sliding_window(7)
    expected = naive(query, key[:, :2], value[:, :2], attention.mods[0], mask, 0.5)
    assert_matches(out, expected[0])


def test_everything_learns(qkv):
    attention = learned()
    names = [name for name, _ in attention.named_parameters()]
    assert names == ["sink", "mods.1.table", "mods.2.slope"]
    attention(*qkv).square().sum().backward()
    assert all(p.grad.any() for p in attention.parameters())


def test_state_is_saved_and_loaded(qkv):
    first, second = learned(), learned()
    state = first.state_dict()
    assert list(state) == ["sink", "mods.1.table", "mods.2.slope", "mods.4.ids"]
    state["mods.4.ids"] = torch.arange(LENGTH) // 11
    before = second(*qkv)
    second.load_state_dict(state)
    first.mods[4].ids = state["mods.4.ids"]
    assert not torch.equal(second(*qkv), before)
    assert torch.equal(second(*qkv), first(*qkv))


def test_a_copy_is_on_its_own(qkv):
    first = learned()
    before = first(*qkv)
    second = copy.deepcopy(first)
    with torch.no_grad():
        second.mods[1].table.zero_()
        second.mods[4].ids.zero_()
    assert torch.equal(first(*qkv), before)
    expected = naive(
        *qkv,
        lambda s, b, h, q, kv: 5 * torch.tanh(s / 5) - second.mods[2].slope[h] * (q - kv),
        masks.causal(),
    )
    second.sink = None
    assert_matches(second(*qkv), expected[0])


def test_pickling_without_closures(qkv):
    attention = FlexAttention(ScoreMod(mods.alibi, HEADS), MaskMod(masks.causal))
    expected = attention(*qkv)
    assert torch.equal(pickle.loads(pickle.dumps(attention))(*qkv), expected)


def test_a_table_that_changes_is_met(qkv):
    ids = torch.arange(LENGTH) // 15
    attention = FlexAttention(masks.causal(), MaskMod(masks.document, ids))
    attention(*qkv)
    short = [x[:, :, :30] for x in qkv]
    assert_matches(attention(*short), naive(*short, None, attention_mask(ids))[0])
    ids.clamp_(max=1)  # in place
    assert_matches(attention(*qkv), naive(*qkv, None, attention_mask(ids))[0])
    attention.mods[1].ids = torch.zeros(LENGTH, dtype=torch.int64)
    assert_matches(attention(*qkv), naive(*qkv, None, masks.causal())[0])


def attention_mask(ids):
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx])


def test_a_number_that_changes_is_met(qkv):
    class Window(torch.nn.Module):
        reach = 3

        def forward(self, b, h, q_idx, kv_idx):
            return (q_idx >= kv_idx) & (q_idx - kv_idx < self.reach)

    attention = FlexAttention(Window())
    for reach in (3, 9):
        attention.mods[0].reach = reach
        expected = naive(*qkv, None, masks.sliding_window(reach))[0]
        assert_matches(attention(*qkv), expected)


def test_dropout_in_training_only(qkv):
    attention = FlexAttention(dropout_p=0.5)
    assert not torch.equal(attention(*qkv), attention(*qkv))
    attention.eval()
    assert_matches(attention(*qkv), naive(*qkv)[0])


def test_one_map_for_all_layers(qkv):
    shared = flexmod.create_block_mask(masks.causal(), None, None, LENGTH, LENGTH)
    out = FlexAttention(mods.softcap(3.0))(*qkv, block_mask=shared)
    expected = naive(*qkv, mods.softcap(3.0), masks.causal())
    assert_matches(out, expected[0])


def test_compiled_in_one_graph(qkv):
    attention = learned()
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert_matches(compiled(*qkv), attention(*(x.double() for x in qkv)))


def test_what_is_shown():
    shown = repr(learned())
    for line in (
        "sink=[4]",
        "(0): softcap()",
        "(1): ScoreMod(relative_bias, table=[4, 15])",
        "(2): Slopes()",
        "(4): MaskMod(document, ids=[40])",
    ):
        assert line in shown
    options = repr(FlexAttention(scale=0.5, backend="cpu", dropout_p=0.1))
    assert "scale=0.5, dropout_p=0.1, backend='cpu'" in options
    assert repr(MaskMod(masks.sliding_window, 5)) == "MaskMod(sliding_window, window=5)"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: FlexAttention(mods.softcap), r"call it: softcap\(...\)"),
        (lambda: FlexAttention(3), "FlexAttention takes functions"),
        (lambda: FlexAttention(dropout_p=1.5), "dropout_p"),
        (lambda: ScoreMod(masks.causal), "ScoreMod takes functions score_mod"),
        (lambda: MaskMod(masks.document), "document missing a required argument: 'ids'"),
        (lambda: ScoreMod("softcap"), "a function that makes a mod, not 'softcap'"),
    ],
)
def test_refusals(make, text):
    with pytest.raises(ArgumentError, match=text):
        make()


def test_a_second_mask_is_refused(qkv):
    with pytest.raises(
        ArgumentError, match="block_mask is given to a FlexAttention that has masks"
    ):
        FlexAttention(masks.causal())(*qkv, block_mask=masks.causal())


def test_wrong_tensors_are_named(qkv):
    with pytest.raises(NotImplementedError, match="query must be 4-D"):
        FlexAttention(masks.causal())(qkv[0][0], *qkv[1:])
