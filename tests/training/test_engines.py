"""Triton's backward, in the interpreter without a GPU, equals autograd of the naive form."""

from __future__ import annotations

import pytest
import torch

import flexmod
from flexmod import masks, mods
from flexmod.kernels.cpu import walk
from flexmod.testing import assert_matches

HEADS, DIM = 2, 16
RAGGED, EVEN = (33, 47), (32, 32)
TILES = {"BLOCK_M": 16, "BLOCK_N": 32}
STEPS = torch.tensor([2, 0, 1, 2, 2, 1])

# A kind of sum for the captured tensor each -> how the mod is made, and its learnable tensors.
MODS = {
    "none": (None, []),
    "softcap": (lambda: mods.softcap(2.0), []),
    "alibi": (mods.alibi, [(HEADS,)]),
    "plane": (lambda t, u: lambda s, b, h, i, j: s * t + u[h], [(), (HEADS,)]),
    "row": (lambda t: lambda s, b, h, i, j: s * t[h, i], [(HEADS, 64)]),
    "column": (lambda t: lambda s, b, h, i, j: s + t[j // 2], [(64,)]),
    "diagonal": (lambda t: mods.relative_bias(t), [(HEADS, 15)]),
    "far diagonal": (lambda t: lambda s, b, h, i, j: s + t[j - i + 63], [(128,)]),
    "element": (lambda t: lambda s, b, h, i, j: s + t[(i * j) % 7], [(7,)]),
    "two axes": (lambda t: lambda s, b, h, i, j: s + t[h, i, j], [(HEADS, 64, 64)]),
    "int table": (lambda t: lambda s, b, h, i, j: s + t[STEPS[j % 6]], [(3,)]),
    "several": (
        lambda t, u: lambda s, b, h, i, j: s * t[i] + t[j] * u[(j - i).abs()], [(64,), (64,)],
    ),
    "score not used": (lambda t: lambda s, b, h, i, j: -t[h] * (i - j).abs(), [(HEADS,)]),
}  # fmt: skip
MASKS = {
    "none": None,
    "causal": masks.causal(),
    "window": masks.sliding_window(9),
    "empty rows": lambda b, h, i, j: (i < 16) & (j < 9),
    "documents": masks.and_masks(masks.causal(), masks.document(masks.document_ids([20, 13, 31]))),
}
CASES = [
    ("none", "none", RAGGED), ("none", "causal", RAGGED), ("none", "window", EVEN),
    ("softcap", "causal", RAGGED), ("softcap", "empty rows", EVEN), ("alibi", "causal", RAGGED),
    ("plane", "none", RAGGED), ("plane", "window", EVEN), ("row", "causal", RAGGED),
    ("column", "window", RAGGED), ("diagonal", "none", RAGGED), ("diagonal", "causal", EVEN),
    ("far diagonal", "window", RAGGED), ("element", "empty rows", RAGGED),
    ("two axes", "causal", RAGGED), ("int table", "documents", EVEN), ("several", "causal", RAGGED),
    ("score not used", "none", EVEN),
]  # fmt: skip


@pytest.fixture
def fa2(lanes):
    return lanes("fa2", torch.float32)


def tensors(lane, lengths, shapes=(), heads=(HEADS, HEADS), batches=(1, 1), dims=(DIM, DIM)):
    q_len, kv_len = lengths
    return [
        lane.randn(batches[0], heads[0], q_len, dims[0]),
        lane.randn(batches[1], heads[1], kv_len, dims[0]),
        lane.randn(batches[1], heads[1], kv_len, dims[1]),
        *(lane.randn(*shape) for shape in shapes),
    ]


@pytest.mark.parametrize(("mod", "mask", "lengths"), CASES, ids=lambda x: str(x).replace(" ", "_"))
def test_mods_and_masks(fa2, check_gradients, mod, mask, lengths):
    make, shapes = MODS[mod]
    given = tensors(fa2, lengths, shapes)
    found = check_gradients(fa2, given, make, MASKS[mask], kernel_options=TILES)
    if mod == "score not used":
        assert not found["query"].any() and not found["key"].any()


def test_every_mod_and_mask_of_the_table_is_used():
    assert {mod for mod, _, _ in CASES} == set(MODS)
    assert {mask for _, mask, _ in CASES} == set(MASKS)


SHAPES = {
    "groups of query heads": {"heads": (4, 2)},
    "shared kv batch": {"batches": (2, 1), "heads": (2, 1)},
    "wider values": {"dims": (8, 24)},
    "odd dimensions": {"dims": (7, 3)},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(fa2, check_gradients, shape):
    given = tensors(fa2, (20, 35), [(2,)], **SHAPES[shape])
    make = lambda t: lambda s, b, h, i, j: s * t[h % 2] + t[b]
    check_gradients(fa2, given, make, masks.causal(), kernel_options=TILES)


def test_blocks_that_tiles_do_not_divide(fa2, check_gradients):
    given = tensors(fa2, RAGGED)
    mask = masks.sliding_window(9)
    block_mask = flexmod.create_block_mask(mask, None, None, *RAGGED, fa2.device, (24, 40))
    check_gradients(fa2, given, None, mask, block_mask=block_mask, kernel_options=TILES)


def test_sink_and_dropout_are_the_references(fa2):
    """The oracle has neither; the reference is checked by finite differences."""
    given = [*tensors(fa2, RAGGED), fa2.randn(HEADS), fa2.randn(HEADS, 15)]
    seeds = fa2.randn(1, HEADS, RAGGED[0], DIM), fa2.randn(1, HEADS, RAGGED[0])

    def run(backend, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in given]
        results = flexmod.flex_attention(
            *leaves[:3], mods.relative_bias(leaves[4]), MASKS["empty rows"], return_lse=True,
            sink=leaves[3], dropout_p=0.3, dropout_seed=2**40 + 3, backend=backend,
            kernel_options=TILES,
        )  # fmt: skip
        grads = torch.autograd.grad(results, leaves, [s.to(dtype) for s in seeds])
        return [*results, *grads]

    for got, wanted in zip(run("fa2", fa2.dtype), run("reference", torch.float64), strict=True):
        largest = max(float(wanted.abs().max()), 0.1)
        assert float((got.double() - wanted).abs().max()) < 1e-5 * largest


@pytest.fixture
def poisoned(monkeypatch):
    """Memory that nothing has been written to reads as NaN, on every engine."""
    plain, plain_new = torch.empty, torch.Tensor.new_empty

    def spoil(x):
        return x.fill_(float("nan")) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", lambda *a, **k: spoil(plain(*a, **k)))
    like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: spoil(like(*a, **k)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: spoil(plain_new(*a, **k)))
    assert torch.empty(1).isnan() and torch.zeros(1).new_empty(1).isnan()


@pytest.mark.parametrize("name", ["cpu", "fa2"])
def test_empty_rows_on_poisoned_buffers(poisoned, lanes, check_gradients, name):
    lane = lanes(name, torch.float32)
    given = tensors(lane, RAGGED, [(HEADS, 15)])
    mask = lambda b, h, i, j: (i >= 5) & (i < 16) & (j < 9)
    found = check_gradients(lane, given, mods.relative_bias, mask, kernel_options=TILES)
    assert not found["query"][:, :, 16:].any() and not found["query"][:, :, :5].any()
    assert not found["key"][:, :, 9:].any() and not found["value"][:, :, 9:].any()


# Not fa2: in a partial tile its products take hidden rows along, as torch's do (docs/design.md).
@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("make", [None, mods.softcap(2.0)], ids=["plain", "softcap"])
def test_what_a_mask_hides_may_be_nan(lanes, name, make):
    """Keys and values that no query sees: finite gradients, and 0 there."""
    lane = lanes(name, torch.float32)
    query, key, value = tensors(lane, (20, 35))
    clean = key.clone(), value.clone()
    key[:, :, 11], value[:, :, 11] = float("nan"), float("inf")
    mask = lambda b, h, i, j: (i >= j) & (j != 11)

    def run(*given):
        leaves = [x.clone().requires_grad_() for x in given]
        out = flexmod.flex_attention(
            *leaves, make, mask, backend=lane.backend, kernel_options=TILES
        )
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    for got, wanted in zip(run(query, key, value), run(query, *clean), strict=True):
        assert_matches(got, wanted.double())


@pytest.mark.parametrize("name", ["reference", "cpu", "fa2"])
def test_gradients_of_lse_that_is_minus_infinity_do_not_count(lanes, name):
    lane = lanes(name, torch.float32)
    leaves = [x.requires_grad_() for x in tensors(lane, (20, 35))]
    mask = lambda b, h, i, j: (i < 7) & (j < 9)
    out, lse = flexmod.flex_attention(
        *leaves, None, mask, return_lse=True, backend=lane.backend, kernel_options=TILES
    )
    seed = torch.ones_like(lse)
    plain = torch.autograd.grad((out, lse), leaves, (out, seed), retain_graph=True)
    seed[:, :, 7:] = float("nan")
    for got, wanted in zip(
        torch.autograd.grad((out, lse), leaves, (out, seed)), plain, strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["cpu", "fa2"])
def test_half_precision_is_no_worse_than_twice_the_naive_error(lanes, name, dtype):
    from flexmod.testing import naive, naive_same_dtype

    lane = lanes(name, dtype)
    given = [*tensors(lane, (20, 35)), torch.randn(HEADS, 15)]

    def grads(run, cast):
        leaves = [cast(x).requires_grad_() for x in given]
        out = run(*leaves[:3], mods.relative_bias(leaves[3]), masks.causal())
        return torch.autograd.grad((out.double() ** 2).sum(), leaves)

    exact = grads(lambda *a: naive(*a)[0], lambda x: x.double())
    same = grads(lambda *a: naive_same_dtype(*a)[0], lambda x: x.clone())
    found = grads(
        lambda *a: flexmod.flex_attention(*a, backend=name, kernel_options=TILES),
        lambda x: x.clone(),
    )
    for got, theirs, wanted in zip(found, same, exact, strict=True):
        error, yardstick = ((x.double() - wanted).abs().max() for x in (got, theirs))
        half_ulp = torch.finfo(got.dtype).eps / 2 * wanted.abs().max()
        assert error <= max(2 * yardstick, half_ulp)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_autocast_rounds_the_inputs_and_does_not_reach_into_an_engine(lanes, name, dtype):
    """Scores are worked out in float32, forward and backward, from inputs in autocast's dtype."""
    leaves = [x.requires_grad_() for x in tensors(lanes(name, dtype), (20, 35))]

    def grads(around):
        rounded = torch.float64 if dtype == torch.float64 else torch.bfloat16
        given = leaves if around else [x.to(rounded) for x in leaves]
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            out = flexmod.flex_attention(*given, mods.softcap(2.0), masks.causal(), backend=name)
        assert out.dtype == rounded
        # torch's own operations, which the reference is made of, follow autocast in a backward.
        with torch.autocast("cpu", torch.bfloat16, enabled=around and name == "cpu"):
            return out, *torch.autograd.grad(out.float().square().sum(), leaves)

    plain, inside = grads(False), grads(True)
    for got, wanted in zip(inside, plain, strict=True):
        assert torch.equal(got, wanted)


# Not the reference: autograd of the definition is 0 times infinity there.
@pytest.mark.parametrize("name", ["cpu", "fa2"])
def test_a_score_of_minus_infinity_passes_no_gradient(lanes, name):
    """log(0): the key is not seen, as if it were masked; so its table entry receives 0."""
    lane = lanes(name, torch.float32)
    query, key, value = tensors(lane, (20, 35))
    table = (torch.arange(35, device=lane.device) % 3).float().requires_grad_()
    out, lse = flexmod.flex_attention(
        query, key, value, lambda s, b, h, i, j: s + torch.log(table[j]), return_lse=True,
        backend=name, kernel_options=TILES,
    )  # fmt: skip
    (grad,) = torch.autograd.grad(out.square().sum() + lse.sum(), table)
    assert torch.isfinite(grad).all() and not grad[::3].any() and grad[1::3].all()


def test_full_blocks_skip_the_mask(monkeypatch):
    """A spy on the cpu engine: the mask is evaluated in partial blocks only, backward too."""
    seen = []
    plain = walk.visible_positions

    def spy(problem, keys, indices):
        seen.append((keys.full, plain(problem, keys, indices) is None))
        return plain(problem, keys, indices)

    monkeypatch.setattr(walk, "visible_positions", spy)
    query, key, value = (torch.randn(1, 1, 512, 4, requires_grad=True) for _ in range(3))
    out = flexmod.flex_attention(query, key, value, block_mask=masks.causal(), backend="cpu")
    forward = list(seen)
    seen.clear()
    out.sum().backward()
    assert seen == forward
    assert {(True, True), (False, False)} == set(seen)


def test_sums_are_reduced_before_they_touch_memory(monkeypatch):
    """A bias per head on 64 x 64 positions: one number a head and step is added by index."""
    sizes = []
    plain = torch.Tensor.index_add_
    monkeypatch.setattr(
        torch.Tensor, "index_add_", lambda x, dim, index, source: (
            sizes.append(source.numel()), plain(x, dim, index, source))[1],
    )  # fmt: skip
    query, key, value = (torch.randn(1, HEADS, 64, 4) for _ in range(3))
    for shape, make, expected in (
        ((HEADS,), mods.head_bias, HEADS),
        ((HEADS, 127), lambda t: lambda s, b, h, i, j: s + t[h, j - i + 63], HEADS * 127),
        ((64,), lambda t: lambda s, b, h, i, j: s + t[j], 64),
    ):
        table = torch.randn(shape, requires_grad=True)
        out = flexmod.flex_attention(query, key, value, make(table), backend="cpu")
        sizes.clear()
        out.sum().backward()
        assert sum(sizes) == expected
