"""Calls like an earlier one: what their shape decides was decided then.

The first call of a shape is checked, its programs are fitted to its lengths, an engine is chosen,
and kernels are found. The next ones bring other tensors and run at once. A call's shape is a key
with everything in it that any of this may read:

tensors    shape, strides, dtype, device, whether it needs a gradient; alignment of query, key and
           value to 16 bytes, which machine code depends on
programs   structure, numbers, and of each captured tensor the same as of the others
block map  its extents, its blocks, and its mask's program; not which blocks are live: that is in
           tensors that the kernel reads
arguments  as they were given
torch      whether gradients are recorded, and whether in a fixed order

Nothing is known by an address or an identity, which something else may have later. Calls that
follow rules of their own (subclasses of Tensor, torch.func, forward mode, and what watches
operations) have no key.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from flexmod.blocks import BlockMask
from flexmod.bounded import Bounded
from flexmod.kernels.prepared import Prepared
from flexmod.program import Program

_NUMBERS = (type(None), int, float, bool)
_TENSORS = (Tensor, Parameter)

Calls = Bounded[Hashable, Prepared]
_known: Bounded[Hashable, Calls] = Bounded(1024)  # by arguments that were found right; by programs
operations: Calls = Bounded(1024)  # calls as one operation of torch, by keys of `flexmod.library`


def forget() -> None:
    _known.clear()
    operations.clear()


def known(key: Hashable | None) -> Calls | None:
    """The calls with these arguments; None: there was none, they must be checked."""
    return None if key is None else _known.get(key)


def checked(key: Hashable | None) -> Calls:
    """Note that arguments were found right; where calls with them are kept."""
    calls: Calls = Bounded(256)
    return calls if key is None else _known.keep(key, calls)


def arguments_key(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor | None,
    scale: float | None,
    dropout_p: float,
    options: Mapping[str, Any] | None,
    *others: bool | str | None,
) -> Hashable | None:
    """The shape of a call but for its programs; None: it has none."""
    if not type(query) is type(key) is type(value) is Tensor:
        return None
    if type(scale) not in _NUMBERS or type(dropout_p) not in _NUMBERS:
        return None
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return None
    if torch._C._len_torch_dispatch_stack() or query.is_meta:
        return None
    if query.is_neg() or key.is_neg() or value.is_neg():
        return None
    if sink is not None and type(sink) not in _TENSORS:
        return None
    try:
        return (
            query.shape, query.stride(), query.dtype, query.device, query.requires_grad,
            query.data_ptr() % 16,
            key.shape, key.stride(), key.dtype, key.device, key.requires_grad, key.data_ptr() % 16,
            value.shape, value.stride(), value.dtype, value.device, value.requires_grad,
            value.data_ptr() % 16,
            None if sink is None else layout(sink),
            repr(scale) if scale == 0 else scale,  # 0.0 is not -0.0
            dropout_p,
            None if options is None else repr(options),
            torch.is_grad_enabled(),
            others,
        )  # fmt: skip
    except RuntimeError:  # nested and sparse tensors have no strides
        return None


def programs_key(score: Program | None, mask: BlockMask | None) -> Hashable | None:
    """The shape of a call's programs and of its block map; None: it has none."""
    found: list[Hashable] = []
    captures: tuple[Tensor, ...] = ()
    if score is not None:
        found.append(score.identity)
        captures = score.captures
    if mask is not None:
        found.append(mask.layout)
        captures += mask.program.captures
    for x in captures:
        if type(x) not in _TENSORS or x.is_neg():
            return None
        found += layout(x)
    return tuple(found)


def layout(x: Tensor) -> tuple[Hashable, ...]:
    """What of a tensor is part of a key."""
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad
