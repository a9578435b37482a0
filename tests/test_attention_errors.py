"""Every refusal of `flex_attention`: its type, torch's type beneath it, and the argument's name."""

from __future__ import annotations

import pytest
import torch

import flexmod
from flexmod import (
    ArgumentError,
    AuxRequest,
    BackendError,
    BlockMaskError,
    DeviceError,
    IndexRangeError,
    TraceError,
    UnsupportedError,
    create_block_mask,
    masks,
)
from flexmod.checks import OTHER_OPTIONS, TILE_OPTIONS
from flexmod.options import TORCH_BACKENDS

MASK = create_block_mask(masks.causal(), None, None, 16, 16)
TABLE, LEARNED = torch.zeros(16), torch.zeros(16, requires_grad=True)


def tensors(**changes):
    """Valid query, key and value, some replaced."""
    found = {name: torch.randn(2, 4, 16, 8) for name in ("query", "key", "value")}
    return found | changes


def empty(*shape, **options):
    return torch.randn(*shape, **options)


NESTED = torch.nested.nested_tensor([torch.zeros(4, 3, 8), torch.zeros(4, 5, 8)])
META = torch.zeros(2, 4, 16, 8, device="meta")
# name: (changed arguments, our type, torch's type, parts of the text)
REFUSED = {
    "a list": ({"query": [1.0]}, ArgumentError, ValueError, ["query", "list"]),
    "no key": ({"key": None}, ArgumentError, ValueError, ["key", "NoneType"]),
    "nested": ({"value": NESTED}, UnsupportedError, NotImplementedError, ["value", "nested"]),
    "two devices": ({"key": META}, DeviceError, ValueError, ["key meta", "query cpu"]),
    "two head_dims": ({"key": empty(2, 4, 16, 4)}, ArgumentError, ValueError, ["key", "8 and 4"]),
    "three axes": (
        {name: empty(4, 16, 8) for name in ("query", "key", "value")},
        UnsupportedError, NotImplementedError, ["query", "4-D", "[4, 16, 8]"],
    ),
    "five axes": (
        {"value": empty(1, 2, 4, 16, 8)}, UnsupportedError, NotImplementedError, ["value", "4-D"],
    ),
    "fewer key heads": (
        {"key": empty(2, 2, 16, 8), "value": empty(2, 2, 16, 8)},
        ArgumentError, ValueError, ["4 heads", "enable_gqa"],
    ),
    "no whole group": (
        {"key": empty(2, 3, 16, 8), "value": empty(2, 3, 16, 8), "enable_gqa": True},
        ArgumentError, ValueError, ["(4)", "(3)", "multiple"],
    ),
    "no key heads": (
        {"key": empty(2, 0, 16, 8), "value": empty(2, 0, 16, 8), "enable_gqa": True},
        ArgumentError, ValueError, ["(0)"],
    ),
    "other value heads": ({"value": empty(2, 2, 16, 8)}, ArgumentError, ValueError, ["4 and 2"]),
    "another key batch": (
        {"key": empty(3, 4, 16, 8), "value": empty(3, 4, 16, 8)},
        ArgumentError, ValueError, ["key's batch", "3"],
    ),
    "another value batch": ({"value": empty(1, 4, 16, 8)}, ArgumentError, ValueError, ["batch"]),
    "another value seqlen": (
        {"value": empty(2, 4, 17, 8)}, ArgumentError, ValueError, ["seqlen", "16 and 17"],
    ),
    "mixed dtypes": (
        {"value": empty(2, 4, 16, 8).half()}, ArgumentError, ValueError, ["value torch.float16"],
    ),
    "integers": (
        {n: torch.zeros(2, 4, 16, 8, dtype=torch.int32) for n in ("query", "key", "value")},
        ArgumentError, ValueError, ["dtype torch.int32"],
    ),
    "no head_dim": (
        {"query": empty(2, 4, 16, 0), "key": empty(2, 4, 16, 0)},
        ArgumentError, ValueError, ["head_dim"],
    ),
    "no value_dim": ({"value": empty(2, 4, 16, 0)}, ArgumentError, ValueError, ["head_dim"]),
    "lse twice": (
        {"return_lse": True, "return_aux": AuxRequest(lse=True)},
        ArgumentError, ValueError, ["return_lse", "return_aux"],
    ),
    "lse and nothing more": (
        {"return_lse": True, "return_aux": AuxRequest()}, ArgumentError, ValueError, ["not both"],
    ),
    "an unknown option": (
        {"kernel_options": {"BLOCK_K": 32}}, ArgumentError, ValueError, ["BLOCK_K", "BLOCK_M"],
    ),
    "an odd tile": (
        {"kernel_options": {"BLOCK_M": 48}}, ArgumentError, ValueError, ["BLOCK_M", "48"],
    ),
    "no warps": ({"kernel_options": {"num_warps": 0}}, ArgumentError, ValueError, ["num_warps"]),
    "a float tile": (
        {"kernel_options": {"fwd_BLOCK_N": 64.0}}, ArgumentError, ValueError, ["BLOCK_N"],
    ),
    "no stages": ({"kernel_options": {"num_stages": 0}}, ArgumentError, ValueError, ["num_stages"]),
    "an unknown BACKEND": (
        {"kernel_options": {"BACKEND": "CUDNN"}}, ArgumentError, ValueError, ["BACKEND", "CUDNN"],
    ),
    "an unknown backend": ({"backend": "triton"}, ArgumentError, ValueError, ["backend", "triton"]),
    "a sink of another length": (
        {"sink": torch.zeros(3)}, ArgumentError, ValueError, ["sink", "[4]"],
    ),
    "a sink of integers": (
        {"sink": torch.zeros(4, dtype=torch.int64)}, ArgumentError, ValueError, ["sink", "int64"],
    ),
    "a number as sink": ({"sink": 1.0}, ArgumentError, ValueError, ["sink", "float"]),
    "a sink elsewhere": ({"sink": META[0, :, 0, 0]}, DeviceError, RuntimeError, ["sink", "meta"]),
    "dropout of all": ({"dropout_p": 1.0}, ArgumentError, ValueError, ["dropout_p", "1.0"]),
    "dropout of text": ({"dropout_p": "0.1"}, ArgumentError, ValueError, ["dropout_p"]),
    "a capture elsewhere": (
        {"score_mod": lambda s, b, h, q, k: s + META[b, h, q, 0]},
        DeviceError, RuntimeError, ["meta", "cpu", ".to("],
    ),
    "a mask's capture elsewhere": (
        {"block_mask": lambda b, h, q, k: META[b, h, q, 0] > 0}, DeviceError, ValueError, ["meta"],
    ),
    "a mask that learns": (
        {"block_mask": lambda b, h, q, k: LEARNED[q] > 0},
        ArgumentError, ValueError, ["gradient", "detach"],
    ),
    "a score_mod as mask": (
        {"block_mask": lambda s, b, h, q, k: s}, TraceError, TypeError, ["mask_mod"],
    ),
    "a mask_mod as score": ({"score_mod": masks.causal()}, TraceError, TypeError, ["score_mod"]),
    "a score past a table": (
        {"score_mod": lambda s, b, h, q, k: s + TABLE[q + k]},
        IndexRangeError, IndexError, ["TABLE[q + k]", "[16]", "test_attention_errors.py"],
    ),
    "a mask past a table": (
        {"block_mask": lambda b, h, q, k: TABLE[q + k] > 0},
        IndexRangeError, IndexError, ["TABLE[q + k]", "[16]"],
    ),
    "a map of other lengths": (
        {"block_mask": create_block_mask(masks.causal(), None, None, 16, 32)},
        BlockMaskError, ValueError, ["block_mask", "(16, 32)", "(16, 16)"],
    ),
    "a map of rounded lengths": (
        {"block_mask": create_block_mask(masks.causal(), None, None, 128, 128)},
        BlockMaskError, ValueError, ["(128, 128)"],
    ),
    "a map of another batch": (
        {"block_mask": create_block_mask(masks.causal(), 3, None, 16, 16)},
        BlockMaskError, ValueError, ["B=3", "2"],
    ),
    "a map of other heads": (
        {"block_mask": create_block_mask(masks.causal(), None, 2, 16, 16)},
        BlockMaskError, ValueError, ["H=2", "4"],
    ),
    "a map of one batch that reads b": (
        {"block_mask": create_block_mask(lambda b, h, q, k: k <= b, 1, None, 16, 16)},
        BlockMaskError, ValueError, ["B=1", "reads b"],
    ),
    "a map of one head that reads h": (
        {"block_mask": create_block_mask(lambda b, h, q, k: k <= h, None, 1, 16, 16)},
        BlockMaskError, ValueError, ["H=1", "reads h"],
    ),
    "a map elsewhere": ({"block_mask": MASK.to("meta")}, DeviceError, RuntimeError, ["block_mask"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    changes, ours, torchs, parts = REFUSED[name]
    with pytest.raises(ours) as caught:
        flexmod.flex_attention(**tensors(**changes))
    assert type(caught.value) is ours and issubclass(ours, torchs)
    assert issubclass(ours, flexmod.FlexmodError)
    for part in parts:
        assert part in str(caught.value)


def test_what_is_refused_is_served_without_the_fault():
    """So that no row above passes for another reason."""
    out = flexmod.flex_attention(**tensors(block_mask=MASK))
    assert out.shape == (2, 4, 16, 8)
    assert (
        flexmod.flex_attention(**tensors(score_mod=lambda s, b, h, q, k: s + TABLE[q]))
        .isfinite()
        .all()
    )


@pytest.mark.parametrize("prefix", ["", "fwd_", "bwd_"])
@pytest.mark.parametrize("option", [*TILE_OPTIONS, *OTHER_OPTIONS])
def test_known_options_change_no_result(option, prefix):
    values = {"BACKEND": "TRITON", "num_stages": 3, "num_warps": 2}
    inputs = tensors(block_mask=MASK)
    plain = flexmod.flex_attention(**inputs)
    hinted = flexmod.flex_attention(
        **inputs, kernel_options={f"{prefix}{option}": values.get(option, 32)}
    )
    torch.testing.assert_close(hinted, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", TORCH_BACKENDS)
def test_torchs_backends_are_accepted(name):
    inputs = tensors()
    given = flexmod.flex_attention(**inputs, kernel_options={"BACKEND": name})
    assert torch.equal(given, flexmod.flex_attention(**inputs))


def test_an_engine_that_cannot_serve_says_why():
    with pytest.raises(BackendError, match=r"fa2.*head_dim 2048") as caught:
        wide = torch.randn(1, 1, 16, 2048)
        flexmod.flex_attention(wide, wide, wide, backend="fa2")
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, RuntimeError)


def test_a_stale_map_is_refused():
    ids = torch.arange(16) // 4
    made = create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, 16, 16)
    flexmod.flex_attention(**tensors(block_mask=made))
    ids += 1
    with pytest.raises(BlockMaskError, match="changed in place"):
        flexmod.flex_attention(**tensors(block_mask=made))


def test_an_index_out_of_range_is_no_error_where_the_mask_hides_it():
    score = lambda s, b, h, q, k: s + TABLE[q - k]  # negative ones wrap, and are hidden
    far = lambda s, b, h, q, k: s + TABLE[k + 8]
    seen = flexmod.flex_attention(**tensors(score_mod=score, block_mask=MASK))
    assert seen.isfinite().all()
    near = create_block_mask(lambda b, h, q, k: k < 8, None, None, 16, 16)
    for engine in ("reference", "cpu"):
        out = flexmod.flex_attention(**tensors(score_mod=far, block_mask=near), backend=engine)
        assert out.isfinite().all()
