"""Elementary functions of floats, made of other operations; see `composites.py`."""

from __future__ import annotations

import math
from typing import Any

import torch

from flexmod.program.composites import where
from flexmod.program.proxy import named, record


@named("logaddexp")
def logaddexp(x: Any, y: Any) -> Any:
    high, low = record("maximum", x, y), record("minimum", x, y)
    gap = where(high == low, high.new_zeros(()), low - high)  # equal infinities have no gap
    return high + record("log1p", record("exp", gap))


@named("log10")
def log10(x: Any) -> Any:
    return record("log2", x) * math.log10(2)


@named("tan")
def tan(x: Any) -> Any:
    return record("sin", x) / record("cos", x)


@named("sinh")
def sinh(x: Any) -> Any:
    return 0.5 * (record("expm1", x) - record("expm1", -x))


@named("cosh")
def cosh(x: Any) -> Any:
    return 0.5 * (record("exp", x) + record("exp", -x))


@named("isinf")
def isinf(x: Any) -> Any:
    return (
        record("eq", abs(x), math.inf)
        if x.is_floating_point()
        else x.new_zeros((), dtype=torch.bool)
    )


@named("isfinite")
def isfinite(x: Any) -> Any:
    return (
        record("lt", abs(x), math.inf)
        if x.is_floating_point()
        else x.new_ones((), dtype=torch.bool)
    )
