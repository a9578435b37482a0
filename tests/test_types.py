"""What a type checker is told about calls. mypy reads this file; the tests run it."""

from __future__ import annotations

import typing

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as theirs

import flexmod
from flexmod import AuxOutput, AuxRequest, masks, mods

if typing.TYPE_CHECKING:
    from typing import assert_type
else:

    def assert_type(value, kind):
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        assert isinstance(value, origin or kind)
        assert all(map(isinstance, value, arguments)) and len(value) == len(arguments or value)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(1, 2, 16, 8), torch.randn(1, 2, 16, 8), torch.randn(1, 2, 16, 8)


def test_what_is_returned_follows_from_what_is_asked_for() -> None:
    q, k, v = inputs()
    assert_type(flexmod.flex_attention(q, k, v), Tensor)
    assert_type(flexmod.flex_attention(q, k, v, return_lse=False, dropout_p=0.5), Tensor)
    assert_type(flexmod.flex_attention(q, k, v, return_lse=True), tuple[Tensor, Tensor])
    asked = flexmod.flex_attention(q, k, v, return_aux=AuxRequest(lse=True), backend="cpu")
    assert_type(asked, tuple[Tensor, AuxOutput])


def test_mods_and_maps_of_every_kind_are_taken() -> None:
    q, k, v = inputs()

    def mine(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * 2

    def below(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx >= kv_idx

    traced = flexmod.trace(mods.softcap(3.0))
    for score_mod in (None, mine, traced, mods.alibi(2)):
        assert_type(flexmod.flex_attention(q, k, v, score_mod), Tensor)
    made = flexmod.create_block_mask(below, None, None, 16, 16)
    torchs = theirs.create_block_mask(below, None, None, 16, 16, device="cpu")
    for mask in (None, below, made, torchs, masks.causal()):
        assert_type(flexmod.flex_attention(q, k, v, block_mask=mask), Tensor)


if typing.TYPE_CHECKING:  # mypy complains if one of these is not an error

    def wrong(q: Tensor, k: Tensor, v: Tensor) -> None:
        flexmod.flex_attention(q, k, v).shape + "x"  # type: ignore[operator]
        flexmod.flex_attention(q, k, v, sinks=q)  # type: ignore[call-overload]
        flexmod.flex_attention(q, k, v, scale="1")  # type: ignore[call-overload]
        print(flexmod.flex_attention(q, k, v, return_lse=True).shape)  # type: ignore[attr-defined]
