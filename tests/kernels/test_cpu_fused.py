"""Calls without a score_mod on the cpu engine: pieces of the map, by torch's fused kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import flexmod
from flexmod import masks
from flexmod.kernels.cpu import fused, pieces
from flexmod.testing import assert_matches, naive, naive_same_dtype

BLOCK = 16
DOCUMENTS = masks.document(masks.document_ids([70, 9, 40, 31]))


@dataclass(frozen=True)
class Case:
    """query [batches[0], heads[0], lengths[0], dim], key and value [batches[1], heads[1], ...]."""

    mask: Any = None
    lengths: tuple[int, int] = (150, 150)
    batches: tuple[int, int] = (2, 2)
    heads: tuple[int, int] = (2, 2)
    dim: int = 8
    settings: dict[str, Any] = field(default_factory=dict)

    def tensors(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Leaves that lie in memory as [B, length, H, dim]."""
        sizes = zip((0, 1, 1), self.batches[:1] + self.batches[1:] * 2, strict=True)
        shapes = [(b, self.lengths[n], self.heads[n], self.dim) for n, b in sizes]
        drawn = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]
        return [x.transpose(1, 2).requires_grad_() for x in drawn]

    def call(self, tensors: list[torch.Tensor], **settings: Any) -> Any:
        mask = self.mask and flexmod.create_block_mask(
            self.mask, self.batches[0], self.heads[0], *self.lengths, BLOCK_SIZE=BLOCK
        )
        given = {"backend": "cpu", "enable_gqa": True, **self.settings, **settings}
        return flexmod.flex_attention(*tensors, block_mask=mask, **given)


CASES = {
    "everything": Case(),
    "causal": Case(masks.causal()),
    "more keys": Case(masks.prefix_lm(40), (33, 170)),
    "fewer keys": Case(masks.causal(), (170, 33)),
    "one query": Case(lengths=(1, 90)),
    "window": Case(masks.sliding_window(50)),
    "documents": Case(masks.and_masks(masks.causal(), DOCUMENTS)),
    "all partial": Case(lambda b, h, i, j: j % 3 == 0),
    "keys alone": Case(lambda b, h, i, j: j != 77),
    "blind rows": Case(lambda b, h, i, j: (i > 40) & (i < 120) & (j > 20) & (j < 60)),
    "nothing": Case(masks.nothing_mask, (20, 20)),
    "groups": Case(masks.causal(), heads=(6, 2)),
    "one key head": Case(masks.sliding_window(50), heads=(4, 1)),
    "groups of one batch": Case(masks.causal(), batches=(1, 1), heads=(6, 2)),
    "shared keys": Case(masks.causal(), batches=(3, 1), heads=(2, 1)),
    "a mask a head": Case(lambda b, h, i, j: i >= j * (1 + h % 2), heads=(4, 2)),
    "a mask a batch": Case(lambda b, h, i, j: i >= j + 20 * b, heads=(4, 2)),
    "a mask a head of one batch": Case(
        lambda b, h, i, j: i >= j * (1 + h % 3), batches=(1, 1), heads=(4, 2)
    ),
    "scale": Case(masks.causal(), settings={"scale": -0.7}),
    "odd dimension": Case(masks.causal(), dim=7),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Many pieces of short sequences, whatever cores there are."""
    monkeypatch.setattr(pieces, "_RECTANGLE", 2 * BLOCK**2)
    monkeypatch.setattr(pieces, "_STRIP", 3 * BLOCK**2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


@pytest.fixture
def kernels(monkeypatch):
    """How often torch's kernels were called: forward, backward."""
    counts = {"_attention": 0, "_attention_backward": 0}

    def spy(name, plain):
        def call(*arguments, **settings):
            counts[name] += 1
            return plain(*arguments, **settings)

        return call

    for name in counts:
        monkeypatch.setattr(fused, name, spy(name, getattr(fused, name)))
    return counts


def run(attend, leaves):
    """out, lse, and gradients of all leaves for an upstream gradient of out."""
    out, lse = attend(leaves)
    seed = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    return [out, lse, *torch.autograd.grad(out, leaves, seed.to(out.dtype))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_pieces_make_the_whole(kernels, name, dtype):
    case = CASES[name]
    leaves = case.tensors(dtype)
    found = run(lambda x: case.call(x, return_lse=True), leaves)
    assert kernels["_attention"] == kernels["_attention_backward"]
    assert (kernels["_attention"] > 0) == (name != "nothing")

    def oracle(which):
        return lambda x: which(*x, None, case.mask, case.settings.get("scale"))[:2]

    exact = run(oracle(naive), [x.detach().double().requires_grad_() for x in leaves])
    same = run(oracle(naive_same_dtype), leaves) if dtype.itemsize == 2 else [None] * 5
    for position in (0, 2, 3, 4):
        assert found[position].dtype == dtype
        assert_matches(found[position], exact[position], same[position])
    assert_matches(found[1], exact[1], None if same[1] is None else same[1].to(found[1].dtype))
    assert found[0].stride() == leaves[0].stride()


@pytest.mark.parametrize("name", ["causal", "blind rows", "groups", "nothing"])
def test_a_sink_joins(name):
    case = CASES[name]
    leaves = [*case.tensors(torch.float64), torch.tensor([0.5, -3.0, -torch.inf, 2.0, 0.0, 700.0])]
    leaves[3] = leaves[3][: case.heads[0]].double().requires_grad_()
    engines = [
        run(lambda x, b=b: case.call(x[:3], sink=x[3], return_lse=True, backend=b), leaves)
        for b in ("cpu", "reference")
    ]
    for got, wanted in zip(*engines, strict=True):
        assert_matches(got, wanted)


def test_full_blocks_of_a_list_are_not_asked(kernels):
    """Blocks that are given as full are visible, whatever the mask says of them."""
    tiles = torch.tensor([[2, 1, 0], [2, 2, 1]], dtype=torch.int8)[None, None]
    given = flexmod.BlockMask.from_dense_blocks(
        tiles, lambda b, h, i, j: i % 5 == j % 5, BLOCK_SIZE=BLOCK
    )
    whole = (tiles == 2)[0, 0].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    live = (tiles > 0)[0, 0].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    mask = lambda b, h, i, j: live[i, j] & (whole[i, j] | (i % 5 == j % 5))
    leaves = [torch.randn(1, 2, n * BLOCK, 8, requires_grad=True) for n in (2, 3, 3)]
    attend = lambda x: flexmod.flex_attention(*x, block_mask=given, return_lse=True)
    found = run(attend, leaves)
    exact = run(
        lambda x: naive(*x, None, mask)[:2], [x.detach().double().requires_grad_() for x in leaves]
    )
    assert kernels["_attention"] > 0
    for got, wanted in zip(found, exact, strict=True):
        assert_matches(got, wanted)


def spoilt(tensors, which, value):
    tensors[which] = tensors[which].detach().index_fill(2, torch.tensor([11]), value)
    return [x.detach().requires_grad_() for x in tensors]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e37])
@pytest.mark.parametrize("which", [1, 2], ids=["key", "value"])
def test_what_is_hidden_and_not_finite_is_left_to_tiles(kernels, which, value):
    case = Case(lambda b, h, i, j: (i >= j) & (j != 11))
    leaves = spoilt(case.tensors(torch.float32), which, value)
    found = run(lambda x: case.call(x, return_lse=True), leaves)
    fits = which == 2 and value == 3e37
    assert (kernels["_attention"] > 0) == (kernels["_attention_backward"] > 0) == fits
    exact = [x.detach().double().nan_to_num(0.0, 0.0, 0.0).requires_grad_() for x in leaves]
    for got, wanted in zip(
        found, run(lambda x: naive(*x, None, case.mask)[:2], exact), strict=True
    ):
        assert_matches(got, wanted)


OTHERS = {
    "gradient of lse": (0, 1),  # of the forward, the backward: 1 where tiles serve
    "max_scores": (1, 0),
    "wider values": (1, 1),
    "dropout": (1, 1),
    "score_mod": (1, 1),
    "more cores than heads": (0, 1),
    "a torch without the kernels": (1, 1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_rest_is_left_to_tiles(kernels, monkeypatch, name):
    if name == "more cores than heads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    if name == "a torch without the kernels":
        monkeypatch.setattr(fused, "_attention", None)
    leaves = CASES["causal"].tensors(torch.float64)
    if name == "wider values":
        leaves[2] = torch.randn(2, 2, 150, 12, dtype=torch.float64, requires_grad=True)

    def attend(backend):
        out, aux = flexmod.flex_attention(
            *leaves,
            (lambda s, b, h, i, j: s * 2) if name == "score_mod" else None,
            flexmod.create_block_mask(masks.causal(), None, None, 150, 150, BLOCK_SIZE=BLOCK),
            dropout_p=0.3 if name == "dropout" else 0.0,
            dropout_seed=3 if name == "dropout" else None,
            return_aux=flexmod.AuxRequest(lse=True, max_scores=name == "max_scores"),
            backend=backend,
        )
        results = (out, aux.lse) if name == "gradient of lse" else (out,)
        seeds = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape) for x in results]
        grads = torch.autograd.grad(results, leaves, seeds)
        return [out, aux.lse, *grads] + ([aux.max_scores] if name == "max_scores" else [])

    found = attend("cpu")
    assert tuple(int(count == 0) for count in kernels.values()) == OTHERS[name]
    for got, wanted in zip(found, attend("reference"), strict=True):
        assert_matches(got, wanted)


@pytest.mark.parametrize("wanted", [False, True])
def test_a_compiled_call_uses_the_kernels_where_max_scores_are_not_wanted(kernels, wanted):
    case = CASES["causal"]
    leaves = case.tensors(torch.float32)
    mask = flexmod.create_block_mask(masks.causal(), None, None, 150, 150, BLOCK_SIZE=BLOCK)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(query, key, value):
        request = flexmod.AuxRequest(lse=True, max_scores=wanted)
        return flexmod.flex_attention(query, key, value, block_mask=mask, return_aux=request)

    out, aux = attend(*leaves)
    assert (kernels["_attention"] == 0) == wanted
    found = [out, aux.lse] + ([aux.max_scores] if wanted else [])
    exact = naive(*leaves, None, masks.causal())
    for got, expected in zip(found, exact[: len(found)], strict=True):
        assert_matches(got, expected)


def full(rows):
    return {(r, c) for r, row in enumerate(rows) for a, b, k in row if k for c in range(a, b)}


@pytest.mark.parametrize("least", [1, 3, 8])
@pytest.mark.parametrize("seed", range(5))
def test_rectangles_hold_each_full_block_at_most_once(seed, least):
    kinds = torch.randint(3, (13, 17), generator=torch.Generator().manual_seed(seed))
    kinds[:, 4:9] = kinds[:, 4:9].clamp(min=1)
    kinds[3:9, 10:15] = 2
    runs = flexmod.blocks.runs.Runs.from_tiles(kinds.to(torch.int8)).host
    found, rest = pieces.rectangles(runs, least)
    inside = [
        (row, column)
        for rows, columns in found
        for row in range(*rows)
        for column in range(*columns)
    ]
    assert found and len(inside) == len(set(inside))
    assert set(inside) | full(rest) == full(runs) and not set(inside) & full(rest)
    partial = lambda rows: [[run for run in row if not run[2]] for row in rows]
    assert partial(rest) == partial(runs)
    assert all((r[1] - r[0]) * (c[1] - c[0]) >= least for r, c in found)


def test_rectangles_of_a_causal_map_are_squares_that_halve():
    runs = flexmod.create_block_mask(masks.causal(), None, None, 1024, 1024, "cpu", 128).runs.host
    found, rest = pieces.rectangles(runs, 4)
    assert sorted(found) == [((2, 4), (0, 2)), ((4, 8), (0, 4)), ((6, 8), (4, 6))]
    assert rest[7] == [(6, 7, True), (7, 8, False)]
