"""Activation functions, made of other operations; see `composites.py`."""

from __future__ import annotations

import math
from typing import Any

from flexmod.errors import TraceError
from flexmod.program.composites import clamp, where
from flexmod.program.proxy import named, record


@named("relu")
def relu(x: Any, inplace: bool = False) -> Any:
    _refuse_inplace(inplace)
    return where(x <= 0, x.new_zeros(()), x)


@named("relu6")
def relu6(x: Any, inplace: bool = False) -> Any:
    return hardtanh(x, 0, 6, inplace)


@named("hardtanh")
def hardtanh(x: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Any:
    """Its gradient at a limit is 0, unlike clamp's."""
    _refuse_inplace(inplace)
    low, high = x.new_full((), min_val), x.new_full((), max_val)
    return where(x <= low, low, where(x >= high, high, x))


@named("leaky_relu")
def leaky_relu(x: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    _refuse_inplace(inplace)
    return where(x > 0, x, x * negative_slope)


@named("elu")
def elu(x: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    _refuse_inplace(inplace)
    return where(x > 0, x, record("expm1", clamp(x, None, 0)) * alpha)


@named("silu")
def silu(x: Any, inplace: bool = False) -> Any:
    _refuse_inplace(inplace)
    return x * record("sigmoid", x)


def _refuse_inplace(inplace: bool) -> None:
    if inplace:
        raise TraceError("inplace=True changes a traced value in place: leave it out")


@named("gelu")
def gelu(x: Any, *, approximate: str = "none") -> Any:
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1.0 + record("tanh", inner))
    return 0.5 * x * (1.0 + record("erf", x * math.sqrt(0.5)))


@named("softplus")
def softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    scaled = x * beta
    return where(
        scaled > threshold, x, record("log1p", record("exp", clamp(scaled, None, threshold))) / beta
    )


@named("logsigmoid", "log_sigmoid")
def logsigmoid(x: Any) -> Any:
    return record("minimum", x, x.new_zeros(())) - record("log1p", record("exp", -abs(x)))
