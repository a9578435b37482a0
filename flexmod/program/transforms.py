"""Whether torch's transforms, gradients and graphs follow a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_PLAIN = (Tensor, torch.nn.Parameter)


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a torch.func transform wraps a tensor, so that no Python decision may read it."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def has_tangent(tensor: Tensor) -> bool:
    """Whether forward-mode differentiation follows a tensor."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def is_differentiated(tensor: Tensor) -> bool:
    """Whether a gradient, a tangent or a transform follows a tensor."""
    return tensor.requires_grad or is_wrapped(tensor) or has_tangent(tensor)


def is_recorded(tensor: Tensor) -> bool:
    """Whether operations on a tensor are watched or recorded, or it has no values at all."""
    if torch._C._len_torch_dispatch_stack() or tensor.is_meta:
        return True
    if type(tensor) in _PLAIN:  # the usual case, on every call
        return False
    return torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python)


def as_tensor(value: Any, dtype: torch.dtype) -> Tensor:
    """A number of a dynamic graph as a 0-dim tensor, written so that no value is baked in."""
    if isinstance(value, torch.SymFloat):  # a product is what torch.compile turns into a tensor
        return torch.mul(torch.ones((), dtype=dtype, device="cpu"), value)  # type: ignore[arg-type]
    return torch.scalar_tensor(value, dtype=dtype, device="cpu")
