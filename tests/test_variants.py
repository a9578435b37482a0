"""Kinds of attention on every engine and dtype, beside the naive computation in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import flexmod
from flexmod import AuxRequest, masks, mods
from flexmod.testing import assert_matches, naive, naive_same_dtype

B, H = 2, 2
BLOCK, TILE = 16, 32  # of the map and, larger, of the cpu engine and the kernels
RAGGED, EVEN = (33, 47), (32, 48)
LANES = [
    ("reference", torch.float64), ("reference", torch.float32), ("reference", torch.bfloat16),
    ("cpu", torch.float64), ("cpu", torch.float32), ("cpu", torch.bfloat16), ("cpu", torch.float16),
    ("fa2", torch.float64), ("fa2", torch.float32), ("fa2", torch.bfloat16), ("fa2", torch.float16),
]  # fmt: skip
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Variant:
    """A kind of attention: mods made from (Q, KV), so that tables have the right lengths."""

    score: Callable[[int, int], Any] | None = None
    mask: Callable[[int, int], Any] | None = None
    heads: int = H
    kv_heads: int = H
    kv_batch: int = B
    head_dim: int = 16
    value_dim: int = 16
    scale: float | None = None


def draw(*shape: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole(high: int, *shape: int, seed: int = 7) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def documents(length: int) -> torch.Tensor:
    return torch.arange(length) // 11


def without_score(score, b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() * -0.3


def softmax_one(score, b, h, q_idx, kv_idx):
    return torch.where(kv_idx == 0, 0.0, score)


def poisoned(score, b, h, q_idx, kv_idx):
    """NaN and infinities, but only where the mask hides."""
    return torch.where(q_idx >= kv_idx, score, torch.log((q_idx - kv_idx).float()))


def gated(q_len: int, kv_len: int):
    gate, shift = draw(B, q_len), draw(H, kv_len, seed=8)
    return lambda s, b, h, q, k: s * torch.sigmoid(gate[b, q]) + torch.tanh(shift[h, k])


def learned_tables(q_len: int, kv_len: int):
    rows, picked = draw(5, kv_len), whole(5, q_len)
    return lambda s, b, h, q, k: s + rows[picked[q], k]


def paged(q_len: int, kv_len: int):
    logical = torch.stack([torch.randperm(kv_len) for _ in range(B * 2)]).view(B, 2, kv_len)
    return lambda b, h, q, k: logical[b, h, k] <= q + 3


def dots(q_len: int, kv_len: int):
    left, right = draw(q_len, 3), draw(kv_len, 3, seed=9)
    return lambda s, b, h, q, k: s - (left[q] - right[k]).square().sum()


def spans(q_len: int, kv_len: int):
    low = whole(kv_len, q_len)
    return masks.span_intervals(low, (low + whole(20, q_len, seed=3)).clamp(max=kv_len))


VARIANTS = {
    "plain": Variant(),
    "causal": Variant(mask=lambda q, kv: masks.causal()),
    "bidirectional": Variant(mask=lambda q, kv: masks.bidirectional()),
    "sliding_window": Variant(mask=lambda q, kv: masks.sliding_window(9)),
    "symmetric_window": Variant(mask=lambda q, kv: masks.symmetric_window(6)),
    "window_between": Variant(mask=lambda q, kv: masks.window_between(5, 11)),
    "dilated_window": Variant(mask=lambda q, kv: masks.dilated_window(12, 3)),
    "sink_window": Variant(mask=lambda q, kv: masks.sink_window(8, 3)),
    "strided": Variant(mask=lambda q, kv: masks.strided(6)),
    "prefix_lm": Variant(mask=lambda q, kv: masks.prefix_lm([5, 20])),
    "document": Variant(mask=lambda q, kv: masks.document(documents(q), kv_ids=documents(kv))),
    "document and causal": Variant(
        mask=lambda q, kv: masks.and_masks(
            masks.causal(), masks.document(documents(q), kv_ids=documents(kv))
        )
    ),
    "padding": Variant(mask=lambda q, kv: masks.padding([q, 7], [kv, 12])),
    "key_padding": Variant(mask=lambda q, kv: masks.key_padding(whole(2, B, kv) > 0)),
    "span_intervals": Variant(mask=spans),
    "chunked": Variant(mask=lambda q, kv: masks.chunked(10)),
    "block_causal": Variant(mask=lambda q, kv: masks.block_causal(7)),
    "frame_block": Variant(mask=lambda q, kv: masks.frame_block(24, 6)),
    "global_tokens": Variant(mask=lambda q, kv: masks.global_tokens(3)),
    "natten_2d": Variant(mask=lambda q, kv: masks.natten_2d(8, 6, 3)),
    "bigbird": Variant(mask=lambda q, kv: masks.bigbird(max(q, kv), 8, 1, 1, 2)),
    "random_blocks": Variant(mask=lambda q, kv: masks.random_blocks(q, kv, 8, 2)),
    "block_diffusion": Variant(mask=lambda q, kv: masks.block_diffusion(24, 4)),
    "tree": Variant(mask=lambda q, kv: masks.tree([-1, *(n // 2 for n in range(max(q, kv) - 1))])),
    "shifted causal": Variant(mask=lambda q, kv: flexmod.shift(masks.causal(), kv - q)),
    "or": Variant(mask=lambda q, kv: masks.or_masks(masks.chunked(9), masks.global_tokens(2))),
    "not causal": Variant(mask=lambda q, kv: masks.not_mask(masks.causal())),
    "rows that see nothing": Variant(mask=lambda q, kv: lambda b, h, i, j: (i < 16) & (j < 9)),
    "nothing": Variant(mask=lambda q, kv: masks.nothing_mask),
    "a mask of batch and head": Variant(
        mask=lambda q, kv: lambda b, h, i, j: (i + b >= j) & ((h + j) % 3 != 0)
    ),
    "paged": Variant(mask=paged),
    "alibi": Variant(score=lambda q, kv: mods.alibi(H), mask=lambda q, kv: masks.causal()),
    "symmetric alibi": Variant(score=lambda q, kv: mods.alibi(H, symmetric=True)),
    "distance_penalty": Variant(score=lambda q, kv: mods.distance_penalty("log", 0.5)),
    "gaussian_window": Variant(score=lambda q, kv: mods.gaussian_window(6.0)),
    "softcap": Variant(score=lambda q, kv: mods.softcap(2.0)),
    "temperature": Variant(score=lambda q, kv: mods.temperature([0.5, 2.0])),
    "head_scale": Variant(score=lambda q, kv: mods.head_scale(draw(H))),
    "head_bias": Variant(score=lambda q, kv: mods.head_bias(draw(H))),
    "log_length": Variant(score=lambda q, kv: mods.log_length(0.7)),
    "position_scale": Variant(score=lambda q, kv: mods.position_scale(16)),
    "bias": Variant(score=lambda q, kv: mods.bias(draw(B, H, q, kv))),
    "a broadcast bias": Variant(score=lambda q, kv: mods.bias(draw(H, 1, kv))),
    "relative_bias": Variant(score=lambda q, kv: mods.relative_bias(draw(H, 21))),
    "t5_bias": Variant(score=lambda q, kv: mods.t5_bias(draw(8, H), max_distance=20)),
    "swin_2d_bias": Variant(score=lambda q, kv: mods.swin_2d_bias(8, 6, draw(165, H))),
    "compose": Variant(
        score=lambda q, kv: flexmod.compose(mods.alibi(H), mods.softcap(3.0)),
        mask=lambda q, kv: masks.sliding_window(20),
    ),
    "without the score": Variant(score=lambda q, kv: without_score),
    "one key set to 0": Variant(score=lambda q, kv: softmax_one),
    "nan where hidden": Variant(score=lambda q, kv: poisoned, mask=lambda q, kv: masks.causal()),
    "gated": Variant(score=gated),
    "learned tables": Variant(score=learned_tables),
    "distances of captured vectors": Variant(score=dots),
    "grouped heads": Variant(heads=4, kv_heads=2, score=lambda q, kv: mods.head_bias(draw(4))),
    "one key head": Variant(kv_heads=1, mask=lambda q, kv: masks.causal()),
    "one key batch": Variant(kv_batch=1, score=lambda q, kv: lambda s, b, h, i, j: s + b * j * 0.1),
    "another value_dim": Variant(value_dim=24, mask=lambda q, kv: masks.causal()),
    "odd dims": Variant(head_dim=7, value_dim=33, score=lambda q, kv: mods.alibi(H)),
    "one dim": Variant(head_dim=1, value_dim=1),
    "a scale": Variant(scale=0.77, score=lambda q, kv: mods.softcap(4.0)),
    "a scale of 0": Variant(scale=0.0, mask=lambda q, kv: masks.causal()),
    "a scale that is 0 in float32": Variant(scale=1e-46, mask=lambda q, kv: masks.causal()),
    "a negative scale": Variant(scale=-0.4, mask=lambda q, kv: masks.causal()),
    "a small scale": Variant(scale=0.03, mask=lambda q, kv: masks.sliding_window(9)),
}


@functools.cache
def problem(name: str, lengths: tuple[int, int], dtype: torch.dtype):
    """Inputs and mods of a variant, and what the oracle says."""
    one = VARIANTS[name]
    q_len, kv_len = lengths
    torch.manual_seed(3)
    query = draw(B, one.heads, q_len, one.head_dim, seed=1).to(dtype)
    key = draw(one.kv_batch, one.kv_heads, kv_len, one.head_dim, seed=2).to(dtype)
    value = draw(one.kv_batch, one.kv_heads, kv_len, one.value_dim, seed=3).to(dtype)
    score, mask = (make(q_len, kv_len) if make else None for make in (one.score, one.mask))
    given = (query, key, value, score, mask, one.scale)
    yardstick = naive_same_dtype(*given)[0] if dtype in _HALF else None
    return given, naive(*given), yardstick


# The interpreter takes a second for what the other engines do in milliseconds.
IN_ALL_KERNELS = """document and causal, alibi, softcap, grouped heads, odd dims, learned tables,
rows that see nothing, compose""".replace("\n", " ").split(", ")


def cases():
    for name in VARIANTS:
        for engine, dtype in LANES:
            usual = dtype == torch.float32
            if engine != "fa2" or usual or name in IN_ALL_KERNELS:
                yield name, engine, dtype, RAGGED
            if usual and (engine != "fa2" or name in IN_ALL_KERNELS):
                yield name, engine, dtype, EVEN


def _label(value: Any) -> str:
    return str(value).removeprefix("torch.").replace(" ", "")


@pytest.mark.parametrize(("name", "engine", "dtype", "lengths"), cases(), ids=_label)
def test_variants(name, engine, dtype, lengths):
    if engine == "fa2" and torch.cuda.is_available():
        pytest.skip("tensors lie on the CPU, and the interpreter is off")
    given, (expected, lse, top), yardstick = problem(name, lengths, dtype)
    *inputs, score, mask, scale = given
    if mask is not None:
        mask = flexmod.create_block_mask(mask, B, VARIANTS[name].heads, *lengths, BLOCK_SIZE=BLOCK)
    out, aux = flexmod.flex_attention(
        *inputs, score, mask, scale, True, backend=engine,
        kernel_options={"BLOCK_M": TILE, "BLOCK_N": TILE},
        return_aux=AuxRequest(lse=True, max_scores=True),
    )  # fmt: skip
    assert out.dtype == dtype and out.shape == expected.shape
    assert aux.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_matches(out, expected, yardstick)
    assert_matches(aux.lse, lse)
    assert_matches(aux.max_scores, top)


def test_every_mask_and_mod_has_a_variant():
    """Each public factory is used above, by name."""
    from pathlib import Path

    text = Path(__file__).read_text()
    helpers = {"and_masks", "compose", "shift", "noop_mask", "document_ids"}
    helpers |= {"identity", "alibi_slopes", "t5_buckets"}
    for module in (masks, mods):
        assert not [n for n in module.__all__ if f".{n}" not in text and n not in helpers]
