from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmod import masks

B, H = 2, 2


def dense(mod, q_len, kv_len, batch=B, heads=H):
    """[batch, heads, q_len, kv_len] bool, the mod under one vmap an index."""
    for axis in (3, 2, 1, 0):
        mod = torch.vmap(mod, in_dims=tuple(0 if n == axis else None for n in range(4)))
    return mod(*(torch.arange(extent) for extent in (batch, heads, q_len, kv_len)))


def row_counts(mod, q_len, kv_len=None):
    return dense(mod, q_len, kv_len or q_len, 1, 1)[0, 0].sum(-1).tolist()


LENGTH = 12
small = st.integers(1, 9)
ids = st.lists(st.integers(0, 3), min_size=LENGTH, max_size=LENGTH)


def from_table(bits):
    table = torch.tensor([bits >> n & 1 for n in range(LENGTH * LENGTH)]).bool()
    table = table.reshape(LENGTH, LENGTH)
    return lambda b, h, q_idx, kv_idx: table[q_idx, kv_idx]


any_mask = st.one_of(
    st.just(masks.causal()),
    st.builds(masks.sliding_window, small, st.booleans()),
    st.builds(masks.dilated_window, small, small),
    st.builds(masks.block_causal, small),
    st.builds(masks.document, ids),
    st.builds(masks.padding, st.lists(st.integers(0, LENGTH), min_size=B, max_size=B)),
    st.builds(from_table, st.integers(0, 2 ** (LENGTH * LENGTH) - 1)),
)


def same(one, other):
    return torch.equal(dense(one, LENGTH, LENGTH), dense(other, LENGTH, LENGTH))


@settings(deadline=None, max_examples=30)
@given(any_mask, any_mask, any_mask)
def test_laws_of_the_algebra(x, y, z):
    both, either, negate = masks.and_masks, masks.or_masks, masks.not_mask
    assert torch.equal(dense(negate(x), LENGTH, LENGTH), dense(x, LENGTH, LENGTH).logical_not())
    assert same(negate(both(x, y)), either(negate(x), negate(y)))
    assert same(negate(either(x, y)), both(negate(x), negate(y)))
    assert same(both(x, both(y, z)), both(both(x, y), z))
    assert same(both(x, both(y, z)), both(x, y, z))
    assert same(either(x, either(y, z)), either(either(x, y), z))
    assert same(either(x, either(y, z)), either(x, y, z))
    assert same(both(x, either(y, z)), either(both(x, y), both(x, z)))
    assert same(negate(negate(x)), x)
    assert same(both(both(), x), x)
    assert same(either(either(), x), x)


def test_zero_masks():
    assert dense(masks.and_masks(), 3, 4).all()
    assert not dense(masks.or_masks(), 3, 4).any()


offsets = st.integers(0, 4)


@settings(deadline=None, max_examples=30)
@given(any_mask, offsets, offsets, offsets, offsets)
def test_shifts_add_up_and_cut(mask, q_one, kv_one, q_two, kv_two):
    q_len, kv_len = LENGTH - q_one - q_two, LENGTH - kv_one - kv_two
    twice = masks.shift(masks.shift(mask, q_one, kv_one), q_two, kv_two)
    once = masks.shift(mask, q_one + q_two, kv_one + kv_two)
    cut = dense(mask, LENGTH, LENGTH)[:, :, q_one + q_two :, kv_one + kv_two :]
    assert torch.equal(dense(twice, q_len, kv_len), cut)
    assert torch.equal(dense(once, q_len, kv_len), cut)


def test_shift_of_each_sequence_by_its_own_length():
    mod = masks.shift(masks.causal(), q_offset=torch.tensor([3, 0]), kv_offset=-1)
    assert dense(mod, 2, 6)[:, 0].int().tolist() == [
        [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]],
        [[1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]],
    ]


def test_shift_of_a_score_mod():
    shifted = masks.shift(lambda score, b, h, q_idx, kv_idx: score + 100 * q_idx + kv_idx, 2, -1)
    assert shifted(0.5, 0, 0, 3, 4) == 503.5


def test_compose_applies_left_to_right():
    def double(score, b, h, q_idx, kv_idx):
        return score * 2

    def plus_key(score, b, h, q_idx, kv_idx):
        return score + kv_idx

    assert masks.compose(double, plus_key)(3, 0, 0, 0, 10) == 16
    assert masks.compose(plus_key, double)(3, 0, 0, 0, 10) == 26
    assert masks.compose()(3, 0, 0, 0, 10) == 3


class Below(torch.nn.Module):
    def __init__(self, bound):
        super().__init__()
        self.bound = bound

    def forward(self, b, h, q_idx, kv_idx):
        return kv_idx < self.bound

    def method(self, b, h, q_idx, kv_idx):
        return kv_idx < self.bound


def below(bound, b, h, q_idx, kv_idx, extra=0):
    return kv_idx < bound + extra


CALLABLES = {
    "module": (Below(3), "Below"),
    "bound method": (Below(3).method, "method"),
    "partial": (functools.partial(below, 3), "below"),
    "lambda": (lambda b, h, q_idx, kv_idx: kv_idx < 3, "<lambda>"),
}


@pytest.mark.parametrize("case", CALLABLES)
def test_any_callable_combines_and_lends_its_name(case):
    mod, name = CALLABLES[case]
    combined = masks.and_masks(mod, masks.causal())
    assert combined.__name__ == f"and_masks({name}, causal)"
    assert row_counts(combined, 5) == [1, 2, 3, 3, 3]


def test_names_nest():
    local = masks.and_masks(masks.causal(), masks.sliding_window(3))
    assert local.__name__ == "and_masks(causal, sliding_window)"
    outer = masks.or_masks(masks.not_mask(local), masks.shift(masks.symmetric_window(2), 1))
    assert outer.__name__ == (
        "or_masks(not_mask(and_masks(causal, sliding_window)), shift(symmetric_window))"
    )
