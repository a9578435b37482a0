"""What transformers' models call: the functions of attention and of masks by themselves."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

import flexmod
from flexmod.integrations import transformers as integration
from flexmod.testing import assert_matches, naive

pytest.importorskip(
    "transformers",
    "4.57",
    reason="transformers is not installed: pip install 'flexmod[transformers]'",
)
pytestmark = pytest.mark.usefixtures("on_a_gpu")
padded = runpy.run_path(str(Path(__file__).parent / "models.py"))["padded"]


def layer(q_len, kv_len, heads=4, **arguments):
    module = torch.nn.Module()
    query, key = torch.randn(2, heads, q_len, 8), torch.randn(2, 2, kv_len, 8)
    out, weights = integration.attention(module, query, key, key, None, **arguments)
    assert weights is None and out.is_contiguous()
    return query, key, out.transpose(1, 2)


@pytest.mark.parametrize("side", [None, "left"])
def test_decoding_builds_no_kernels_anew(side):
    keys = torch.randn(2, 1, 24, 8)
    compiles = []
    for length in range(18, 24):
        made = integration.block_mask(
            batch_size=2,
            kv_length=length,
            mask_function=lambda b, h, q_idx, kv_idx: kv_idx <= q_idx,
            attention_mask=padded(side, length).bool(),
            q_offset=length - 1,
        )
        assert (made is None) == (side is None)
        query, key = torch.randn(2, 1, 1, 8), keys[:, :, :length]
        out, _ = integration.attention(
            torch.nn.Module(), query, key, key, made, softcap=3.0, backend="fa2"
        )
        keep = padded(side, length)
        expected = naive(
            query, key, key,
            lambda s, b, h, q, kv: 3 * torch.tanh(s / 3),
            lambda b, h, q, kv, keep=keep: keep[b, kv] > 0,
        )[0]  # fmt: skip
        assert_matches(out.transpose(1, 2), expected)
        compiles.append(flexmod.cache.stats().compiles)
    assert compiles[1:] == compiles[:1] * 5


@pytest.mark.parametrize(
    ("arguments", "mask_mod"),
    [
        ({"is_causal": False}, None),
        ({}, lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + 4),
        ({"sliding_window": 3}, lambda b, h, q, kv: (kv <= q + 4) & (kv > q + 1)),
    ],
    ids=["both ways", "causal", "window"],
)
def test_without_a_mask_the_queries_are_the_last_keys(arguments, mask_mod):
    query, key, out = layer(7, 11, **arguments)
    expected = naive(query, key, key, None, mask_mod)[0]
    assert_matches(out, expected)


def test_a_position_bias_learns():
    bias = torch.randn(1, 4, 7, 7, requires_grad=True)
    query, key, out = layer(7, 7, is_causal=False, position_bias=bias, scaling=1.0)
    expected = naive(query, key, key, lambda s, b, h, q, kv: s + bias[0, h, q, kv], scale=1.0)[0]
    assert_matches(out, expected)
    out.square().sum().backward()
    found, bias.grad = bias.grad, None
    expected.square().sum().backward()
    torch.testing.assert_close(found, bias.grad)


@pytest.mark.parametrize("name", ["output_attentions", "head_mask"])
def test_what_is_refused(name):
    with pytest.raises(NotImplementedError, match=f"{name} is not supported by flexmod"):
        layer(3, 3, **{name: True})


def test_a_mask_of_another_shape():
    query = torch.randn(1, 2, 5, 8)
    for shape in ((5, 5), (1, 1, 5, 4)):
        with pytest.raises(ValueError, match="queries, 5 keys"):
            integration.attention(torch.nn.Module(), query, query, query, torch.zeros(shape))


def test_an_old_version(monkeypatch):
    import transformers  # which replaces itself as it loads

    monkeypatch.setattr(transformers, "__version__", "4.40.1")
    with pytest.raises(NotImplementedError, match=r"4\.40\.1 is too old: 4\.57 is needed"):
        integration.register()
