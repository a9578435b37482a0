"""Types and constants inside a mod: `.to`, `.float()`, `zeros_like`, `new_full`, ..."""

from __future__ import annotations

from typing import Any

import torch

from flexmod.errors import TraceError
from flexmod.program.proxy import Proxy, named

_BY_METHOD = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "int": torch.int32,
    "long": torch.int64,
    "short": torch.int16,
    "char": torch.int8,
    "byte": torch.uint8,
    "bool": torch.bool,
}


def _install_methods() -> None:
    for name, dtype in _BY_METHOD.items():
        named(name)(lambda x, _dtype=dtype: x.recorder.cast(x, _dtype))


_install_methods()


@named("to", "type", "type_as")
def to(x: Proxy, *args: Any, **kwargs: Any) -> Proxy:
    """`x.to(dtype)`, `x.to(device)`, `x.to(other)`: only the type matters; `other` is its dtype."""
    for value in [*args, *kwargs.values()]:
        if isinstance(value, torch.dtype):
            return x.recorder.cast(x, value)
    return x


@named("clone", "contiguous", "cpu", "cuda", "view_as", "squeeze", "reshape", "view", "__pos__",
       "positive")  # fmt: skip
def same(x: Proxy, *_: Any, **__: Any) -> Proxy:
    return x


@named("new_full", "full_like")
def full(x: Proxy, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Proxy:
    """`x.new_full((), value)` and `torch.full_like(x, value)`."""
    value = kwargs.get("fill_value", args[-1] if args else None)
    shape = kwargs.get("size", args[0] if len(args) > 1 else ())
    if tuple(shape) not in ((), (1,)):
        raise TraceError(f"a constant of shape {tuple(shape)} in a mod: use shape ()")
    return x.recorder.as_proxy(value, dtype or x.dtype)


@named("new_zeros", "zeros_like")
def zeros(x: Proxy, *args: Any, dtype: torch.dtype | None = None, **names: Any) -> Proxy:
    return full(x, _shape(args, names), 0, dtype=dtype)


@named("new_ones", "ones_like")
def ones(x: Proxy, *args: Any, dtype: torch.dtype | None = None, **names: Any) -> Proxy:
    return full(x, _shape(args, names), 1, dtype=dtype)


def _shape(args: tuple[Any, ...], names: dict[str, Any]) -> tuple[int, ...]:
    """A shape is given as one tuple or as ints."""
    given = names.get("size", args)
    return tuple(given[0]) if given and isinstance(given[0], tuple | list) else tuple(given)


@named("new_tensor")
def new_tensor(x: Proxy, value: Any, dtype: torch.dtype | None = None, **_: Any) -> Proxy:
    kind = dtype or torch.ones((), dtype=x.dtype, device="cpu").new_tensor(value).dtype
    return x.recorder.as_proxy(value, kind)
