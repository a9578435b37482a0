"""Functions made of other operations. To add one, write it in terms of scalars `x`, `y`.

Every function here is reached through the names it is registered under, in torch, torch.Tensor,
torch.nn.functional and torch.special, and takes the same arguments as there.
"""

from __future__ import annotations

from typing import Any

import torch

from flexmod.errors import TraceError
from flexmod.program.proxy import Proxy, named, record

_LARGEST_UNROLLED_POWER = 64


@named("add", "__add__", "__radd__")
def add(x: Any, y: Any, *, alpha: float = 1) -> Any:
    return record("add", x, y if alpha == 1 else record("mul", y, alpha))


@named("sub", "subtract", "__sub__")
def sub(x: Any, y: Any, *, alpha: float = 1) -> Any:
    return record("sub", x, y if alpha == 1 else record("mul", y, alpha))


@named("rsub", "__rsub__")
def rsub(x: Any, y: Any, *, alpha: float = 1) -> Any:
    return sub(y, x, alpha=alpha)


@named("div", "divide")
def div(x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "floor":
        return record("floordiv", x, y)
    quotient = record("truediv", x, y)
    if rounding_mode is None:
        return quotient
    exact = not x.is_floating_point() if isinstance(x, Proxy) else isinstance(x, int)
    if exact:
        floor, rest = record("floordiv", x, y), record("mod", x, y)
        return floor + ((rest != 0) & (floor < 0))
    return record("trunc", quotient)


@named("__rtruediv__", "__rdiv__")
def rtruediv(x: Any, y: Any) -> Any:
    return record("truediv", y, x)


@named("__rfloordiv__")
def rfloordiv(x: Any, y: Any) -> Any:
    return record("floordiv", y, x)


@named("__rmod__")
def rmod(x: Any, y: Any) -> Any:
    return record("mod", y, x)


@named("fmod")
def fmod(x: Any, y: Any) -> Any:
    """The remainder of the sizes is exact; the sign is that of x."""
    size = where(x < 0, -x, x)  # not abs, whose derivative at 0 is 0
    rest = record("mod", size, abs(y))
    return where(x < 0, -rest, rest)


@named("reciprocal")
def reciprocal(x: Any) -> Any:
    return record("truediv", 1.0, x)


@named("square")
def square(x: Any) -> Any:
    return x * x


@named("pow", "__pow__")
def power(x: Any, y: Any) -> Any:
    """Small whole exponents are unrolled into products, as the value then stays exact."""
    if isinstance(y, int | float) and isinstance(x, Proxy):
        if y == 0.5:
            return record("sqrt", x)
        if float(y).is_integer() and abs(y) <= _LARGEST_UNROLLED_POWER:
            base = x if isinstance(y, int) or x.is_floating_point() else x.to(torch.float32)
            if y < 0 and not base.is_floating_point():
                raise TraceError("an integer to a negative power: write x.float() ** n")
            product = _whole_power(base, abs(int(y)))
            return product if y >= 0 else reciprocal(product)
    if isinstance(x, Proxy) and not x.is_floating_point() and not isinstance(y, float):
        if not isinstance(y, Proxy) or not y.is_floating_point():
            raise TraceError("an integer to a traced or large power: write x.float() ** y")
    return record("pow", x, y)


@named("float_power")
def float_power(x: Any, y: Any) -> Any:
    base, exponent = (v.to(torch.float64) if isinstance(v, Proxy) else float(v) for v in (x, y))
    return power(base, exponent)


@named("__rpow__")
def rpow(x: Any, y: Any) -> Any:
    return record("exp2", x) if y == 2 and x.is_floating_point() else power(y, x)


def _whole_power(x: Any, n: int) -> Any:
    if n == 0:
        return x.new_ones(())
    half = _whole_power(x, n // 2) if n > 1 else None
    if half is None:
        return x
    return half * half * x if n % 2 else half * half


@named("bitwise_not", "__invert__")
def invert(x: Any) -> Any:
    return record("not" if x.dtype == torch.bool else "invert", x)


@named("logical_and")
def logical_and(x: Any, y: Any) -> Any:
    return record("and", _truth(x), _truth(y))


@named("logical_or")
def logical_or(x: Any, y: Any) -> Any:
    return record("or", _truth(x), _truth(y))


@named("logical_xor")
def logical_xor(x: Any, y: Any) -> Any:
    return record("xor", _truth(x), _truth(y))


@named("logical_not")
def logical_not(x: Any) -> Any:
    return record("not", _truth(x))


def _truth(x: Any) -> Any:
    return x.bool() if isinstance(x, Proxy) else bool(x)


@named("__rlshift__")
def rlshift(x: Any, y: Any) -> Any:
    return record("lshift", y, x)


@named("__rrshift__")
def rrshift(x: Any, y: Any) -> Any:
    return record("rshift", y, x)


@named("where")
def where(*args: Any, **names: Any) -> Any:
    """torch.where(condition, x, y) and x.where(condition, y) arrive in one order."""
    condition, x, y = _bind(("condition", "input", "other"), args, names)
    if isinstance(x, bool | int | float) and isinstance(y, bool | int | float):
        # Two Python numbers: torch takes its default type for floats, int64 for integers.
        recorder = condition.recorder
        kind = recorder.common_type(x, y)
        x, y = recorder.number(x, kind), recorder.number(y, kind)
    return record("where", condition, x, y)


def _bind(order: tuple[str, ...], args: tuple[Any, ...], names: dict[str, Any]) -> list[Any]:
    return [*args, *(names[n] for n in order[len(args) :])]


@named("masked_fill")
def masked_fill(x: Any, mask: Any, value: Any) -> Any:
    return record("where", mask, x.new_full((), value) if _is_number(value) else value, x)


def _is_number(x: Any) -> bool:
    return isinstance(x, bool | int | float)


@named("clamp", "clip")
def clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    """At a limit the gradient is the value's, as in torch; integers have tighter bounds instead."""
    exact = not x.is_floating_point()
    if min is not None:
        low = _like(x, min)
        x = record("maximum", x, low) if exact else where(_outside(x < low, low), low, x)
    if max is not None:
        high = _like(x, max)
        x = record("minimum", x, high) if exact else where(_outside(x > high, high), high, x)
    return x


def _outside(beyond: Any, limit: Any) -> Any:
    """A limit that is traced may be NaN, and then is the result."""
    return beyond | isnan(limit) if isinstance(limit, Proxy) and limit.op != "number" else beyond


@named("clamp_min")
def clamp_min(x: Any, min: Any) -> Any:
    return clamp(x, min)


@named("clamp_max")
def clamp_max(x: Any, max: Any) -> Any:
    return clamp(x, None, max)


def _like(x: Any, limit: Any) -> Any:
    """A Python limit as torch.clamp takes it: a float limit makes an integer a float."""
    if not _is_number(limit):
        return limit
    return x.recorder.number(limit, x.recorder.common_type(x, limit))


@named("max")
def maximum(x: Any, other: Any) -> Any:
    return record("maximum", x, other)


@named("min")
def minimum(x: Any, other: Any) -> Any:
    return record("minimum", x, other)


@named("fmax")
def fmax(x: Any, other: Any) -> Any:
    return _of_numbers("maximum", x, other)


@named("fmin")
def fmin(x: Any, other: Any) -> Any:
    return _of_numbers("minimum", x, other)


def _of_numbers(op: str, x: Any, y: Any) -> Any:
    """Where one operand is NaN, the other."""
    return where(isnan(x), y, where(isnan(y), x, record(op, x, y)))


@named("round")
def round_(x: Any, *, decimals: int = 0) -> Any:
    if not x.is_floating_point():
        return x
    power = 10.0**decimals
    return record("round", x) if decimals == 0 else record("round", x * power) / power


def _install_roundings() -> None:
    """Integers are whole already; kernels round floats only."""
    for op, names in (("floor", ("floor",)), ("ceil", ("ceil",)), ("trunc", ("trunc", "fix"))):
        named(*names)(lambda x, _op=op: record(_op, x) if x.is_floating_point() else x)


_install_roundings()


@named("frac")
def frac(x: Any) -> Any:
    return x - record("trunc", x)


@named("lerp")
def lerp(x: Any, end: Any, weight: Any) -> Any:
    """From the nearer end, as torch does: exact at both."""
    near_x, near_end = x + weight * (end - x), end - (end - x) * (1 - weight)
    if _is_number(weight):
        return near_x if abs(weight) < 0.5 else near_end
    return where(abs(weight) < 0.5, near_x, near_end)


@named("addcmul")
def addcmul(x: Any, tensor1: Any, tensor2: Any, *, value: float = 1) -> Any:
    return x + value * tensor1 * tensor2


@named("isnan")
def isnan(x: Any) -> Any:
    return record("ne", x, x)
