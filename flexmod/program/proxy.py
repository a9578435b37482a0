"""What a mod is called with: stand-ins that record what is done to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexmod.errors import TraceError
from flexmod.program.ops import TABLE
from flexmod.program.record import Recorder
from flexmod.program.refusals import PYTHON_VALUE, unknown

# Name of a torch function or method -> what records it. Filled from the table below, and by
# `composites`, `casts` and `vectors`.
FUNCTIONS: dict[str, Callable[..., Any]] = {}

_OPERATORS = """add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow
lshift rlshift rshift rrshift and rand or ror xor rxor eq ne lt le gt ge neg pos abs invert
matmul rmatmul""".split()
CHANGES_CAPTURE = "a mod changes a captured tensor in place: compute a new one instead"
_INPLACE = "add sub mul truediv floordiv mod pow and or xor lshift rshift".split()


def named(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what records the torch functions and methods of these names."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        FUNCTIONS.update(dict.fromkeys(names, function))
        return function

    return register


class Traced:
    """Base of the stand-ins: every operator, method and torch function goes to `dispatch`."""

    recorder: Recorder

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", str(func)).removeprefix("special_")
        if name == "where" and func is torch.Tensor.where:
            args = (args[1], args[0], *args[2:])
        return dispatch(name, tuple(args), kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name in PYTHON_VALUE:
            raise TraceError(PYTHON_VALUE[name])
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "where":
            return lambda condition, other: dispatch(name, (condition, self, other), {})
        base = name.removesuffix("_")
        if base not in FUNCTIONS:
            raise unknown(name, FUNCTIONS)
        return lambda *args, **kwargs: dispatch(name, (self, *args), kwargs)

    def __format__(self, spec: str) -> str:
        if spec:
            raise TraceError(PYTHON_VALUE["__format__"])
        return repr(self)

    def __hash__(self) -> int:
        return id(self)


class Proxy(Traced):
    """A traced scalar: one instruction of the program being recorded."""

    def __init__(self, recorder: Recorder, position: int) -> None:
        self.recorder, self.position = recorder, position

    shape = torch.Size([])
    ndim = 0
    requires_grad = False
    layout = torch.strided

    @property
    def op(self) -> str:
        return self.recorder.lines[self.position].op

    @property
    def dtype(self) -> torch.dtype:
        return self.recorder.lines[self.position].dtype

    @property
    def device(self) -> torch.device:
        return self.recorder.device

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def size(self, dim: int | None = None) -> torch.Size:
        return torch.Size([])

    def dim(self) -> int:
        return 0

    def numel(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        if all(part is Ellipsis for part in parts):
            return self
        if all(part is None or part is Ellipsis for part in parts) and parts.count(None) == 1:
            return dispatch("unsqueeze", (self, -1), {})
        raise TraceError("a traced value is a scalar: index the captured tensor instead")

    def __repr__(self) -> str:
        return f"<traced {self.recorder.lines[self.position].op} {self.dtype}>"


_SCALARS = (Proxy, int, float, bool)


def recorder_of(args: Any) -> Recorder:
    for arg in args:
        if isinstance(arg, Traced):
            return arg.recorder
        if isinstance(arg, tuple | list):
            found = recorder_of(arg)
            if found is not None:
                return found
    return None  # type: ignore[return-value]


def inplace_base(name: str) -> str:
    """The function whose result an in-place one writes: add_ and __iadd__ -> add, __add__."""
    if name.startswith("__i") and name[3:-2] in _INPLACE:
        return f"__{name[3:]}"
    return name.removesuffix("_") if not name.endswith("__") else name


def dispatch(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a torch function or method, known by its name, called with traced values."""
    if name == "__getitem__" and isinstance(args[0], Tensor):
        from flexmod.program.views import index_tensor

        return index_tensor(recorder_of(args), args[0], [None] * args[0].ndim, args[1])
    if name in PYTHON_VALUE:
        raise TraceError(PYTHON_VALUE[name])
    if name == "__setitem__":
        raise TraceError(CHANGES_CAPTURE)
    base = inplace_base(name)
    if base not in FUNCTIONS:
        raise unknown(name, FUNCTIONS)
    if base == name:
        return call(base, args, kwargs)
    if not isinstance(args[0], Proxy):
        raise TraceError(CHANGES_CAPTURE)
    target = args[0]
    target.position = target.recorder.cast(call(base, args, kwargs), target.dtype).position
    return target


def call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call what records `name`, with 0-dim tensors as loads and vectors element by element."""
    if not kwargs and all(type(a) in _SCALARS for a in args):
        return _checked(name, args, kwargs)  # the usual case, on every trace
    from flexmod.program.vectors import WHOLE, elementwise, is_vector

    recorder = recorder_of([*args, *kwargs.values()])
    if name in ("to", "type_as"):  # another tensor only lends its type
        args = (args[0], *(_type_of(a) for a in args[1:]))
        kwargs = {k: _type_of(v) for k, v in kwargs.items()}
    if name not in WHOLE:
        args = tuple(_scalar(recorder, a) for a in args)
        kwargs = {k: _scalar(recorder, v) for k, v in kwargs.items()}
        if any(is_vector(a) for a in args):
            return elementwise(name, args, kwargs)
    return _checked(name, args, kwargs)


def _checked(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return FUNCTIONS[name](*args, **kwargs)
    except TypeError as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{name}: these arguments are not supported in a mod ({error})") from None


def _type_of(value: Any) -> Any:
    return value.dtype if isinstance(value, Tensor | Traced) else value


def _scalar(recorder: Recorder, value: Any) -> Any:
    if isinstance(value, Tensor) and not value.ndim:
        return recorder.load(value, [])
    return value


def record(op: str, *args: Any) -> Any:
    """Record one row of the table."""
    return recorder_of(args).apply(op, *args)


def _install_operators() -> None:
    for row in TABLE.values():
        for spelling in row.spellings:
            FUNCTIONS[spelling] = lambda *args, _op=row.name: record(_op, *args)
    dunders = [f"__{n}__" for n in _OPERATORS] + [f"__i{n}__" for n in _INPLACE]
    for dunder in dunders:
        setattr(Traced, dunder, lambda self, *args, _n=dunder: dispatch(_n, (self, *args), {}))
    for dunder, text in PYTHON_VALUE.items():
        if dunder.startswith("__") and dunder not in ("__len__", "__iter__", "__format__"):
            setattr(Traced, dunder, _refusal(text))
    for dunder in ("__len__", "__iter__"):
        setattr(Proxy, dunder, _refusal(PYTHON_VALUE[dunder]))


def _refusal(text: str) -> Callable[..., Any]:
    def refuse(self: Traced, *_: Any) -> Any:
        raise TraceError(text)

    return refuse


_install_operators()
