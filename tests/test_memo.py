"""A call may run by what an earlier one worked out, if all that this read is the same."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import flexmod
from flexmod import cache, masks
from flexmod.testing import naive

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
QUERY, KEY, VALUE = torch.randn(3, 1, 2, 24, 16, generator=torch.Generator().manual_seed(5))
TABLE = torch.linspace(-1, 1, 2 * 24).view(2, 24)
LENGTHS = torch.tensor([20])


@pytest.fixture(autouse=True)
def _nothing_known():
    cache.clear_memory()


def biased(table, rate=0.5):
    return lambda s, b, h, q, k: s * rate + table[h, k]


def call(
    engine, query=QUERY, key=KEY, value=VALUE, table=TABLE, rate=0.5, mask=None, grad="qkvt",
    **arguments,
):  # fmt: skip
    """out, lse, and the gradients asked for, of one call."""
    tensors = [x.detach().to(DEVICE) for x in (query, key, value, table)]
    leaves = [x.requires_grad_(name in grad) for x, name in zip(tensors, "qkvt", strict=True)]
    out, lse = flexmod.flex_attention(
        *leaves[:3], biased(leaves[3], rate), mask or masks.causal(), return_lse=True,
        backend=engine, **arguments,
    )  # fmt: skip
    wanted = [x for x in (*leaves, arguments.get("sink")) if x is not None and x.requires_grad]
    if not wanted:
        return [out, lse]
    return [out, lse, *torch.autograd.grad(out.float().square().sum() + lse.sum(), wanted)]


def agree(ours, expected, tolerance=2e-5):
    tolerance = 2e-2 if ours[0].dtype == torch.float16 else tolerance
    for a, b in zip(ours, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        largest = float(b.detach().abs().max())
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * largest)


def offset(x):
    """The same values, 4 bytes after a multiple of 16."""
    room = torch.empty(x.numel() + 1, dtype=x.dtype)
    return room[1:].view(x.shape).copy_(x)


SINK = torch.tensor([0.3, -0.2], device=DEVICE)
CHANGES = {
    "values": {"query": QUERY + 1, "table": TABLE - 1},
    "query length": {"query": QUERY[:, :, :9].contiguous()},
    "key length": {"key": KEY[:, :, :17], "value": VALUE[:, :, :17]},
    "batch, shared keys": {"query": QUERY.expand(2, -1, -1, -1)},
    "head_dim": {"query": QUERY[..., :8], "key": KEY[..., :8]},
    "value_dim": {"value": VALUE[..., :8]},
    "strides": {"query": QUERY.mT.contiguous().mT},
    "alignment": {"key": offset(KEY)},
    "heads shared": {"key": KEY[:, :1], "value": VALUE[:, :1], "enable_gqa": True},
    "dtype": {"query": QUERY.half(), "key": KEY.half(), "value": VALUE.half()},
    "number": {"rate": -0.25},
    "zero": {"rate": 0.0},
    "table dtype": {"table": TABLE.double()},
    "table shape": {"table": torch.cat([TABLE, TABLE], 1)},
    "table strides": {"table": TABLE.t().contiguous().t()},
    "mask": {"mask": masks.sliding_window(5)},
    "window": {"mask": masks.sliding_window(7)},
    "captured mask": {"mask": masks.padding(LENGTHS)},
    "scale": {"scale": 0.5},
    "scale 0": {"scale": 0.0},
    "tiles": {"kernel_options": {"BLOCK_M": 16}},
    "sink": {"sink": SINK},
    "learned sink": {"sink": SINK.clone().requires_grad_()},
    "dropout": {"dropout_p": 0.25, "dropout_seed": 3},
    "other seed": {"dropout_p": 0.25, "dropout_seed": 4},
    "in order": {"deterministic": True},
    "no gradient": {"grad": ""},
    "gradient of the table": {"grad": "t"},
    "gradient of the query": {"grad": "q"},
}


def test_each_ingredient_counts():
    """One change after the other, and again in the other order when all of them are known."""
    expected = {name: call("reference", **change) for name, change in CHANGES.items()}
    for name in (*CHANGES, *reversed(CHANGES)):
        try:
            agree(call("fa2", **CHANGES[name]), expected[name])
        except Exception as error:
            raise AssertionError(name) from error


def test_a_like_call_neither_checks_nor_prepares(monkeypatch):
    from flexmod import attention, checks

    def attend(table, *tensors):
        mask = flexmod.create_block_mask(masks.causal(), None, None, 24, 24, device=DEVICE)
        return flexmod.flex_attention(*tensors, biased(table), mask, backend="fa2")

    tensors = [x.to(DEVICE) for x in (TABLE, QUERY, KEY, VALUE)]
    attend(*tensors)
    fail = lambda *_, **__: pytest.fail("the long way")
    monkeypatch.setattr(checks, "tensors", fail)
    monkeypatch.setattr(attention, "make_problem", fail)
    before, tensors = cache.stats(), [x + 1 for x in tensors]
    out = attend(*tensors)
    assert cache.stats().traces == before.traces
    assert cache.stats().memory_hits == before.memory_hits + 1
    expected = naive(*tensors[1:], biased(tensors[0]), masks.causal())[0]
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_autocast_default_dtype_and_grad_mode():
    for state in (
        torch.autocast(DEVICE, dtype=torch.bfloat16), torch.no_grad(), torch.inference_mode(),
    ):  # fmt: skip
        agree(call("fa2"), call("reference"))
        with state:
            ours, expected = call("fa2", grad=""), call("reference", grad="")
        assert ours[0].dtype == expected[0].dtype
        agree([x.float() for x in ours], [x.float() for x in expected], 2e-2)
    torch.set_default_dtype(torch.float64)
    try:
        agree(call("fa2"), call("reference"))
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_map_of_each_call_is_used():
    """Maps of one shape and program, whose live blocks differ with the tensor they capture."""
    tensors = [x.to(DEVICE) for x in torch.randn(3, 1, 1, 300, 16)]
    for ids in (torch.zeros(300), torch.arange(300) // 100, torch.arange(300) // 7):
        mask_mod = masks.document(ids.long().to(DEVICE))
        block_mask = flexmod.create_block_mask(mask_mod, None, None, 300, 300, device=DEVICE)
        out = flexmod.flex_attention(*tensors, None, block_mask, backend="fa2")
        torch.testing.assert_close(
            out.double(), naive(*tensors, None, mask_mod)[0], rtol=1e-5, atol=1e-5
        )


def test_a_stale_map_is_still_refused():
    ids = torch.zeros(24, dtype=torch.long, device=DEVICE)
    block_mask = flexmod.create_block_mask(masks.document(ids), None, None, 24, 24, device=DEVICE)
    tensors = [x.to(DEVICE) for x in (QUERY, KEY, VALUE)]
    for _ in range(2):
        flexmod.flex_attention(*tensors, None, block_mask, backend="fa2")
    ids[3:] = 1
    with pytest.raises(flexmod.errors.BlockMaskError, match="changed in place"):
        flexmod.flex_attention(*tensors, None, block_mask, backend="fa2")


def test_wrong_arguments_are_refused_each_time():
    tensors = [x.to(DEVICE) for x in (QUERY, KEY, VALUE)]
    wrong = [
        {"kernel_options": {"BLOCK_Z": 1}}, {"dropout_p": 1.5}, {"sink": torch.zeros(3)},
        {"return_lse": True, "return_aux": flexmod.AuxRequest(lse=True)}, {"dropout_p": [0.1]},
    ]  # fmt: skip
    flexmod.flex_attention(*tensors, backend="fa2")
    for arguments in wrong * 2:
        with pytest.raises(flexmod.errors.ArgumentError):
            flexmod.flex_attention(*tensors, backend="fa2", **arguments)


def test_a_backward_with_another_layout_of_its_gradient():
    tensors = [x.to(DEVICE).clone().requires_grad_() for x in (QUERY, KEY, VALUE)]
    expected = [x.detach().double().requires_grad_() for x in tensors]
    truth = naive(*expected, None, masks.causal())[0]
    seed = torch.randn(QUERY.shape, device=DEVICE)
    for like in (seed, seed.mT.contiguous().mT, torch.ones((), device=DEVICE).expand(seed.shape),
                 seed.transpose(1, 2).contiguous().transpose(1, 2)):  # fmt: skip
        out = flexmod.flex_attention(*tensors, None, masks.causal(), backend="fa2")
        ours = torch.autograd.grad(out, tensors, like)
        wanted = torch.autograd.grad(truth, expected, like.double(), retain_graph=True)
        for a, b in zip(ours, wanted, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))


def test_hooks_that_change_saved_tensors():
    tensors = [x.to(DEVICE).clone().requires_grad_() for x in (QUERY, KEY, VALUE)]
    plain = flexmod.flex_attention(*tensors, backend="fa2")
    expected = torch.autograd.grad(plain.square().sum(), tensors)
    turned = lambda x: x.mT.contiguous() if x.ndim == 4 else x
    with torch.autograd.graph.saved_tensors_hooks(
        turned, lambda x: x.mT if x.ndim == 4 else x.clone()
    ):
        out = flexmod.flex_attention(*tensors, backend="fa2")
    ours = torch.autograd.grad(out.square().sum(), tensors)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_nothing_is_kept_alive():
    tensors = [x.to(DEVICE).clone().requires_grad_() for x in (QUERY, KEY, VALUE)]
    table = TABLE.to(DEVICE).clone().requires_grad_()
    sink = SINK.clone().requires_grad_()
    for _ in range(2):
        out = flexmod.flex_attention(*tensors, biased(table), masks.causal(), sink=sink,
                                     backend="fa2")  # fmt: skip
        out.sum().backward()
    for x in (*tensors, table, sink):
        x.grad = None
    held = [weakref.ref(x) for x in (*tensors, table, sink, out)]
    del tensors, table, sink, out, x
    gc.collect()
    assert not [ref for ref in held if ref() is not None]


def test_negated_views_are_read_with_their_sign():
    """A conjugate's imaginary part is stored with the other sign."""
    query = torch.complex(torch.zeros_like(QUERY), QUERY).to(DEVICE).conj().imag
    assert query.is_neg()
    out = flexmod.flex_attention(query, KEY.to(DEVICE), VALUE.to(DEVICE), backend="fa2")
    expected = naive(-QUERY.to(DEVICE), KEY.to(DEVICE), VALUE.to(DEVICE))[0]
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_sink_with_strides():
    sink = torch.tensor([0.5, 9.0, -1.0, 9.0], device=DEVICE)[::2]
    agree(call("fa2", sink=sink), call("reference", sink=sink))


def test_a_query_whose_last_axis_is_not_the_fastest_by_its_strides():
    for query in (QUERY.expand(2, -1, -1, -1), QUERY[..., :1].mT.contiguous().mT):
        ours = call("fa2", query=query, key=KEY[..., : query.shape[-1]])
        agree(ours, call("reference", query=query, key=KEY[..., : query.shape[-1]]))
