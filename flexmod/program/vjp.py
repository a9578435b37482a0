"""Derivative rules: from the gradient of a result to the gradients of its operands.

Each rule is ordinary torch code, `rule(grad, result, *operands) -> one gradient (or None) each`.
Run on proxies it records the derivative of a program; run on tensors it can be checked.
At ties and kinks they choose what torch's autograd chooses.
"""

from __future__ import annotations

import math
from typing import Any

import torch

Gradients = tuple[Any, ...]


def add(grad: Any, *_: Any) -> Gradients:
    return grad, grad


def sub(grad: Any, *_: Any) -> Gradients:
    return grad, -grad


def mul(grad: Any, _: Any, x: Any, y: Any) -> Gradients:
    return grad * y, grad * x


def truediv(grad: Any, result: Any, _: Any, y: Any) -> Gradients:
    return grad / y, -grad * result / y


def mod(grad: Any, _: Any, x: Any, y: Any) -> Gradients:
    return grad, -grad * torch.floor(x / y)


def neg(grad: Any, *_: Any) -> Gradients:
    return (-grad,)


def absolute(grad: Any, _: Any, x: Any) -> Gradients:
    return (grad * torch.sign(x),)


def minimum(grad: Any, _: Any, x: Any, y: Any) -> Gradients:
    """Ties share the gradient."""
    half, zero = grad * 0.5, torch.zeros_like(grad)
    tied = x == y
    return (
        torch.where(tied, half, torch.where(x < y, grad, zero)),
        torch.where(tied, half, torch.where(y < x, grad, zero)),
    )


def maximum(grad: Any, result: Any, x: Any, y: Any) -> Gradients:
    return minimum(grad, result, -x, -y)


def shared(grad: Any, result: Any, *entries: Any) -> Gradients:
    """Of amax and amin: all entries that are the result have an equal part."""
    ties = [(entry == result) * torch.ones_like(grad) for entry in entries]
    part = grad / sum(ties[1:], ties[0])
    return tuple(part * tie for tie in ties)


def power(grad: Any, result: Any, x: Any, y: Any) -> Gradients:
    zero = torch.zeros_like(grad)
    of_base = torch.where(y == 0, zero, grad * y * torch.pow(x, y - 1))
    of_exponent = torch.where((x == 0) & (y >= 0), zero, grad * result * torch.log(x))
    return of_base, of_exponent


def where(grad: Any, _: Any, condition: Any, *__: Any) -> Gradients:
    zero = torch.zeros_like(grad)
    return None, torch.where(condition, grad, zero), torch.where(condition, zero, grad)


def exp(grad: Any, result: Any, _: Any) -> Gradients:
    return (grad * result,)


def exp2(grad: Any, result: Any, _: Any) -> Gradients:
    return (grad * result * math.log(2),)


def expm1(grad: Any, result: Any, _: Any) -> Gradients:
    return (grad * (result + 1),)


def log(grad: Any, _: Any, x: Any) -> Gradients:
    return (grad / x,)


def log1p(grad: Any, _: Any, x: Any) -> Gradients:
    return (grad / (x + 1),)


def log2(grad: Any, _: Any, x: Any) -> Gradients:
    return (grad / (x * math.log(2)),)


def sqrt(grad: Any, result: Any, _: Any) -> Gradients:
    return (grad / (result * 2),)


def rsqrt(grad: Any, result: Any, _: Any) -> Gradients:
    return (grad * -0.5 * result * result * result,)


def tanh(grad: Any, result: Any, _: Any) -> Gradients:
    return (grad * (1 - result * result),)


def sigmoid(grad: Any, result: Any, _: Any) -> Gradients:
    return (grad * result * (1 - result),)


def sin(grad: Any, _: Any, x: Any) -> Gradients:
    return (grad * torch.cos(x),)


def cos(grad: Any, _: Any, x: Any) -> Gradients:
    return (-grad * torch.sin(x),)


def erf(grad: Any, _: Any, x: Any) -> Gradients:
    return (grad * torch.exp(-x * x) * (2 / math.sqrt(math.pi)),)
