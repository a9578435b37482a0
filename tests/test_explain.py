"""`explain` tells what would run, and its formulas mean what the programs mean."""

from __future__ import annotations

import math

import pytest
import torch

import flexmod
from flexmod import masks, mods, traffic
from flexmod.errors import ArgumentError
from flexmod.explain import Explanation, explain
from flexmod.formula import LONGEST, expression, formula


def qkv(length: int = 256, heads: int = 2, dim: int = 32, keys: int | None = None) -> list:
    key = torch.zeros(1, heads, keys or length, dim)
    return [torch.zeros(1, heads, length, dim), key, key.clone()]


def test_names_the_engine_and_why_not_the_others() -> None:
    report = explain(*qkv(), backend=None)
    assert report.engine == "cpu"
    assert list(report.refusals) == ["hopper", "fa2", "cpu", "reference"]
    assert report.refusals["fa2"] is not None
    text = str(report)
    assert "engine: cpu" in text
    assert f"not fa2: {report.refusals['fa2']}" in text
    assert "not reference: it could, but it comes later in the order" in text


def test_a_backend_that_refuses_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from flexmod.kernels import cpu

    monkeypatch.setattr(cpu, "refuses", lambda problem: "it is closed today")
    report = explain(*qkv(), backend="cpu")
    assert report.engine is None
    assert "not cpu: it is closed today" in str(report)


def test_wrong_arguments_raise_as_in_a_call() -> None:
    query, key, value = qkv()
    with pytest.raises(ArgumentError, match="one head_dim"):
        explain(query, key[..., :8], value)


def test_tells_blocks_and_programs() -> None:
    report = explain(*qkv(1024), mods.softcap(20.0), masks.causal())
    assert report.blocks == (2 * 28, 2 * 8, 2 * 28)
    text = str(report)
    assert "partial" in text and "mask evaluated" in text
    assert str(report.score) in text and "score = 20*tanh(score/20)" in text
    assert str(report.mask) in text and "mask = q_idx >= kv_idx" in text


def test_without_a_mask() -> None:
    report = explain(*qkv())
    assert report.blocks is None and report.mask is None
    assert "blocks: no mask" in str(report)


def test_options_without_effect_are_named() -> None:
    report = explain(*qkv(), kernel_options={"BLOCK_M": 32, "kpack": 2, "bwd_BLOCK_N1": 64})
    assert report.ignored == ("kpack", "bwd_BLOCK_N1")
    assert "without effect: kpack, bwd_BLOCK_N1" in str(report)


def test_work_of_a_square_call_is_that_of_traffic() -> None:
    blocks = flexmod.create_block_mask(masks.causal(), None, None, 1024, 1024, BLOCK_SIZE=(128, 64))
    work = explain(*qkv(1024, heads=1, dim=64), None, blocks).work
    assert work.moved == traffic.flash2(1024, 64, 128, 64, visited=72) == 721_920
    assert work.dense_moved == traffic.standard(1024, 64)
    assert work.flops == 72 * 128 * 64 * 4 * 64
    assert work.dense_flops == 4 * 1024 * 1024 * 64
    assert explain(*qkv(1024, heads=1, dim=64)).work.moved == traffic.flash2(1024, 64, 128)


def test_work_counts_heads_that_share_a_map() -> None:
    blocks = flexmod.create_block_mask(masks.causal(), None, None, 512, 512)
    shared = explain(*qkv(512, heads=4), None, blocks).work
    each = explain(*qkv(512, heads=4), None, masks.causal()).work
    assert shared == each


def test_tiles_of_the_triton_engine() -> None:
    from flexmod.kernels import fa2

    if isinstance(fa2.target(torch.device("cpu")), str):
        pytest.skip("Triton is neither interpreted nor on a GPU here")
    report = explain(*qkv(), None, masks.causal(), backend="fa2")
    assert report.engine == "fa2"
    assert report.tiles is not None and "queries x" in report.tiles
    assert f"tiles: {report.tiles}" in str(report)


FORMULAS = {
    "causal": (masks.causal(), "q_idx >= kv_idx"),
    "window": (masks.sliding_window(4), "(kv_idx >= q_idx - 3) & (kv_idx <= q_idx)"),
    "document": (masks.document([0, 0, 1]), "capture0[q_idx] == capture0[kv_idx]"),
    "key padding": (masks.key_padding([True, False]), "capture0[kv_idx] != 0"),
    "either": (lambda b, h, i, j: (i > 3) ^ (j > 3), "(kv_idx > 3) ^ (q_idx > 3)"),
    "all": (masks.noop_mask, "True"),
    "alibi": (mods.alibi(2), "score + (kv_idx - q_idx)*capture0[h]"),
    "log": (lambda s, b, h, i, j: torch.log1p(s), "log(score + 1)"),
    "floor": (lambda s, b, h, i, j: s + i // 4 % 3, "score + Mod(floor(q_idx/4), 3)"),
    "choice": (lambda s, b, h, i, j: torch.where(i > 1, s, 2.5), "where(q_idx > 1, score, 2.5)"),
    "unknown": (lambda s, b, h, i, j: torch.round(s), "round(score)"),
    "bits": (lambda s, b, h, i, j: s + (i << 2), "score + lshift(q_idx, 2)"),
    "truth": (lambda s, b, h, i, j: s * (i > j), "score*number(q_idx > kv_idx)"),
    "minus infinity": (
        lambda s, b, h, i, j: torch.where(i >= j, s, -math.inf),
        "where(q_idx >= kv_idx, score, -oo)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_formula(name: str) -> None:
    mod, expected = FORMULAS[name]
    assert formula(flexmod.trace(mod)) == expected


def test_a_long_formula_is_left_out() -> None:
    def doubling(score, b, h, q_idx, kv_idx):
        for _ in range(10):
            score = score * score + score
        return score

    text = formula(flexmod.trace(doubling))
    assert text.startswith("(a formula of ") and "see the program" in text
    assert int(text.split()[3]) > LONGEST


SMOOTH = {
    "softcap": mods.softcap(3.0),
    "gelu": lambda s, b, h, i, j: torch.nn.functional.gelu(s),
    "distance": mods.distance_penalty("log", 0.5, 2.0),
    "swin": mods.swin_2d_bias(2, 2, torch.zeros(9, 1)),
    "mixture": lambda s, b, h, i, j: torch.exp2(-s.abs()) + torch.sigmoid(s) * (i % 3) - j / 2,
}


@pytest.mark.parametrize("name", SMOOTH)
def test_formulas_have_the_value_of_their_programs(name: str) -> None:
    import sympy

    program = flexmod.trace(SMOOTH[name])
    at = {"score": 0.75, "b": 0, "h": 0, "q_idx": 3, "kv_idx": 1}
    exact = expression(program).replace(
        lambda part: isinstance(part, sympy.Indexed), lambda part: sympy.Integer(0)
    )
    named = {symbol: at[symbol.name] for symbol in exact.free_symbols}
    value = float(exact.subs(named))
    tensors = {
        k: torch.tensor(v, dtype=torch.float64 if k == "score" else None) for k, v in at.items()
    }
    wanted = SMOOTH[name](*tensors.values())
    assert value == pytest.approx(float(wanted), rel=1e-5)


def test_is_the_public_name() -> None:
    assert flexmod.explain is explain
    assert isinstance(flexmod.explain(*qkv(4)), Explanation)
