"""Checks of what a score mod is made from, done once, when it is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from flexmod.errors import ArgumentError

ScoreMod = Callable[[Any, Any, Any, Any, Any], Any]
Device = torch.device | str | None
PerHead = float | Tensor | Sequence[float]


def whole(name: str, value: Any, low: int = 1) -> int:
    if isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= low:
        return int(value)
    raise ArgumentError(f"{name} must be an integer >= {low}, got {value!r}")


def real(name: str, value: Any) -> float:
    if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise ArgumentError(f"{name} must be a finite number, got {value!r}")


def positive(name: str, value: Any) -> float:
    number = real(name, value)
    if number > 0:
        return number
    raise ArgumentError(f"{name} must be a number > 0, got {value!r}")


def reals(name: str, value: Any, shapes: tuple[str, ...], device: Device = None) -> Tensor:
    """`value` as a floating tensor of the rank of one of `shapes`, spelled as in "[H, KV]"."""
    expected = f"a floating-point tensor {' or '.join(shapes)}"
    if isinstance(value, Tensor):
        tensor = value if device is None else value.to(device)
    else:
        try:
            tensor = torch.tensor(value, dtype=torch.float32, device=device)
        except (TypeError, ValueError, RuntimeError) as error:
            message = f"{name} must be {expected}, got {type(value).__name__}"
            raise ArgumentError(message) from error
    ranks = [0 if shape == "[]" else shape.count(",") + 1 for shape in shapes]
    if not tensor.is_floating_point() or tensor.dim() not in ranks:
        found = f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"
        raise ArgumentError(f"{name} must be {expected}, got {found}")
    return tensor


def per_head(name: str, value: PerHead, number: Callable = real) -> Callable[[Any], Any]:
    """A function of h: the number (checked by `number`), the tensor [], or entry h of [H]."""
    if isinstance(value, Tensor | list | tuple):
        tensor = reals(name, value, ("[]", "[H]"))
        return (lambda h: tensor[h]) if tensor.dim() else (lambda h: tensor)
    scalar = number(name, value)
    return lambda h: scalar
