"""Interval arithmetic: what each operation does to the range [lo, hi] of its operands.

Every rule is sound: the true value of the operation on any operands inside their intervals lies
inside the result. Integers and booleans are exact int64 (an operation that may leave the range
+-2**62 yields "anything"). Floats are float64, widened after each operation by a few ulp of the
operation's own type, so that rounding in a kernel can never contradict a decision made here; a
NaN end means "anything, NaN included", and no comparison with it is ever decided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

LIMIT = 2**62
_SLACK_ULPS = 8
_FLOAT_MAX = torch.finfo(torch.float32).max


class Interval(NamedTuple):
    """Inclusive ends, tensors of one shape: int64 for integers and booleans, float64 for floats."""

    lo: Tensor
    hi: Tensor


def point(value: Tensor | float | int) -> Interval:
    real = value.is_floating_point() if isinstance(value, Tensor) else isinstance(value, float)
    device = None if isinstance(value, Tensor) else "cpu"
    tensor = torch.as_tensor(value, dtype=torch.float64 if real else torch.int64, device=device)
    return Interval(tensor, tensor)


def anything(dtype: torch.dtype) -> Interval:
    """All values of a type."""
    if dtype.is_floating_point:
        return point(float("nan"))
    if dtype == torch.bool:
        return Interval(point(0).lo, point(1).hi)
    info = torch.iinfo(dtype)
    return Interval(point(info.min).lo, point(info.max).hi)


def settle(interval: Interval, dtype: torch.dtype) -> Interval:
    """Widen a float result for rounding; give up on a result that its type cannot hold."""
    lo, hi = interval
    if dtype == torch.bool:
        return interval
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        fits = (lo >= info.min) & (hi <= info.max)
        return Interval(torch.where(fits, lo, info.min), torch.where(fits, hi, info.max))
    slack = _SLACK_ULPS * torch.finfo(dtype).eps
    tiny = torch.finfo(dtype).tiny
    lo, hi = lo - lo.abs() * slack - tiny, hi + hi.abs() * slack + tiny
    lost = lo.isnan() | hi.isnan() | (lo.abs() > _FLOAT_MAX) | (hi.abs() > _FLOAT_MAX)
    nan = torch.full_like(lo, float("nan"))
    return Interval(torch.where(lost, nan, lo), torch.where(lost, nan, hi))


def convert(x: Interval, source: torch.dtype, target: torch.dtype) -> Interval:
    """A cast: exact between integers that fit, widened into floats, truncated out of them."""
    if target == torch.bool:
        return ne(x, point(0) if not source.is_floating_point else point(0.0))
    if target.is_floating_point:
        return settle(Interval(x.lo.double(), x.hi.double()), target)
    if source.is_floating_point:
        known = (x.lo > -float(LIMIT)) & (x.hi < float(LIMIT))  # False for NaN
        info = torch.iinfo(torch.int64)
        x = Interval(
            torch.where(known, x.lo.nan_to_num().clamp(-LIMIT, LIMIT).long(), info.min),
            torch.where(known, x.hi.nan_to_num().clamp(-LIMIT, LIMIT).long(), info.max),
        )
    return settle(x, target)


def to_float(x: Interval) -> Interval:
    """Of integers that a float holds exactly."""
    return Interval(x.lo.double(), x.hi.double())


def _is_float(x: Interval) -> bool:
    return x.lo.is_floating_point()


def _from_ends(fn: Callable[..., Tensor], ends: list[tuple[Tensor, ...]]) -> Interval:
    """Smallest and largest of fn over the given operand tuples; "anything" on integer overflow."""
    values = [fn(*e) for e in ends]
    lo, hi = values[0], values[0]
    for value in values[1:]:
        lo, hi = torch.minimum(lo, value), torch.maximum(hi, value)
    if lo.is_floating_point():
        return Interval(lo, hi)
    approximate = [fn(*(x.double() for x in e)).abs() for e in ends]
    overflow = torch.stack(torch.broadcast_tensors(*approximate)).amax(0) > LIMIT
    info = torch.iinfo(torch.int64)
    return Interval(torch.where(overflow, info.min, lo), torch.where(overflow, info.max, hi))


def rising(fn: Callable[..., Tensor]) -> Callable[..., Interval]:
    """Rule of a function that never falls in any operand."""

    def rule(*xs: Interval) -> Interval:
        return Interval(fn(*(x.lo for x in xs)), fn(*(x.hi for x in xs)))

    return rule


def sign(x: Interval) -> Interval:
    """The sign of NaN is 0."""
    lost = x.lo.isnan() | x.hi.isnan()
    return Interval(torch.where(lost, -1, x.lo.sign()), torch.where(lost, 1, x.hi.sign()))


def falling_positive(fn: Callable[[Tensor], Tensor]) -> Callable[[Interval], Interval]:
    """Rule of a falling function of a positive operand."""

    def rule(x: Interval) -> Interval:
        nan = torch.full_like(x.lo, float("nan"))
        return Interval(torch.where(x.lo > 0, fn(x.hi), nan), torch.where(x.lo > 0, fn(x.lo), nan))

    return rule


def unknown(*xs: Interval) -> Interval:
    """Nothing is known of the result."""
    shape = torch.broadcast_shapes(*(x.lo.shape for x in xs))
    whole = anything(torch.float64 if _is_float(xs[0]) else torch.int64)
    return Interval(whole.lo.expand(shape), whole.hi.expand(shape))


def add(x: Interval, y: Interval) -> Interval:
    return _from_ends(torch.add, [(x.lo, y.lo), (x.hi, y.hi)])


def sub(x: Interval, y: Interval) -> Interval:
    return _from_ends(torch.sub, [(x.lo, y.hi), (x.hi, y.lo)])


def _corners(x: Interval, y: Interval) -> list[tuple[Tensor, ...]]:
    return [(x.lo, y.lo), (x.lo, y.hi), (x.hi, y.lo), (x.hi, y.hi)]


def mul(x: Interval, y: Interval) -> Interval:
    return _from_ends(torch.mul, _corners(x, y))


def truediv(x: Interval, y: Interval) -> Interval:
    inside = (y.lo <= 0) & (y.hi >= 0)
    nan = torch.full_like(y.lo, float("nan"))
    safe = Interval(torch.where(inside, nan, y.lo), torch.where(inside, nan, y.hi))
    return _from_ends(torch.true_divide, _corners(x, safe))


def floordiv(x: Interval, y: Interval) -> Interval:
    if _is_float(x):
        return rising(torch.floor)(settle(truediv(x, y), torch.float32))
    inside = (y.lo <= 0) & (y.hi >= 0)
    safe = Interval(torch.where(inside, 1, y.lo), torch.where(inside, 1, y.hi))
    lo, hi = _from_ends(torch.floor_divide, _corners(x, safe))
    whole = anything(torch.int64)
    return Interval(torch.where(inside, whole.lo, lo), torch.where(inside, whole.hi, hi))


def mod(x: Interval, y: Interval) -> Interval:
    if _is_float(x):
        return unknown(x, y)
    constant = (y.lo == y.hi) & (y.lo != 0)
    divisor = torch.where(constant, y.lo, 1)
    same = torch.floor_divide(x.lo, divisor) == torch.floor_divide(x.hi, divisor)
    lo = torch.where(same, torch.remainder(x.lo, divisor), torch.clamp(divisor + 1, max=0))
    hi = torch.where(same, torch.remainder(x.hi, divisor), torch.clamp(divisor - 1, min=0))
    # For other divisors |x mod y| < max |y|, and the sign is that of y.
    least, most = torch.clamp(y.lo + 1, max=0), torch.clamp(y.hi - 1, min=0)
    return Interval(torch.where(constant, lo, least), torch.where(constant, hi, most))


def neg(x: Interval) -> Interval:
    return sub(Interval(torch.zeros_like(x.lo), torch.zeros_like(x.lo)), x)


def absolute(x: Interval) -> Interval:
    if not _is_float(x):
        x = Interval(x.lo.clamp(min=-torch.iinfo(torch.int64).max), x.hi)
    low, high = torch.minimum(x.lo.abs(), x.hi.abs()), torch.maximum(x.lo.abs(), x.hi.abs())
    crosses = (x.lo < 0) & (x.hi > 0)
    return Interval(torch.where(crosses, torch.zeros_like(low), low), high)


def unit(x: Interval) -> Interval:
    """Sine and cosine. NaN in, NaN out."""
    nothing = x.lo * 0.0 + x.hi * 0.0
    return Interval(nothing - 1.0, nothing + 1.0)


def _decided(surely: Tensor, possibly: Tensor) -> Interval:
    return Interval(surely.long(), possibly.long())


def lt(x: Interval, y: Interval) -> Interval:
    return _decided(x.hi < y.lo, ~(x.lo >= y.hi))


def le(x: Interval, y: Interval) -> Interval:
    return _decided(x.hi <= y.lo, ~(x.lo > y.hi))


def gt(x: Interval, y: Interval) -> Interval:
    return lt(y, x)


def ge(x: Interval, y: Interval) -> Interval:
    return le(y, x)


def eq(x: Interval, y: Interval) -> Interval:
    same = (x.lo == x.hi) & (y.lo == y.hi) & (x.lo == y.lo)
    return _decided(same, ~((x.hi < y.lo) | (x.lo > y.hi)))


def ne(x: Interval, y: Interval) -> Interval:
    same = eq(x, y)
    return Interval(1 - same.hi, 1 - same.lo)


def where(condition: Interval, x: Interval, y: Interval) -> Interval:
    lo = torch.where(condition.lo == 1, x.lo, torch.minimum(x.lo, y.lo))
    hi = torch.where(condition.lo == 1, x.hi, torch.maximum(x.hi, y.hi))
    never = condition.hi == 0
    return Interval(torch.where(never, y.lo, lo), torch.where(never, y.hi, hi))


def _bitwise(fn: Callable[..., Tensor], ceiling: Callable[..., Tensor]):
    """Rule for two non-negative operands (booleans are 0 and 1), exact on single values."""

    def rule(x: Interval, y: Interval) -> Interval:
        exact = fn(x.lo, y.lo)
        single = (x.lo == x.hi) & (y.lo == y.hi)
        natural = (x.lo >= 0) & (y.lo >= 0)
        info = torch.iinfo(torch.int64)
        low = torch.where(natural, 0, info.min)
        high = torch.where(natural, ceiling(x.hi, y.hi), info.max)
        return Interval(torch.where(single, exact, low), torch.where(single, exact, high))

    return rule


def _all_ones(x: Tensor, y: Tensor) -> Tensor:
    """Smallest 2**k - 1 that is not below x or y (or a larger one)."""
    value = torch.maximum(x, y).clamp(min=0)
    for shift in (1, 2, 4, 8, 16, 32):
        value = value | (value >> shift)
    return value


_and_bits = _bitwise(torch.bitwise_and, torch.minimum)
_or_bits = _bitwise(torch.bitwise_or, _all_ones)
_xor_bits = _bitwise(torch.bitwise_xor, _all_ones)


def _is_truth(x: Interval) -> Tensor:
    return (x.lo >= 0) & (x.hi <= 1)


def bit_and(x: Interval, y: Interval) -> Interval:
    lo, hi = _and_bits(x, y)
    return Interval(torch.where(_is_truth(x) & _is_truth(y), x.lo & y.lo, lo), hi)


def bit_or(x: Interval, y: Interval) -> Interval:
    lo, hi = _or_bits(x, y)
    return Interval(torch.where(_is_truth(x) & _is_truth(y), x.lo | y.lo, lo), hi)


def bit_xor(x: Interval, y: Interval) -> Interval:
    return _xor_bits(x, y)


def bit_not(x: Interval) -> Interval:
    """Complement of an integer; `not` of a boolean is `invert`."""
    return Interval(-1 - x.hi, -1 - x.lo)


def invert(x: Interval) -> Interval:
    """Complement of a boolean."""
    return Interval(1 - x.hi, 1 - x.lo)
