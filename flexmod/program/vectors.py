"""Short vectors inside a mod: a trailing axis of a captured tensor, unrolled into scalars."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from flexmod.errors import TraceError
from flexmod.program.proxy import Proxy, Traced, call, named
from flexmod.program.views import LARGEST_VECTOR, View

# Functions of whole vectors; all others are applied entry by entry.
WHOLE = ("sum", "prod", "mean", "amax", "amin", "any", "all", "dot", "inner", "vdot", "matmul",
         "__matmul__", "__rmatmul__", "unsqueeze", "take", "gather", "index_select",
         "embedding")  # fmt: skip


class Vector(Traced):
    """Scalars that came from one axis."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.recorder = next(i.recorder for i in items if isinstance(i, Traced))

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.items),)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            return self.items[index]
        if isinstance(index, slice):
            return Vector(self.items[index])
        raise TraceError("a computed vector can only be indexed with Python ints and slices")


def is_vector(value: Any) -> bool:
    return isinstance(value, View | Vector) or (isinstance(value, Tensor) and value.ndim > 0)


def elements(value: Any) -> list[Any]:
    """The scalars of a vector."""
    if isinstance(value, Vector):
        return value.items
    if isinstance(value, View):
        return value.elements()
    if value.ndim != 1 or value.shape[0] > LARGEST_VECTOR:
        raise TraceError(
            f"a captured tensor of shape {list(value.shape)} meets a traced scalar: index it with "
            "b, h, q_idx or kv_idx so that one value remains"
        )
    return list(value.unbind())


def elementwise(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a scalar function along vectors; a vector of one entry is a scalar again."""
    columns = [elements(a) if is_vector(a) else a for a in args]
    lengths = {len(c) for c in columns if isinstance(c, list)}
    length = max(lengths)
    if lengths - {1, length}:
        raise TraceError(f"vectors of {' and '.join(map(str, sorted(lengths)))} entries meet")
    items = []
    for n in range(length):
        row = [c[n if len(c) > 1 else 0] if isinstance(c, list) else c for c in columns]
        if any(isinstance(r, Traced) for r in row):
            items.append(call(name, tuple(row), kwargs))
        else:
            anchor = next(a for a in args if isinstance(a, Traced))
            row = [anchor.recorder.load(r, []) if isinstance(r, Tensor) else r for r in row]
            items.append(call(name, tuple(row), kwargs))
    return items[0] if length == 1 else Vector(items)


def _reduce(
    step: Callable[[Any, Any], Any], prepare: Callable[[Any], Any] = lambda x: x
) -> Callable[..., Any]:
    """A function of one axis from one of two entries; `prepare` brings entries to torch's type."""

    def reduction(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        return reduce(step, [prepare(entry) for entry in _entries(x, dim, keepdim)])

    return reduction


def _entries(x: Any, dim: Any, keepdim: bool) -> list[Any]:
    if dim not in (None, 0, -1, (0,), (-1,)) or keepdim:
        raise TraceError("a reduction in a mod works on one axis: leave dim and keepdim out")
    return [x] if isinstance(x, Proxy) else elements(x)


def _extreme(op: str) -> Callable[..., Any]:
    """The largest or smallest entry: an operation of its own, as ties share its gradient evenly."""

    def extreme(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        entries = _entries(x, dim, keepdim)
        kind = reduce(torch.promote_types, (entry.dtype for entry in entries))
        found, *rest = (x.recorder.cast(entry, kind) for entry in entries)
        for count, entry in enumerate(rest, 2):
            found = x.recorder.apply(op, found, entry, attr=count)
        return found

    return extreme


def _summed(x: Any) -> Any:
    """torch sums booleans and small integers as int64."""
    return x if x.dtype.is_floating_point else x.to(torch.int64)


def _truth(x: Any) -> Any:
    return x.to(torch.bool)


named("sum")(_reduce(lambda x, y: x + y, _summed))
named("prod")(_reduce(lambda x, y: x * y, _summed))
named("any")(_reduce(lambda x, y: x | y, _truth))
named("all")(_reduce(lambda x, y: x & y, _truth))
named("amax")(_extreme("amax"))
named("amin")(_extreme("amin"))


@named("mean")
def mean(x: Any, dim: Any = None) -> Any:
    return x if isinstance(x, Proxy) else call("sum", (x, dim), {}) / len(elements(x))


@named("dot", "inner", "vdot", "matmul", "__matmul__", "__rmatmul__")
def dot(x: Any, y: Any) -> Any:
    """Dot product of two short vectors."""
    left, right = elements(x), elements(y)
    if len(left) != len(right):
        raise TraceError(f"a dot product of {len(left)} with {len(right)} entries")
    return call("sum", (elementwise("mul", (x, y), {}),), {})


@named("unsqueeze")
def unsqueeze(x: Any, dim: int) -> Any:
    """A scalar as a vector of one entry, to be compared with a captured vector."""
    if not isinstance(x, Proxy):
        raise TraceError("unsqueeze in a mod works on a scalar: a vector has one axis only")
    if dim not in (0, -1):
        raise TraceError(f"unsqueeze of a traced scalar has no axis {dim}: use -1")
    return Vector([x])


@named("take")
def take(table: Tensor, index: Any) -> Any:
    return table.reshape(-1)[index]


@named("embedding")
def embedding(index: Any, weight: Tensor, *_: Any, **__: Any) -> Any:
    return weight[index]


@named("index_select")
def index_select(table: Tensor, dim: int, index: Any) -> Any:
    return table.movedim(dim, 0)[index] if table.ndim == 1 else _keep_axis(table, dim, index)


def _keep_axis(table: Tensor, dim: int, index: Any) -> Any:
    """The chosen entry with its axis kept, of length 1, as torch returns it."""
    axis = dim % table.ndim
    return table.unsqueeze(axis)[(slice(None),) * (axis + 1) + (index,)]


@named("gather")
def gather(table: Tensor, dim: int, index: Any) -> Any:
    if table.ndim != 1:
        raise TraceError("gather in a mod works on a captured vector: index the table instead")
    return table[index]
