"""Derivative rules and derivative programs against torch's autograd, kinks and zeros included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import flexmod
from flexmod import mods
from flexmod.kernels.fa2 import sums
from flexmod.program.dependence import dependence
from flexmod.program.evaluate import evaluate
from flexmod.program.gradient import differentiate
from flexmod.program.ops import TABLE

ANY = [-3.0, -1.5, -1.0, -0.5, 0.0, 0.25, 1.0, 2.0, 4.0]
POSITIVE = [0.0, 0.25, 1.0, 2.0, 9.0]
# Values of each operand; all combinations are tried, so equal operands are among them.
OPERANDS = {
    "add": (ANY, ANY),
    "sub": (ANY, ANY),
    "mul": (ANY, ANY),
    "truediv": (ANY, [x for x in ANY if x]),
    "mod": (ANY, [-2.0, -0.75, 0.75, 2.0]),
    "neg": (ANY,),
    "abs": (ANY,),
    "minimum": (ANY, ANY),
    "maximum": (ANY, ANY),
    "pow": (ANY, [-1.0, 0.0, 0.5, 1.0, 2.0, 3.0]),
    "where": ([0.0, 1.0], ANY, ANY),
    "exp": (ANY,),
    "exp2": (ANY,),
    "expm1": (ANY,),
    "log": (POSITIVE,),
    "log1p": ([-0.5, *POSITIVE],),
    "log2": (POSITIVE,),
    "sqrt": (POSITIVE,),
    "rsqrt": (POSITIVE,),
    "tanh": (ANY,),
    "sigmoid": (ANY,),
    "sin": (ANY,),
    "cos": (ANY,),
    "erf": (ANY,),
}


def test_every_rule_is_tested():
    assert set(OPERANDS) == {name for name, row in TABLE.items() if row.vjp is not None}


@pytest.mark.parametrize("name", OPERANDS)
def test_rule_is_torchs(name):
    row = TABLE[name]
    grids = torch.meshgrid(
        *(torch.tensor(values, dtype=torch.float64) for values in OPERANDS[name]), indexing="ij"
    )
    operands = [x.clone() for x in grids]
    if name == "where":
        operands[0] = operands[0] > 0
    leaves = [x.requires_grad_() if x.is_floating_point() else x for x in operands]
    result = row.evaluate(*leaves)
    grad = torch.linspace(-1.0, 2.0, result.numel(), dtype=torch.float64).view(result.shape)
    wanted = torch.autograd.grad(result, [x for x in leaves if x.requires_grad], grad)
    with torch.no_grad():
        found = row.vjp(grad, result.detach(), *(x.detach() for x in operands))
    found = [g for g, x in zip(found, operands, strict=True) if x.requires_grad]
    assert all(g is not None for g in found)
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


# Defined for integers and booleans only, refused by torch's autograd, or of whole vectors (below).
NOT_DIFFERENTIATED = {"floordiv", "floordiv_natural", "mod_natural", "amax", "amin"}


@pytest.mark.parametrize("name", sorted(set(TABLE) - set(OPERANDS) - NOT_DIFFERENTIATED))
def test_rows_without_a_rule_have_no_derivative_in_torch(name):
    row = TABLE[name]
    arity = 2 if "{1}" in row.kernel else 1
    for values in ((0.3, 1.7), (-2.6, 0.4)):
        leaves = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in values[:arity]]
        try:
            result = row.evaluate(*leaves)
        except RuntimeError as refused:
            assert "not implemented for" in str(refused) or "not supported" in str(refused)
            return
        if result.requires_grad:
            for grad in torch.autograd.grad(result, leaves, allow_unused=True):
                assert grad is None or not grad.any()


# What torch offers beyond the table, at the places where its pieces meet.
FUNCTIONS = {
    "clamp below": lambda x: torch.clamp(x, min=0.0),
    "clamp above": lambda x: torch.clamp(x, max=1.0),
    "clamp": lambda x: torch.clamp(x, -1, 2),
    "relu": torch.relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "leaky_relu": F.leaky_relu,
    "elu": lambda x: F.elu(x, 1.5),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": lambda x: F.softplus(x, threshold=3.0),
    "logsigmoid": F.logsigmoid,
    "logaddexp": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "tan": torch.tan,
    "square": torch.square,
    "reciprocal": lambda x: torch.reciprocal(x + 0.125),
    "frac": torch.frac,
    "fmod": lambda x: torch.fmod(x, 0.75),
    "remainder": lambda x: x % 0.75,
    "round": torch.round,
    "floor": torch.floor,
    "sign": torch.sign,
    "lerp": lambda x: torch.lerp(x, x * x, 0.25),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "power 0": lambda x: x**0,
    "power 3": lambda x: x**3,
    "power -2": lambda x: (x + 0.125) ** -2,
    "power 1.5": lambda x: (x * x) ** 1.5,
    "2 to the power": lambda x: 2**x,
    "3 to the power": lambda x: 3.0**x,
    "log10": lambda x: torch.log10(x * x + 1),
    "detach": lambda x: x * x.detach(),
    "divided and floored": lambda x: torch.div(x, 0.75, rounding_mode="floor") + x,
    "where": lambda x: torch.where(x > 0, x * 2, x * x),
    "masked_fill": lambda x: x.masked_fill(x > 1, 0.0),
    "through an integer": lambda x: x.long() * x,
    "half and back": lambda x: x.half().float() * x,
    "max of three": lambda x: torch.maximum(torch.maximum(x, x * x), x * 0 + 0.25),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_is_torchs(name):
    function = FUNCTIONS[name]
    x = torch.tensor([*ANY, 3.0, 6.0, 25.0], dtype=torch.float64, requires_grad=True)
    grad = torch.linspace(-1.0, 2.0, len(x), dtype=torch.float64)
    result = function(x)
    wanted = torch.zeros_like(x)
    if result.requires_grad:
        (wanted,) = torch.autograd.grad(
            result, x, grad.to(result.dtype), allow_unused=True, materialize_grads=True
        )
    program = flexmod.trace(
        lambda score, b, h, q_idx, kv_idx: function(score), "score", score_dtype=torch.float64
    )
    gradient = differentiate(program, frozenset())
    found = torch.zeros_like(x)
    if gradient.score is not None:
        inputs = {"grad": grad, "score": x.detach()}
        found = evaluate(gradient.program, inputs).values[gradient.score].expand(x.shape)
    single = name == "half and back"  # torch goes through float32 there, and so does the mod
    torch.testing.assert_close(found, wanted, rtol=1e-3 if single else 1e-12, atol=1e-12)


ALIBI = """\
gradient_mod alibi(grad)
  %0 = grad                            float32
  return %0"""
SOFTCAP = """\
gradient_mod softcap(grad, score)
  %0 = grad                            float32
  %1 = score                           float32
  %2 = 5.0                             float32
  %3 = truediv %1 %2                   float32
  %4 = tanh %3                         float32
  %5 = 5.0                             float32
  %6 = mul %0 %5                       float32
  %7 = mul %4 %4                       float32
  %8 = 1.0                             float32
  %9 = sub %8 %7                       float32
  %10 = mul %6 %9                      float32
  %11 = truediv %10 %2                 float32
  return %11"""


@pytest.mark.parametrize(
    ("mod", "text"),
    [(mods.alibi(4), ALIBI), (mods.softcap(5.0), SOFTCAP)],
    ids=["alibi", "softcap"],
)
def test_derivative_program_is_pruned(mod, text):
    program = differentiate(flexmod.trace(mod), frozenset()).program
    # Where the numbers stand is not the point.
    assert _without_numbers(str(program)) == _without_numbers(text)


def _without_numbers(text):
    """The program's lines in order, operands named by what they are, numbers left out."""
    names, lines = {}, []
    for line in text.splitlines()[1:-1]:
        target, meaning = line.strip().split(" = ")
        op, *rest = meaning.split()
        arguments = [names.get(a, a) for a in rest[:-1]]
        names[target] = f"{op}({','.join(arguments)})" if arguments else op
        if arguments:
            lines.append(names[target])
    return [text.splitlines()[0], *lines, names[text.splitlines()[-1].split()[-1]]]


def test_a_mod_that_ignores_the_score_has_no_derivative():
    table = torch.zeros(5)
    ignoring = flexmod.trace(lambda score, b, h, q_idx, kv_idx: table[kv_idx])
    gradient = differentiate(ignoring, frozenset([0]))
    assert gradient.score is None
    assert [load.slot for load in gradient.loads] == [0]
    cut = flexmod.trace(lambda score, b, h, q_idx, kv_idx: score.detach() * 2)
    assert differentiate(cut, frozenset()).score is None


def test_only_what_asks_is_in_the_program():
    one, two = torch.zeros(5), torch.zeros(5)
    program = flexmod.trace(lambda s, b, h, i, j: s * one[i] + two[j])
    wanted = {slots: differentiate(program, frozenset(slots)) for slots in ((), (0,), (1,), (0, 1))}
    for slots, gradient in wanted.items():
        assert sorted(load.slot for load in gradient.loads) == sorted(slots)
    assert "capture1" not in str(wanted[()].program)


# Index of a table -> (what it reads, through kv_idx - q_idx alone, how a kernel sums it).
TABLE_INDICES = {
    "h": (lambda b, h, i, j: h, "h", True, "plane"),
    "b and h": (lambda b, h, i, j: b + h, "b h", True, "plane"),
    "constant": (lambda b, h, i, j: h * 0, "h", True, "plane"),
    "row": (lambda b, h, i, j: i, "q_idx", False, "row"),
    "row of a batch": (lambda b, h, i, j: b * 7 + i // 2, "b q_idx", False, "row"),
    "column": (lambda b, h, i, j: j % 3, "kv_idx", False, "column"),
    "difference": (lambda b, h, i, j: j - i + 9, "q_idx kv_idx", True, "diagonal"),
    "negative difference": (lambda b, h, i, j: 9 - (i - j), "q_idx kv_idx", True, "diagonal"),
    "clamped": (
        lambda b, h, i, j: torch.clamp(j - i, -2, 2) + 2, "q_idx kv_idx", True, "diagonal",
    ),
    "distance": (lambda b, h, i, j: (i - j).abs(), "q_idx kv_idx", True, "diagonal"),
    "bucket": (lambda b, h, i, j: (i + 3 - j) // 4 + 5, "q_idx kv_idx", True, "diagonal"),
    "sum": (lambda b, h, i, j: i + j, "q_idx kv_idx", False, "element"),
    "product": (lambda b, h, i, j: (i - j) * i + 90, "q_idx kv_idx", False, "element"),
    "two remainders": (lambda b, h, i, j: i % 4 - j % 4 + 4, "q_idx kv_idx", False, "element"),
    "unequal": (lambda b, h, i, j: 2 * i - j + 9, "q_idx kv_idx", False, "element"),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE_INDICES)
def test_dependence_of_an_index(name):
    index, inputs, by_difference, kind = TABLE_INDICES[name]
    table = torch.zeros(200)
    program = flexmod.trace(lambda s, b, h, i, j: s + table[index(b, h, i, j)])
    gradient = differentiate(program, frozenset([0]))
    (load,) = gradient.loads
    lines = dependence(gradient.program)
    found = lines[gradient.program.outputs[load.indices[0]]]
    assert found.inputs == set(inputs.split())
    assert found.by_difference is by_difference
    assert sums._kind(gradient.program, load, lines) == kind


def test_dependence_of_an_index_that_reads_the_score():
    table = torch.zeros(200)
    program = flexmod.trace(lambda s, b, h, i, j: s + table[torch.floor(s).long().clamp(0, 9)])
    gradient = differentiate(program, frozenset([0]))
    kind = sums._kind(gradient.program, gradient.loads[0], dependence(gradient.program))
    assert kind == "element"


EXTREMES = {
    "largest": lambda t, q, k: t[q].amax() * t[k].amax(),
    "smallest": lambda t, q, k: t[q].amin() - t[k].amin() * 2,
    "of results": lambda t, q, k: torch.amax(t[q] * t[k]) + torch.amin(torch.abs(t[q] - t[k])),
    "two by two": lambda t, q, k: torch.maximum(torch.maximum(t[q, 0], t[q, 1]), t[k, 2]),
    "a part and all": lambda t, q, k: t[q][:2].amax() + t[q].amax() + t[k][:3].amin(),
    "one entry": lambda t, q, k: t[q][:1].amax() + t[k][2:3].amin(),
}
TIED = [[1, 1, 1, 1], [2, 1, 2, 2], [3, 3, 0, -1], [1, 2, 3, 4], [-1, -1, -1, 5], [0, 0, 0, 0]]


@pytest.mark.parametrize("name", EXTREMES)
def test_ties_of_a_vector_share_a_gradient_as_torchs_do(name):
    table = torch.tensor(TIED, dtype=torch.float64, requires_grad=True)
    query, key, value = torch.randn(3, 1, 1, len(TIED), 4, dtype=torch.float64)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + EXTREMES[name](table, q_idx, kv_idx)

    weight = torch.randn(len(TIED), 4, dtype=torch.float64)
    found, wanted = (
        torch.autograd.grad((out * weight).sum(), table)[0]
        for out in (
            flexmod.flex_attention(query, key, value, score_mod, backend="cpu"),
            flexmod.testing.naive(query, key, value, score_mod)[0],
        )
    )
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
