"""Drop-in use: names and signatures are torch's, and a torch program runs with one line changed."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
import torch.nn.attention.flex_attention as theirs

import flexmod
from flexmod import masks
from flexmod.testing import assert_matches, naive

PROGRAM = Path(__file__).resolve().parent / "programs" / "torch_program.py"
IMPORT = "from torch.nn.attention.flex_attention import ("


@pytest.fixture
def program():
    """Results of the program with its import changed; in float64, as its scores are large."""
    text = PROGRAM.read_text(encoding="utf-8")
    assert text.count(IMPORT) == 1
    namespace = {"__name__": "torch_program"}
    exec(compile(text.replace(IMPORT, "from flexmod import ("), str(PROGRAM), "exec"), namespace)
    torch.set_default_dtype(torch.float64)
    try:
        return namespace["main"]()
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_torch_program_runs_with_only_its_import_changed(program):
    assert len(program) == 12
    for name, (out, *inputs) in program.items():
        assert_matches(out, naive(*inputs)[0]), name


def test_every_public_name_of_torchs_module_is_here():
    assert not set(theirs.__all__) - set(flexmod.__all__)


@pytest.mark.parametrize(
    "name", ["flex_attention", "create_block_mask", "create_mask", "and_masks", "or_masks"]
)
def test_torchs_parameters_are_ours_in_order(name):
    def positional(function):
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters if p.kind is not p.KEYWORD_ONLY]

    ours, torchs = (positional(getattr(module, name)) for module in (flexmod, theirs))
    assert ours[: len(torchs)] == torchs
    keywords = inspect.signature(getattr(theirs, name)).parameters
    assert set(keywords) <= set(inspect.signature(getattr(flexmod, name)).parameters)


@pytest.mark.parametrize("kind", ["AuxRequest", "AuxOutput", "FlexKernelOptions"])
def test_records_have_torchs_fields(kind):
    ours, torchs = (getattr(module, kind).__annotations__ for module in (flexmod, theirs))
    assert list(ours) == list(torchs) if kind != "FlexKernelOptions" else set(torchs) <= set(ours)


def test_block_masks_have_torchs_public_members():
    public = {n for n in vars(theirs.BlockMask) if not n.startswith("_")}
    made = flexmod.create_block_mask(masks.causal(), None, None, 64, 64)
    for name in public:
        assert hasattr(made, name), name


CAUSAL = lambda n: flexmod.create_block_mask(masks.causal(), 1, 1, n, n, "cpu").to("meta")
ORDER = [
    # torch's order: each row is wrong in its own way and in those of all later rows.
    ({"value": torch.nested.nested_tensor([torch.zeros(2, 3, 8)])}, NotImplementedError, "nested"),
    ({"key": torch.zeros(3, 3, 20, 4, device="meta")}, ValueError, "one device"),
    ({"key": torch.zeros(3, 3, 20, 4)}, ValueError, "head_dim"),
    ({"query": torch.zeros(2, 20, 8)}, NotImplementedError, "4-D"),
    ({"key": torch.zeros(3, 3, 20, 8), "value": torch.zeros(3, 3, 20, 8)}, ValueError, "heads"),
    ({"key": torch.zeros(3, 2, 20, 8), "value": torch.zeros(3, 2, 20, 8)}, ValueError, "batch"),
    ({"block_mask": CAUSAL(8)}, ValueError,
     "Q_LEN"),
    ({"block_mask": CAUSAL(20)},
     RuntimeError, "block_mask is on meta"),
    ({"kernel_options": {"BACKEND": "NONE"}}, ValueError, "BACKEND"),
]  # fmt: skip


@pytest.mark.parametrize("row", range(len(ORDER)), ids=lambda n: ORDER[n][2])
def test_the_first_fault_in_torchs_order_is_named(row):
    good = torch.zeros(2, 2, 20, 8)
    arguments = {"query": good, "key": good, "value": good}
    for changes, _, _ in reversed(ORDER[row:]):
        arguments |= changes
    with pytest.raises(ORDER[row][1], match=ORDER[row][2]) as caught:
        flexmod.flex_attention(**arguments)
    assert isinstance(caught.value, flexmod.FlexmodError)


def test_a_mask_of_a_map_is_a_mask_mod():
    """It is called on tensors and inside other mods, and combined."""
    made = flexmod.create_block_mask(masks.sliding_window(5), None, None, 20, 20)
    places = torch.arange(20)
    b = h = torch.zeros((), dtype=torch.long)
    assert torch.equal(made.mask_mod(b, h, places[:, None], places), made.dense()[0, 0])
    later = lambda b, h, q, kv: made.mask_mod(b, h, q + 2, kv) & made.mask_mod(0, 0, q, kv)
    both = flexmod.and_masks(made.mask_mod, lambda b, h, q, kv: later(b, h, q, kv))
    wanted = made.dense() & made.dense().roll(-2, 2)
    found = flexmod.create_mask(both, 1, 1, 20, 20)
    assert torch.equal(found[:, :, :18], wanted[:, :, :18])
    with pytest.raises(flexmod.TraceError, match=r"takes \(b, h, q_idx, kv_idx\), got 2"):
        made.mask_mod(b, h)


def test_mixed_dtypes_are_refused_outside_of_autocast_only():
    query = torch.randn(1, 2, 20, 8)
    with pytest.raises(flexmod.ArgumentError, match=r"one dtype; got query torch.float32"):
        flexmod.flex_attention(query, query.half(), query)
    with torch.autocast("cpu", torch.float16):
        assert flexmod.flex_attention(query, query.half(), query).dtype == torch.float16
        double = query.double()
        assert flexmod.flex_attention(double, double, double).dtype == torch.float64
