"""Checks of what a mask is made from, done once, when it is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from flexmod.errors import ArgumentError

MaskMod = Callable[[Any, Any, Any, Any], Any]


def whole(name: str, value: Any, low: int | None = 1, otherwise: str = "") -> int:
    """`value` as a Python int of at least `low`. `True` is refused: as a length it is a slip."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        if low is None or int(value) >= low:
            return int(value)
    limit = "" if low is None else f" >= {low}"
    raise ArgumentError(f"{name} must be an integer{limit}{otherwise}, got {value!r}")


def integers(
    name: str,
    value: Tensor | Sequence[Any],
    shapes: tuple[str, ...],
    device: torch.device | str | None = None,
    flags: bool = False,
) -> Tensor:
    """`value` as an integer tensor (bool too, if `flags`) of the rank of one of `shapes`.

    A tensor stays the object it is unless `device` asks for a move. A shape is spelled as in
    "[B, S]"; only its rank is checked, since the extents are known to nobody before the call.
    """
    expected = f"an integer{' or bool' if flags else ''} tensor {' or '.join(shapes)}"
    if isinstance(value, Tensor):
        tensor = value if device is None else value.to(device)
    else:
        try:
            tensor = torch.tensor(value, device=device)
        except (TypeError, ValueError, RuntimeError) as error:
            message = f"{name} must be {expected}, got {type(value).__name__}"
            raise ArgumentError(message) from error
    inexact = tensor.is_floating_point() or tensor.is_complex()
    wrong_type = inexact or (tensor.dtype == torch.bool and not flags)
    if wrong_type or tensor.dim() not in [rank(shape) for shape in shapes]:
        found = f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"
        raise ArgumentError(f"{name} must be {expected}, got {found}")
    return tensor


def rank(shape: str) -> int:
    """Number of axes that a spelled shape names: 2 for "[B, S]", 0 for "[]"."""
    return len(shape.strip("[]").replace(",", " ").split())


def per_batch(
    name: str, value: Any, low: int | None = 0, device: torch.device | str | None = None
) -> Callable[[Any], Any]:
    """A function of b that gives `value` itself (an int, a tensor []) or its entry b (tensor [B]).

    An int must be at least `low`. A tensor's entries are not read: on a GPU that would wait.
    """
    if isinstance(value, Tensor) or (isinstance(value, Sequence) and not isinstance(value, str)):
        tensor = integers(name, value, ("[]", "[B]"), device)
        return (lambda b: tensor[b]) if tensor.dim() else (lambda b: tensor)
    number = whole(name, value, low, " or an integer tensor [B]")
    return lambda b: number
