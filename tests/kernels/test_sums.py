"""Sums of captured tensors' gradients inside of a tile, against autograd in float64."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import flexmod
from flexmod import mods
from flexmod.attention import make_problem
from flexmod.autograd import with_gradient
from flexmod.kernels import hopper
from flexmod.kernels.fa2 import kernel, products, sums, sums_text
from flexmod.kernels.fa2.scatter import Scatter
from flexmod.kernels.hopper.backward import Backward, with_score
from flexmod.kernels.problem import Inputs, Saved
from flexmod.kernels.templates import device_functions
from flexmod.kernels.tuning import Target, Tiles
from flexmod.program.emit import emit

triton = pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH, HEADS, Q_LEN, KV_LEN = 2, 2, 20, 39
LENGTHS = Q_LEN, KV_LEN, KV_LEN
TILES = Tiles(16, 32, 4, 1)

HEAD = "import triton\nimport triton.language as tl\n\nPTX = tl.constexpr(False)\n\n\n"
DIAGONALS = """
@triton.jit
def turn(X, LINE, R: tl.constexpr, C: tl.constexpr, SIGN: tl.constexpr):
    rows, columns = tl.arange(0, R)[:, None], tl.arange(0, C)[None, :]
    add_diagonals(LINE, tl.load(X + rows * C + columns), rows, columns, SIGN)
"""
OVER_KEYS = """
@triton.jit
def over_keys(SCORE, GRAD, {tensors}, {values}heads, q_len, kv_len,
              TILE_Q: tl.constexpr, TILE_KV: tl.constexpr):
    plane = tl.program_id(0)
    b, h = plane // heads, plane % heads
    for first_key in range(0, kv_len, TILE_KV):
        keys = first_key + tl.arange(0, TILE_KV)
        for first_row in range(0, q_len, TILE_Q):
            rows = first_row + tl.arange(0, TILE_Q)
            inside = (keys < kv_len)[:, None] & (rows < q_len)[None, :]
            place = plane * q_len * kv_len + rows[None, :] * kv_len + keys[:, None]
            grad = tl.load(GRAD + place, mask=inside, other=0.0)
            score = tl.load(SCORE + place, mask=inside, other=0.0)
            q_idx = tl.minimum(rows, q_len - 1)[None, :]
            kv_idx = tl.minimum(keys, kv_len - 1)[:, None]
            results = gradient_mod(1.0, score, b, h, q_idx, kv_idx{arguments})
            add_sums(results, grad, plane, rows, keys, q_len, kv_len, TILE_Q, TILE_KV{sums})
"""


@pytest.fixture
def module(tmp_path):
    """`module(text)`: the kernels of a text."""

    def load(text):
        path = tmp_path / "kernels.py"
        path.write_text(HEAD + device_functions(text) + "\n\n\n" + text)
        spec = importlib.util.spec_from_file_location("kernels", path)
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
        return found

    return load


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("shape", [(16, 32), (64, 16)], ids=str)
def test_diagonals_of_a_tile(module, shape, sign):
    rows, columns = shape
    x = torch.randn(shape, dtype=torch.float64, device=DEVICE)
    found, wanted = torch.zeros(2, rows + columns + 8, dtype=torch.float64, device=DEVICE)
    middle = columns if sign > 0 else rows
    for n in range(1 - columns, rows):  # row - column
        wanted[middle + sign * n] = x.diagonal(-n).sum()
    module(DIAGONALS).turn[(1,)](x, found[middle:], rows, columns, sign)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


# What the tile kernels of hopper can sum: how a mod is made, and its learnable tensors.
LEARNED = {
    "plane": (lambda t, u: lambda s, b, h, i, j: s * t + u[b, h], [(), (BATCH, HEADS)]),
    "column": (lambda t: lambda s, b, h, i, j: s + t[j // 2], [(64,)]),
    "clamped diagonal": (lambda t: mods.relative_bias(t), [(HEADS, 15)]),
    "twice": (lambda t: lambda s, b, h, i, j: s + t[j - i + 63] * t[(i - j).abs()], [(128,)]),
    "all": (
        lambda t, u, v: lambda s, b, h, i, j: 9 * torch.tanh(s * t[h] / 9) + u[h, j - i] * v[h, j],
        [(HEADS,), (HEADS, 128), (HEADS, 64)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEARNED)
def test_sums_of_a_kernel_over_keys(module, name):
    make, shapes = LEARNED[name]
    learned = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    score, grad = torch.randn(2, BATCH, HEADS, Q_LEN, KV_LEN, dtype=torch.float64)
    wanted = _by_autograd(make, learned, score, grad)
    found = _by_kernel(
        module, make, [x.float().to(DEVICE).requires_grad_() for x in learned], score, grad
    )
    for got, exact in zip(found, wanted, strict=True):
        assert float((got.cpu().double() - exact).abs().max()) < 2e-6 * float(exact.abs().max())


def _by_autograd(make, learned, score, grad):
    leaves = [x.clone().requires_grad_() for x in learned]
    b, h, i, j = (torch.arange(n) for n in score.shape)
    indices = b[:, None, None, None], h[:, None, None], i[:, None], j
    modified = make(*leaves)(score, *indices)
    return torch.autograd.grad((modified * grad).sum(), leaves)


def _by_kernel(module, make, learned, score, grad):
    inputs = Inputs(*(torch.zeros(BATCH, HEADS, n, 16, device=DEVICE) for n in LENGTHS))
    program = flexmod.trace(make(*learned), "score")
    problem = make_problem(inputs, program, None)
    problem = with_score(with_gradient(problem, program, frozenset(range(len(learned)))))
    plan, gradient = sums.plan(problem), problem.gradient.program
    assert sums_text.HOPPER.issuperset(plan.kinds)
    buffers = plan.buffers(problem, TILES, KV_LEN, sums_text.HOPPER)
    derivative, made = emit(gradient, "gradient_"), buffers.make()
    text = derivative.text + "\n\n" + sums_text.hopper_functions(plan) + "\n\n" + OVER_KEYS.format(
        tensors=", ".join([*derivative.tensors, *sums_text.tensors(plan)]),
        values="".join(f"{name}, " for name, _ in derivative.values),
        arguments="".join(f", {name}" for name, _ in derivative.parameters),
        sums="".join(f", {name}" for name in sums_text.parameters(plan)),
    )  # fmt: skip
    captures = [problem.score.captures[slot] for slot in problem.gradient.slots]
    module(text).over_keys[(BATCH * HEADS,)](
        *(x.float().to(DEVICE) for x in (score, grad)), *captures, *made,
        *kernel.mod_values([gradient]), HEADS, Q_LEN, KV_LEN, TILES.q, TILES.kv,
    )  # fmt: skip
    found = Scatter(problem, plan, buffers)(made, tuple(captures))
    return [found[slot] for slot in range(len(learned))]


SERVED = {  # what an engine makes the gradient of, and whether hopper's own kernels do
    "nothing": (None, True),
    "plane": (lambda t: lambda s, b, h, i, j: s * t[h], True),
    "column": (lambda t: lambda s, b, h, i, j: s + t[j], True),
    "diagonal": (lambda t: lambda s, b, h, i, j: s + t[j - i + 300], True),
    "row": (lambda t: lambda s, b, h, i, j: s + t[i], False),
    "element": (lambda t: lambda s, b, h, i, j: s + t[i * j % 7], False),
    "score not used": (lambda t: lambda s, b, h, i, j: t[h], False),
}


@pytest.mark.parametrize("name", SERVED)
def test_what_hopper_sums_itself(name):
    make, own = SERVED[name]
    inputs = Inputs(*(torch.zeros(1, 2, 256, 64, dtype=torch.bfloat16) for _ in range(3)))
    program = flexmod.trace(make(torch.zeros(600)), "score") if make else None
    problem = with_gradient(make_problem(inputs, program, None), program, frozenset([0]))
    saved = Saved(inputs.query, torch.zeros(1, 2, 256), inputs.query, None)
    assert isinstance(hopper.prepare_backward(problem, inputs, saved), Backward) is own


KINDS = {
    "scale": (lambda t: lambda s, b, h, i, j: s * t[h], ["product"]),
    "temperature": (lambda t: lambda s, b, h, i, j: -s / (1 + t[h] * t[b]), ["product"] * 2),
    "scale and bias": (
        lambda t: lambda s, b, h, i, j: s * t[h] + t[j - i],
        ["diagonal", "product"],
    ),
    "bias": (lambda t: lambda s, b, h, i, j: s + t[h], ["plane"]),
    "capped": (lambda t: lambda s, b, h, i, j: torch.tanh(s * t[h]), ["plane"]),
    "squared": (lambda t: lambda s, b, h, i, j: s * s * t[h], ["plane"]),
    "column": (lambda t: lambda s, b, h, i, j: s * t[j], ["column"]),
    "of a sum": (lambda t: lambda s, b, h, i, j: (s + i) * t[h], ["plane"]),
}


@pytest.mark.parametrize("name", KINDS)
def test_which_sums_come_with_the_gradients_of_queries(name):
    make, kinds = KINDS[name]
    problem, _ = _trained(make, [torch.zeros(64)], torch.float16, "cpu")
    assert sorted(products.found(sums.plan(problem), problem.gradient).kinds) == kinds


PRODUCTS = {
    "scale": (lambda t: lambda s, b, h, i, j: s * t[h], [torch.tensor([0.5, 0.0])]),
    "temperature": (
        lambda t, u: lambda s, b, h, i, j: -s / t * u[b, h], [torch.tensor(2.0), torch.ones(2, 2)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_sums_that_come_with_the_gradients_of_queries(name):
    """The kernel after the one over keys: from what it adds up, sums of grad * key."""
    make, learned = PRODUCTS[name]
    learned = [x.to(DEVICE).requires_grad_() for x in learned]
    problem, inputs = _trained(make, learned, torch.float16, DEVICE)
    inputs = Inputs(*(torch.randn_like(x) for x in inputs))
    grad = torch.randn(BATCH, HEADS, Q_LEN, KV_LEN, device=DEVICE)
    saved = Saved(inputs.query, grad[..., 0], inputs.query, None)
    back = Backward(problem, inputs, saved, Target("sm_90", 227 << 10))
    gradients, made = back.empty(), back.captured.make()
    after = back.tensors(problem.operands(inputs), saved, gradients, made)[2]
    after[0].copy_(_as_left(grad @ inputs.key.float(), back.fields["TILE_Q"]))
    back.passes[0].after.run(after)
    found = back.scatter(made, tuple(problem.score.captures))

    exact = [x.double().detach().requires_grad_() for x in (inputs.query, *learned)]
    score = exact[0] @ inputs.key.double().mT * problem.scale
    b, h, i, j = (torch.arange(n, device=DEVICE) for n in score.shape)
    indices = b[:, None, None, None], h[:, None, None], i[:, None], j
    wanted = torch.autograd.grad((make(*exact[1:])(score, *indices) * grad).sum(), exact)
    torch.testing.assert_close(gradients.query.double(), wanted[0], rtol=2e-3, atol=2e-3)
    for slot, its in enumerate(wanted[1:]):
        torch.testing.assert_close(found[slot].double(), its, rtol=1e-5, atol=1e-4)


def _as_left(sums, tile):
    """[B, H, Q, E] in tiles of queries, each in the order in which the tensor cores leave it."""
    batch, heads, rows, dim = sums.shape
    sums = torch.nn.functional.pad(sums, (0, 0, 0, -rows % tile))
    pieces = sums.reshape(batch, heads, -1, 2, 8, dim // 8, 4, 2)
    return pieces.permute(0, 1, 2, 5, 4, 6, 3, 7).flatten()


def _trained(make, learned, dtype, device):
    inputs = Inputs(
        *(torch.zeros(BATCH, HEADS, n, 64, device=device, dtype=dtype) for n in LENGTHS)
    )
    program = flexmod.trace(make(*learned), "score")
    problem = make_problem(inputs, program, None)
    return with_score(with_gradient(problem, program, frozenset(range(len(learned))))), inputs
