from __future__ import annotations

import pytest
import torch

from flexmod import masks
from flexmod.errors import ArgumentError


def a_score_mod(score, b, h, q_idx, kv_idx):
    return score


ERRORS = [
    (lambda: masks.sliding_window(0), "window must be an integer >= 1, got 0"),
    (lambda: masks.sliding_window(2.5), "window must be an integer >= 1, got 2.5"),
    (lambda: masks.sliding_window(True), "window must be an integer >= 1, got True"),
    (lambda: masks.window_between(-1, 0), "left must be an integer >= 0, got -1"),
    (lambda: masks.window_between(0, "3"), "right must be an integer >= 0, got '3'"),
    (lambda: masks.symmetric_window(-1), "radius must be an integer >= 0, got -1"),
    (lambda: masks.dilated_window(3, 0), "dilation must be an integer >= 1, got 0"),
    (lambda: masks.sink_window(3, -1), "sinks must be an integer >= 0, got -1"),
    (lambda: masks.strided(0), "stride must be an integer >= 1, got 0"),
    (lambda: masks.chunked(0), "size must be an integer >= 1, got 0"),
    (lambda: masks.block_causal(None), "size must be an integer >= 1, got None"),
    (lambda: masks.frame_block(4, 0), "block must be an integer >= 1, got 0"),
    (lambda: masks.global_tokens(-2), "count must be an integer >= 0, got -2"),
    (lambda: masks.natten_2d(4, 4, 5), "kernel must fit into the 4 x 4 grid, got 5 x 5"),
    (lambda: masks.random_blocks(8, 8, 4, 3), "count must be at most the 2 blocks of keys, got 3"),
    (lambda: masks.bigbird(8, 4, window_blocks=2), "window_blocks must be odd, got 2"),
    (
        lambda: masks.prefix_lm(-1),
        "lengths must be an integer >= 0 or an integer tensor [B], got -1",
    ),
    (
        lambda: masks.prefix_lm(torch.ones(2)),
        "lengths must be an integer tensor [] or [B], got float32 of shape [2]",
    ),
    (
        lambda: masks.padding([[1]]),
        "lengths must be an integer tensor [] or [B], got int64 of shape [1, 1]",
    ),
    (
        lambda: masks.document(torch.ones(3, dtype=torch.bool)),
        "ids must be an integer tensor [S] or [B, S], got bool of shape [3]",
    ),
    (
        lambda: masks.document("abc"),
        "ids must be an integer tensor [S] or [B, S], got str",
    ),
    (lambda: masks.document([1, 2], ignore=0.5), "ignore must be an integer, got 0.5"),
    (
        lambda: masks.key_padding(torch.ones(2, 3)),
        "keep must be an integer or bool tensor [KV] or [B, KV], got float32 of shape [2, 3]",
    ),
    (
        lambda: masks.span_intervals([1, 2], [3]),
        "lo and hi must have one shape, got lo [2], hi [1]",
    ),
    (lambda: masks.block_diffusion(0, 2), "length must be an integer >= 1, got 0"),
    (
        lambda: masks.tree([-1, 2, 0]),
        "parents must hold -1 (a root) or an index below the token's own: "
        "number the tokens so that each comes after its parent",
    ),
    (
        lambda: masks.shift(masks.causal(), q_offset=1.5),
        "q_offset must be an integer or an integer tensor [B], got 1.5",
    ),
    (
        lambda: masks.and_masks(3),
        "and_masks takes functions mask_mod(b, h, q_idx, kv_idx), got 3 of type int",
    ),
    (
        lambda: masks.or_masks(a_score_mod),
        "or_masks takes functions mask_mod(b, h, q_idx, kv_idx), got a_score_mod, "
        "which is score_mod(score, b, h, q_idx, kv_idx)",
    ),
    (
        lambda: masks.and_masks(masks.causal),
        "and_masks takes functions mask_mod(b, h, q_idx, kv_idx), got causal, "
        "which is one of 0 positional arguments; call it: causal(...)",
    ),
    (
        lambda: masks.compose(masks.causal()),
        "compose takes functions score_mod(score, b, h, q_idx, kv_idx), got causal, "
        "which is mask_mod(b, h, q_idx, kv_idx)",
    ),
    (
        lambda: masks.shift(lambda q_idx, kv_idx: q_idx >= kv_idx),
        "shift takes functions mask_mod(b, h, q_idx, kv_idx) or "
        "score_mod(score, b, h, q_idx, kv_idx), got <lambda>, "
        "which is one of 2 positional arguments",
    ),
]


@pytest.mark.parametrize(("call", "message"), ERRORS, ids=[text[:40] for _, text in ERRORS])
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert str(caught.value) == message
