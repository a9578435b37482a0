"""The operations that a mod may use, each with operands: what `test_ops*.py` run through.

A letter an operand. f, g: floats; p: positive floats; u: floats in (-1, 1); i, j: integers, j
without 0; w: small integers; s: shifts; t, r: booleans; n, m: the numbers 2.5 and -3; k: 3.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

ENTRIES = 512
_INF, _NAN = float("inf"), float("nan")
_FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 1e-7, -1e-7, 30.0, -30.0, 88.0, -90.0,
           1e30, -1e30, _INF, -_INF, _NAN, 3.0, 20.0, 20.5]  # fmt: skip
_INTS = [0, 1, -1, 2, -2, 3, -3, 7, -7, 8, -8, 100, -100, 12345, -12345]
NUMBERS: dict[str, float | int] = {"n": 2.5, "m": -3, "k": 3}


@dataclass(frozen=True)
class Case:
    name: str  # as torch spells it
    operands: str
    options: dict[str, Any] = field(default_factory=dict)
    rtol: float = 1e-6  # for float32; composites round more often than torch does

    def __str__(self) -> str:
        extra = "".join(f"-{k}={v}" for k, v in self.options.items())
        return f"{self.name}-{self.operands}{extra}"


def _table() -> list[Case]:
    rows = {
        "f i": "abs absolute neg negative sign sgn square relu positive",
        "i f": "exp exp2 expm1 log log1p log2 log10 sqrt rsqrt tanh sigmoid sin cos tan sinh cosh "
               "erf reciprocal isnan isinf isfinite clone detach special.expit special.exp2 "
               "special.expm1",
        "f": "floor ceil trunc fix frac round F.relu6 F.hardtanh F.leaky_relu F.elu F.silu F.gelu "
             "F.softplus F.logsigmoid F.sigmoid F.tanh F.relu special.erf special.log1p",
        "i": "floor ceil trunc round",
        "fg fi if ij fn ik in tf ti tr": "add mul multiply",
        "fg fi if ij fn ik in": "sub subtract div divide true_divide maximum? minimum? max? min? "
                                "rsub remainder floor_divide fmod",
        "fg ff fi ij": "eq ne lt le gt ge not_equal less less_equal greater greater_equal fmax "
                       "fmin",
        "fn ik in tr": "eq ne lt le gt ge",
        "fg uf": "logaddexp",
        "ij tr": "bitwise_and bitwise_or bitwise_xor",
        "tr ij ft": "logical_and logical_or logical_xor",
        "t i f": "logical_not",
        "t i": "bitwise_not __invert__",
        "ws": "bitwise_left_shift bitwise_right_shift __lshift__ __rshift__",
        "wk": "__lshift__ __rshift__",
        "pg pf uf pn fk": "pow",
        "fk pn": "__pow__ float_power",
        "ik": "pow __pow__ float_power",
        "fn ik": "__radd__ __rsub__ __rmul__ __rtruediv__",
        "fn jk": "__rfloordiv__ __rmod__",
        "pn pk": "__rpow__",
        "sk": "__rlshift__ __rrshift__",
        "tr ij": "__and__ __or__ __xor__",
        "ik ": "__rand__ __ror__ __rxor__",
        "fg fi ij fn": "__add__ __sub__ __mul__ __truediv__ __floordiv__ __mod__",
        "fg ij": "__eq__ __ne__ __lt__ __le__ __gt__ __ge__",
        "f ": "__neg__ __abs__ __pos__",
        "fgu fgn": "lerp",
        "fgp": "addcmul",
        "tfg tfi tij tfn tnn tkk": "where",
        "ftn itk": "masked_fill",
        "fmn ink imk imn fup": "clamp clip",
        "fn ik in fg": "clamp_min clamp_max",
    }  # fmt: skip
    found = []
    for operands, names in rows.items():
        for name in names.split():
            usable = operands.split()
            if name.endswith("?"):  # these take tensors only
                usable = [o for o in usable if not set(o) & set(NUMBERS)]
            found += [Case(name.rstrip("?"), o) for o in usable]
    return [*found, *_WITH_OPTIONS]


_WITH_OPTIONS = [
    Case("add", "fg", {"alpha": 2.5}), Case("add", "ij", {"alpha": 3}),
    Case("sub", "fg", {"alpha": 2.5}), Case("rsub", "fg", {"alpha": 2}),
    *(Case("div", o, {"rounding_mode": mode}) for o in ("fg", "ij", "fn", "ik")
      for mode in ("floor", "trunc", None)),
    Case("F.gelu", "f", {"approximate": "tanh"}),
    Case("F.softplus", "f", {"beta": 2.0, "threshold": 10.0}),
    Case("F.leaky_relu", "f", {"negative_slope": 0.3}), Case("F.elu", "f", {"alpha": 0.7}),
    Case("F.hardtanh", "f", {"min_val": -2.0, "max_val": 0.5}),
    Case("round", "f", {"decimals": 2}), Case("addcmul", "fgu", {"value": -1.5}),
    Case("clamp", "f", {"min": -1}), Case("clamp", "i", {"max": 5}),
    Case("clamp", "i", {"min": 1.5}),
]  # fmt: skip

CASES = _table()
# Of integers too, or without a rule for exact bounds.
_REAL_RESULT = {
    *"exp exp2 expm1 log log1p log2 log10 sqrt rsqrt tanh sigmoid sin cos tan sinh cosh erf "
    "reciprocal special.expit special.exp2 special.expm1 div divide true_divide __truediv__ "
    "float_power bitwise_left_shift bitwise_right_shift __lshift__ __rshift__ __rpow__".split()
}


def operand(letter: str, dtype: torch.dtype, seed: int) -> Any:
    """[ENTRIES] values, special ones first and in a random order; or a number."""
    if letter in NUMBERS:
        return NUMBERS[letter]
    draw = torch.Generator().manual_seed(seed)
    mixed = torch.randperm(ENTRIES, generator=draw)
    if letter in "tr":
        return torch.rand(ENTRIES, generator=draw) < 0.5
    if letter in "ijws":
        whole = torch.randint(-50, 50, (ENTRIES,), generator=draw)
        whole[: 8 * len(_INTS)] = torch.tensor(_INTS).repeat(8)
        whole = whole[mixed]
        if letter == "j":
            return torch.where(whole == 0, 5, whole)
        return whole % 7 if letter == "s" else whole.clamp(-100, 100) if letter == "w" else whole
    real = torch.randn(ENTRIES, generator=draw, dtype=torch.float64) * 4
    real[: 8 * len(_FLOATS)] = torch.tensor(_FLOATS, dtype=torch.float64).repeat(8)
    real = real[mixed].to(dtype)
    if letter == "p":
        return torch.where(real.abs() < 50, real.abs() + 0.25, 1.0).to(dtype)
    return torch.where(real.abs() < 50, real.sin(), 0.5).to(dtype) if letter == "u" else real


def operands(case: Case, dtype: torch.dtype) -> list[Any]:
    seed = sum(map(ord, case.name))
    return [operand(letter, dtype, seed + 31 * n) for n, letter in enumerate(case.operands)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "op_case" in metafunc.fixturenames:
        metafunc.parametrize("op_case", CASES, ids=str)
    if "real_case" in metafunc.fixturenames:
        whole = [(c, torch.float64) for c in CASES if set(c.operands) & set("fgpu")]
        pairs = [(c, torch.float32) for c in CASES] + whole
        named = [f"{c}-{str(real).removeprefix('torch.')}" for c, real in pairs]
        metafunc.parametrize(("real_case", "real"), pairs, ids=named)
    if "integer_case" in metafunc.fixturenames:
        whole = [c for c in CASES if set(c.operands) <= set("ijwsktrm")]
        whole = [
            c
            for c in whole
            if 1.5 not in c.options.values()
            and c.name not in _REAL_RESULT
            and not c.name.startswith("__r")
        ]
        metafunc.parametrize("integer_case", whole, ids=str)


@pytest.fixture
def op_cases() -> list[Case]:
    return CASES


@pytest.fixture
def operands_of():
    """`operands_of(case, dtype)`: the operands of a case."""
    return operands


@pytest.fixture
def recorded():
    """`recorded(fn, *operands)`: the program of fn(*operands), tensors [N] read at q_idx."""
    return record


def record(fn: Any, *values: Any) -> Any:
    from flexmod.program.proxy import Proxy
    from flexmod.program.record import Recorder
    from flexmod.program.trace import trace  # noqa: F401  (registers what is recorded)

    recorder = Recorder(torch.device("cpu"), torch.float32)
    position = recorder.emit("input", (), torch.int64, "q_idx")
    stand_ins = [v[position] if isinstance(v, torch.Tensor) else v for v in values]
    result = fn(*stand_ins)
    assert isinstance(result, Proxy), f"{type(result).__name__} instead of a traced scalar"
    return recorder.program("score", "f", result)
