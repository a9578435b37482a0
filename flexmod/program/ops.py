"""The operations: one row each. To add one, add a row; the table-driven tests then check it.

A row says which torch functions it is recorded from, what it means on tensors, how a kernel
spells it, how it acts on intervals and how it is differentiated. Functions that are made of other
operations (softplus, clamp, ...) are written in Python in `composites.py` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flexmod.program import intervals as bound
from flexmod.program import vjp


@dataclass(frozen=True)
class Op:
    """A scalar operation.

    evaluate: the torch function that defines it; torch also decides the result's dtype.
    kernel:   text for Triton, from operand names {0}, {1}, {2} and the result's type {dtype}.
    bounds:   intervals of the operands -> interval of the result.
    spellings: names of it in torch, torch.Tensor, torch.nn.functional and torch.special.
    fast:     a cheaper kernel text, accurate to about 2**-11, for half-precision problems.
    vjp:      derivative rule, see `vjp.py`; None: the derivative is 0 everywhere.
    """

    name: str
    evaluate: Callable[..., torch.Tensor]
    kernel: str
    bounds: Callable[..., bound.Interval]
    spellings: tuple[str, ...] = ()
    fast: str | None = None
    vjp: Callable[..., vjp.Gradients] | None = None


_NAN = "propagate_nan=tl.PropagateNan.ALL"
_ROWS = [
    # arithmetic
    Op("add", torch.add, "{0} + {1}", bound.add, vjp=vjp.add),
    Op("sub", torch.sub, "{0} - {1}", bound.sub, vjp=vjp.sub),
    Op(
        "mul",
        torch.mul,
        "{0} * {1}",
        bound.mul,
        ("mul", "multiply", "__mul__", "__rmul__"),
        vjp=vjp.mul,
    ),
    Op(
        "truediv",
        torch.true_divide,
        "{0} / {1}",
        bound.truediv,
        ("true_divide", "__truediv__"),
        vjp=vjp.truediv,
        fast="{0} * (1.0 / {1})",  # one multiplication where the divisor is the same for a tile
    ),
    Op(
        "floordiv",
        torch.floor_divide,
        "floor_divide({0}, {1})",
        bound.floordiv,
        ("floor_divide", "__floordiv__"),
    ),
    Op(
        "mod",
        torch.remainder,
        "remainder({0}, {1})",
        bound.mod,
        ("remainder", "__mod__"),
        vjp=vjp.mod,
    ),
    Op("floordiv_natural", torch.floor_divide, "{0} // {1}", bound.floordiv),
    Op("mod_natural", torch.remainder, "{0} % {1}", bound.mod),
    Op("neg", torch.neg, "-{0}", bound.neg, ("neg", "negative", "__neg__"), vjp=vjp.neg),
    Op(
        "abs",
        torch.abs,
        "tl.abs({0})",
        bound.absolute,
        ("abs", "absolute", "__abs__"),
        vjp=vjp.absolute,
    ),
    Op("sign", torch.sign, "sign({0})", bound.sign, ("sign", "sgn")),
    Op(
        "minimum",
        torch.minimum,
        f"tl.minimum({{0}}, {{1}}, {_NAN})",
        bound.rising(torch.minimum),
        ("minimum",),
        vjp=vjp.minimum,
    ),
    Op(
        "maximum",
        torch.maximum,
        f"tl.maximum({{0}}, {{1}}, {_NAN})",
        bound.rising(torch.maximum),
        ("maximum",),
        vjp=vjp.maximum,
    ),
    # of whole vectors, an entry at a time (attr: how many so far): see `vjp.shared`
    Op("amin", torch.minimum, f"tl.minimum({{0}}, {{1}}, {_NAN})", bound.rising(torch.minimum)),
    Op("amax", torch.maximum, f"tl.maximum({{0}}, {{1}}, {_NAN})", bound.rising(torch.maximum)),
    Op("pow", torch.pow, "power({0}, {1})", bound.unknown, vjp=vjp.power),
    # comparisons
    Op("eq", torch.eq, "{0} == {1}", bound.eq, ("eq", "__eq__")),
    Op("ne", torch.ne, "{0} != {1}", bound.ne, ("ne", "not_equal", "__ne__")),
    Op("lt", torch.lt, "{0} < {1}", bound.lt, ("lt", "less", "__lt__")),
    Op("le", torch.le, "{0} <= {1}", bound.le, ("le", "less_equal", "__le__")),
    Op("gt", torch.gt, "{0} > {1}", bound.gt, ("gt", "greater", "__gt__")),
    Op("ge", torch.ge, "{0} >= {1}", bound.ge, ("ge", "greater_equal", "__ge__")),
    Op("detach", torch.detach, "{0}", bound.rising(torch.detach), ("detach",)),
    # booleans and bits
    Op(
        "and", torch.bitwise_and, "{0} & {1}", bound.bit_and, ("bitwise_and", "__and__", "__rand__")
    ),
    Op("or", torch.bitwise_or, "{0} | {1}", bound.bit_or, ("bitwise_or", "__or__", "__ror__")),
    Op(
        "xor", torch.bitwise_xor, "{0} ^ {1}", bound.bit_xor, ("bitwise_xor", "__xor__", "__rxor__")
    ),
    Op("not", torch.logical_not, "~{0}", bound.invert),
    Op("invert", torch.bitwise_not, "~{0}", bound.bit_not),
    Op(
        "lshift",
        torch.bitwise_left_shift,
        "{0} << {1}",
        bound.unknown,
        ("bitwise_left_shift", "__lshift__"),
    ),
    Op(
        "rshift",
        torch.bitwise_right_shift,
        "{0} >> {1}",
        bound.unknown,
        ("bitwise_right_shift", "__rshift__"),
    ),
    Op("where", torch.where, "tl.where({0}, {1}, {2})", bound.where, vjp=vjp.where),
    # functions of one float
    Op("exp", torch.exp, "tl.exp({0})", bound.rising(torch.exp), ("exp",), vjp=vjp.exp),
    Op("exp2", torch.exp2, "tl.exp2({0})", bound.rising(torch.exp2), ("exp2",), vjp=vjp.exp2),
    Op("expm1", torch.expm1, "expm1({0})", bound.rising(torch.expm1), ("expm1",), vjp=vjp.expm1),
    Op("log", torch.log, "tl.log({0})", bound.rising(torch.log), ("log",), vjp=vjp.log),
    Op("log1p", torch.log1p, "log1p({0})", bound.rising(torch.log1p), ("log1p",), vjp=vjp.log1p),
    Op("log2", torch.log2, "tl.log2({0})", bound.rising(torch.log2), ("log2",), vjp=vjp.log2),
    Op("sqrt", torch.sqrt, "tl.sqrt({0})", bound.rising(torch.sqrt), ("sqrt",), vjp=vjp.sqrt),
    Op(
        "rsqrt",
        torch.rsqrt,
        "tl.rsqrt({0})",
        bound.falling_positive(torch.rsqrt),
        ("rsqrt",),
        vjp=vjp.rsqrt,
    ),
    Op(
        "tanh",
        torch.tanh,
        "tanh({0})",
        bound.rising(torch.tanh),
        ("tanh",),
        fast="tanh_approx({0})",
        vjp=vjp.tanh,
    ),
    Op(
        "sigmoid",
        torch.sigmoid,
        "sigmoid({0})",
        bound.rising(torch.sigmoid),
        ("sigmoid", "expit"),
        vjp=vjp.sigmoid,
    ),
    Op("sin", torch.sin, "tl.sin({0})", bound.unit, ("sin",), vjp=vjp.sin),
    Op("cos", torch.cos, "tl.cos({0})", bound.unit, ("cos",), vjp=vjp.cos),
    Op("erf", torch.erf, "tl.erf({0})", bound.rising(torch.erf), ("erf",), vjp=vjp.erf),
    Op("floor", torch.floor, "tl.floor({0})", bound.rising(torch.floor), ("floor",)),
    Op("ceil", torch.ceil, "tl.ceil({0})", bound.rising(torch.ceil), ("ceil",)),
    Op("trunc", torch.trunc, "trunc({0})", bound.rising(torch.trunc), ("trunc", "fix")),
    Op("round", torch.round, "round_half_even({0})", bound.rising(torch.round)),
]
TABLE: dict[str, Op] = {row.name: row for row in _ROWS}
# floordiv_natural and mod_natural are what `specialize` makes of operands proven non-negative.
# `cast` is the one operation whose result type is an argument; `round_to` keeps float32 but drops
# the bits that a half-precision type has not (attr: that type).
CONVERSIONS = ("cast", "round_to")
