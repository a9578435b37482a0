"""The recorder: turns operations on proxies into instructions, one type an operation."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexmod.errors import TraceError
from flexmod.program.ir import Instruction, Load, Program
from flexmod.program.ops import TABLE
from flexmod.program.source import Site, user_site
from flexmod.program.transforms import as_tensor, is_differentiated, is_recorded

if TYPE_CHECKING:
    from flexmod.program.proxy import Proxy

HALF = (torch.float16, torch.bfloat16)
Operand = Any  # a Proxy or a Python number
# On booleans torch reads these as logic.
_LOGIC = {"add": "or", "mul": "and"} | dict.fromkeys(("maximum", "amax"), "or")
_LOGIC |= dict.fromkeys(("minimum", "amin"), "and")
# A number of a dynamic graph behaves as the Python number that it stands for.
_SYMBOLIC = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
NUMBERS = (bool, int, float, *_SYMBOLIC)
Number = Any  # one of them
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


class Recorder:
    """Collects the instructions of one mod. Equal instructions are recorded once."""

    def __init__(self, device: torch.device, real: torch.dtype = torch.float32) -> None:
        self.device = device
        self.real = real  # what an integer becomes when it meets a Python float
        self.lines: list[Instruction] = []
        self.numbers: list[float | int] = []
        self.captures: list[Tensor] = []
        self.sites: dict[int, Site | str | None] = {}
        self.has_read = False  # whether a tensor's value became a number
        self._known: dict[Instruction, int] = {}
        self._slots: dict[Hashable, int] = {}

    def emit(
        self, op: str, args: tuple[int, ...], dtype: torch.dtype, attr: Hashable = None
    ) -> Proxy:
        from flexmod.program.proxy import Proxy

        line = Instruction(op, args, dtype, attr)
        if line not in self._known:
            self._known[line] = len(self.lines)
            self.lines.append(line)
        return Proxy(self, self._known[line])

    def number(self, value: Number, dtype: torch.dtype) -> Proxy:
        """A run-time scalar. Never merged with an equal one: which are equal may change."""
        if isinstance(value, tuple(_SYMBOLIC)):
            return self.load(as_tensor(value, dtype), [])
        value = float(value) if dtype.is_floating_point else _whole(value, dtype)
        self.numbers.append(value)
        return self.emit("number", (), dtype, len(self.numbers) - 1)

    def as_proxy(self, value: Operand, dtype: torch.dtype) -> Proxy:
        """The operand as an instruction of the given type."""
        if isinstance(value, NUMBERS):
            return self.number(value, dtype)
        return self.cast(value, dtype)

    def cast(self, value: Proxy, dtype: torch.dtype) -> Proxy:
        if dtype in HALF:
            single = self.cast(value, torch.float32)
            return self.emit("round_to", (single.position,), torch.float32, dtype)
        if dtype.is_complex:
            raise TraceError("complex numbers are not supported in a mod")
        return value if value.dtype == dtype else self.emit("cast", (value.position,), dtype)

    def common_type(self, *values: Operand) -> torch.dtype:
        """The type that operands of one operation share; two Python floats are `real`."""
        return _types("where", (torch.bool, *(_kind(v) for v in values)), self.real)[2]

    def apply(self, name: str, *args: Operand, attr: Hashable = None) -> Proxy:
        """Record one row of the table, its operands cast to one type."""
        name, operands, dtype = _types(name, tuple(_kind(a) for a in args), self.real)
        if name in ("floordiv", "mod") and not dtype.is_floating_point and _is_zero(args[1]):
            raise TraceError("division by the number 0")
        values = [self.as_proxy(a, t) for a, t in zip(args, operands, strict=True)]
        return self.emit(name, tuple(v.position for v in values), dtype, attr)

    def load(self, tensor: Tensor, indices: list[Proxy]) -> Proxy:
        """Read one element of a captured tensor; half precision is read as float32."""
        if tensor.dtype.is_complex:
            raise TraceError(f"a captured tensor has dtype {tensor.dtype}: use a real dtype")
        if not tensor.ndim and tensor.device.type == "cpu" and _has_value(tensor):
            self.has_read = True
            return self.number(tensor.item(), _readable(tensor.dtype))
        for axis, index in enumerate(indices):
            if index.dtype.is_floating_point or index.dtype == torch.bool:
                raise TraceError(
                    f"axis {axis} of a captured tensor is indexed with {index.dtype}; "
                    "indices must be integers: add .long()"
                )
            if not tensor.shape[axis]:
                raise TraceError(f"axis {axis} of a captured tensor is indexed but is empty")
        positions = tuple(i.position for i in indices)
        load = Load(self.slot(tensor), ("check",) * tensor.ndim)
        value = self.emit("load", positions, _readable(tensor.dtype), load)
        if value.position not in self.sites:
            self.sites[value.position] = user_site()
        return value

    def slot(self, tensor: Tensor) -> int:
        """Captures are told apart by what they show, so a view made twice is captured once."""
        key: Hashable = id(tensor)
        if _has_value(tensor):
            key = (_address(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if key not in self._slots:
            self._slots[key] = len(self.captures)
            self.captures.append(tensor)
        return self._slots[key]

    def program(self, kind: str, name: str, *results: Proxy) -> Program:
        """The finished program: only what the results need, renumbered."""
        needed = {r.position for r in results}
        for position in range(max(needed), -1, -1):
            if position in needed:
                needed.update(self.lines[position].args)
        order = {old: new for new, old in enumerate(sorted(needed))}
        numbers: list[float | int] = []
        captures: list[Tensor] = []
        slots: dict[int, int] = {}
        lines = []
        for old in order:
            line = self.lines[old]
            attr = line.attr
            if line.op == "number":
                numbers.append(self.numbers[attr])
                attr = len(numbers) - 1
            elif isinstance(attr, Load):
                if attr.slot not in slots:
                    slots[attr.slot] = len(captures)
                    captures.append(self.captures[attr.slot])
                attr = Load(slots[attr.slot], attr.modes)
            lines.append(Instruction(line.op, tuple(order[a] for a in line.args), line.dtype, attr))
        sites = {order[p]: s for p, s in self.sites.items() if p in order}
        outputs = tuple(order[r.position] for r in results)
        return Program(kind, name, tuple(lines), outputs, tuple(numbers), tuple(captures), sites)


def _has_value(tensor: Tensor) -> bool:
    """Whether its values may be read here: nothing records or differentiates it."""
    return not is_differentiated(tensor) and not is_recorded(tensor)


def _address(tensor: Tensor) -> Hashable:
    """Where a tensor's data lies; its identity if it has none (meta, torch.func transforms)."""
    try:
        return tensor.data_ptr() or id(tensor), tensor.device
    except RuntimeError:
        return id(tensor)


def _readable(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALF else dtype


def _whole(value: int, dtype: torch.dtype) -> int:
    """torch would keep the last bits alone, or raise, which depends on the operation."""
    if dtype != torch.bool and not torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max:
        kind = str(dtype).removeprefix("torch.")
        wider = "" if dtype == torch.int64 else ": add .long() to the captured tensor"
        raise TraceError(f"the number {value} is not in the range of {kind}{wider}")
    return int(value)


def _is_zero(value: Operand) -> bool:
    return isinstance(value, bool | int | float) and value == 0


def _kind(value: Operand) -> torch.dtype | type:
    if isinstance(value, bool | int | float):
        return type(value)
    return _SYMBOLIC.get(type(value)) or value.dtype


@lru_cache(maxsize=4096)
def _types(
    name: str, kinds: tuple[torch.dtype | type, ...], real: torch.dtype
) -> tuple[str, tuple[torch.dtype, ...], torch.dtype]:
    """The row to record, the types of its operands and of its result: torch's own rules.

    Asked on 0-dim tensors, and on Python numbers where the operand is one.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(real)
    try:
        with torch._C.DisableTorchFunction():  # this is not the mod's doing
            samples: list[Any] = [_sample(k) for k in kinds]
            dtype = TABLE[name].evaluate(*samples).dtype
            common = torch.result_type(*samples[:2]) if name in _COMPARISONS else dtype
    finally:
        torch.set_default_dtype(default)
    dtype, common = (torch.float32 if d in HALF else d for d in (dtype, common))
    if name == "where":
        return name, (torch.bool, dtype, dtype), dtype
    if dtype == torch.bool and name not in _COMPARISONS:
        name = _LOGIC.get(name, name)
    return name, (common,) * len(kinds), dtype


def _sample(kind: torch.dtype | type) -> Any:
    return kind(1) if isinstance(kind, type) else torch.ones((), dtype=kind, device="cpu")
