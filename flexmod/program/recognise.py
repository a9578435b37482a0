"""Mods that were traced before, known again by everything that they can read.

A trace costs a hundred microseconds, so it is spared where it can be shown that it would come out
the same. `fingerprint` collects what a function may read: its code, and that of the functions it
may call; the numbers, dtypes and containers in its closure, defaults and globals; of tensors what
shapes a trace (dtype, shape, strides, place, need of a gradient, and which are one), not what they
hold; and what it finds in modules, `torch.tanh` included. Equal fingerprints mean equal traces,
with other tensors in the place of the captured ones.

It gives up, and the mod is traced, whenever that cannot be shown: for objects with attributes, for
code that stores or imports anything, or reads an attribute that is neither torch's nor a module's;
and `trace` keeps nothing of a mod that looked into a tensor. So a changed mod never meets a stale
trace.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from flexmod.bounded import Bounded
from flexmod.program.ir import Program
from flexmod.program.proxy import FUNCTIONS
from flexmod.program.source import is_torch

# What tells nothing about the values of a tensor.
METADATA = frozenset(
    "shape dtype device ndim layout requires_grad is_cuda size dim numel stride is_floating_point "
    "element_size __len__".split()
)
# What a mod may call that is not its own code: it does the same for the same arguments.
_PURE = frozenset(
    [abs, bool, divmod, enumerate, float, int, isinstance, len, max, min, pow, range, reversed,
     round, sum, tuple, list, zip, torch.finfo, torch.iinfo, torch.dtype, torch.device,
     torch.layout, Tensor, Parameter]
)  # fmt: skip
_PURE_MODULES = ("math", "_operator")
_PLAIN = frozenset(
    [
        type(None),
        bool,
        int,
        str,
        bytes,
        type(Ellipsis),
        torch.dtype,
        torch.device,
        torch.Size,
        range,
    ]
)
# Instructions that only read, compute, call and jump, by the start of their names in all versions
# of Python; others (STORE_GLOBAL, STORE_ATTR, IMPORT_NAME, ...) are not followed.
_HARMLESS = tuple(
    "BINARY_ BUILD_ CACHE CALL COMPARE_OP CONTAINS_OP COPY DICT_MERGE END_FOR EXTENDED_ARG "
    "FOR_ITER FORMAT_ GET_ITER IS_OP JUMP_ KW_NAMES LIST_ LOAD_ATTR LOAD_CLOSURE LOAD_CONST "
    "LOAD_DEREF LOAD_FAST LOAD_GLOBAL LOAD_METHOD LOAD_SMALL_INT MAKE_CELL MAKE_FUNCTION NOP "
    "NOT_TAKEN "
    "POP_ITER POP_JUMP_ POP_TOP PRECALL PUSH_NULL RERAISE RESUME RETURN_ SET_FUNCTION_ATTRIBUTE "
    "STORE_FAST SWAP TO_BOOL UNARY_ UNPACK_ YIELD_VALUE".split()
)
_KINDS_OF_CLASSES = (type, type(Tensor), type(Parameter))
_NOTHING = object()
_MOST_ENTRIES = 64  # of a list or tuple


class _Unknown(Exception):
    """It cannot be told what a mod reads."""


@dataclass(frozen=True, eq=False)
class _Reads:
    """Names that a code object, with the functions defined in it, takes from elsewhere.

    foreign: attributes that no traced value or tensor has, so that a module must have them.
    """

    code: CodeType
    globals: tuple[str, ...]
    attributes: tuple[str, ...]
    foreign: frozenset[str]
    is_known: bool


# By the id of a code, which its entry keeps alive.
_reads: Bounded[int, _Reads] = Bounded(4096)
# Programs without their tensors, and which of the tensors they capture.
_programs: Bounded[Hashable, tuple[Program, tuple[int, ...]]] = Bounded(512)


def keep(key: Hashable, tensors: list[Tensor], program: Program) -> None:
    """Remember a trace, unless it captures a tensor that was made in it."""
    places = {id(x): n for n, x in enumerate(tensors)}
    if all(id(x) in places for x in program.captures):
        slots = tuple(places[id(x)] for x in program.captures)
        _programs.keep(key, (program.with_captures(()), slots))


def known(key: Hashable, tensors: list[Tensor]) -> Program | None:
    """The trace that a mod would give."""
    found = _programs.get(key)
    if found is None:
        return None
    program, slots = found
    return program.with_captures(tuple(tensors[n] for n in slots)) if slots else program


def forget() -> None:
    _programs.clear()


def fingerprint(mod: Callable[..., Any]) -> tuple[Hashable, list[Tensor]] | None:
    """All that a trace of `mod` can depend on, and the tensors it may capture; None: not known."""
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return None
    if torch._C._len_torch_dispatch_stack() or torch.compiler.is_compiling():
        return None
    walk = _Walk()
    try:
        return (walk.value(mod), walk.from_modules(), walk.sameness()), walk.tensors
    except _Unknown:
        return None


class _Walk:
    """Over what a mod can reach."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.modules: list[ModuleType] = []
        self.codes: list[_Reads] = []
        self.open: list[FunctionType] = []  # functions that the walk is inside of

    def value(self, x: Any) -> Hashable:
        kind = type(x)
        if kind in _PLAIN:
            return kind, x
        if kind is float:
            return float, x or repr(x)  # 0.0 is not -0.0
        if kind is FunctionType:
            return self.function(x)
        if kind is ModuleType:
            return self.module(x)
        if kind is Tensor or kind is Parameter:
            return self.tensor(x)
        if kind is tuple or kind is list:
            return (kind, *map(self.value, x)) if len(x) <= _MOST_ENTRIES else _unknown()
        if kind is functools.partial:
            named = tuple(x.keywords.items())
            return kind, self.value(x.func), self.value(x.args), self.value(named)
        if kind is BuiltinFunctionType or kind in _KINDS_OF_CLASSES:
            return x if _is_pure(x) else _unknown()
        return _unknown()

    def function(self, f: FunctionType) -> Hashable:
        code = f.__code__
        if f.__name__ in FUNCTIONS and is_torch(code):
            return f
        reads = _reads.get(id(code))
        if reads is None or reads.code is not code:
            reads = _read(code)
        if not reads.is_known or f.__dict__ or f in self.open:
            _unknown()
        self.open.append(f)
        if reads not in self.codes:
            self.codes.append(reads)
        names: dict[str, Any] = f.__globals__
        builtins: dict[str, Any] = f.__builtins__  # type: ignore[attr-defined]
        found: list[Hashable] = [reads, f.__name__]
        for name in reads.globals:
            x = names.get(name, _NOTHING)
            found.append(self.value(builtins.get(name) if x is _NOTHING else x))
        for cell in f.__closure__ or ():
            try:
                found.append(self.value(cell.cell_contents))
            except ValueError:  # not filled yet
                _unknown()
        if f.__defaults__ or f.__kwdefaults__:
            named = tuple((f.__kwdefaults__ or {}).items())
            found += [self.value(f.__defaults__), self.value(named)]
        self.open.pop()
        return tuple(found)

    def tensor(self, x: Tensor) -> Hashable:
        as_number = not x.ndim and not x.is_cuda and not x.requires_grad
        if as_number or x.layout is not torch.strided:
            _unknown()
        if any(not name.startswith("_") for name in x.__dict__):
            _unknown()
        self.tensors.append(x)
        return type(x), x.shape, x.stride(), x.dtype, x.device, x.requires_grad

    def module(self, x: ModuleType) -> Hashable:
        if "__getattr__" in x.__dict__ and x is not torch:
            _unknown()
        if x not in self.modules:
            self.modules.append(x)
        return x

    def from_modules(self) -> Hashable:
        """What the modules have under the names of attributes that are read somewhere."""
        found: list[Hashable] = []
        resolved: set[str] = set()
        size = -1
        while size != len(self.modules) + len(self.codes):  # until nothing new turns up
            size = len(self.modules) + len(self.codes)
            found.clear()
            for module, reads in product(self.modules, self.codes):
                for name in reads.attributes:
                    x = module.__dict__.get(name, _NOTHING)
                    if x is not _NOTHING:
                        found += [name, self.value(x)]
                        resolved.add(name)
        for reads in self.codes:
            if not reads.foreign <= resolved:
                _unknown()
        return tuple(found)

    def sameness(self) -> Hashable:
        """Which of the tensors are one, and which show the same memory."""
        if len(self.tensors) < 2:
            return None
        ids = [id(x) for x in self.tensors]
        places = [x.data_ptr() or id(x) for x in self.tensors]
        return tuple(map(ids.index, ids)), tuple(map(places.index, places))


def _unknown() -> NoReturn:
    raise _Unknown


@lru_cache(maxsize=4096)
def _is_pure(x: Any) -> bool:
    """Whether a builtin function or a class does nothing but compute."""
    if isinstance(x, type):
        return x in _PURE
    home = (x.__module__ or "").partition(".")[0]
    name = x.__name__.removeprefix("special_")
    known = home == "torch" and (name in FUNCTIONS or name in METADATA)
    return known or home in _PURE_MODULES or x in _PURE


def _read(code: CodeType) -> _Reads:
    """What a code object reads; remembered."""
    names: tuple[dict[str, None], dict[str, None]] = ({}, {})
    known = _scan(code, frozenset(), *names)
    attributes = frozenset(names[1])
    foreign = frozenset(n for n in attributes if n not in FUNCTIONS and n not in METADATA)
    return _reads.keep(id(code), _Reads(code, tuple(names[0]), tuple(names[1]), foreign, known))


def _scan(
    code: CodeType, own: frozenset[str], names: dict[str, None], attributes: dict[str, None]
) -> bool:
    """Gather the names of globals and attributes; False for an instruction that is not followed.

    `own`: variables of functions around this one, which are part of the scan.
    """
    own |= frozenset(code.co_cellvars)
    for line in dis.get_instructions(code):
        match line.opname:
            case "LOAD_GLOBAL":
                names[line.argval] = None
            case "LOAD_ATTR" | "LOAD_METHOD":
                attributes[line.argval] = None
            case "STORE_DEREF" if line.argval in own:
                pass
            case other if not other.startswith(_HARMLESS):
                return False
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return all([_scan(c, own, names, attributes) for c in inner])


def is_metadata(function: Callable[..., Any]) -> bool:
    """Whether a function of tensors tells nothing about their values."""
    name = getattr(function, "__name__", "")
    if name == "__get__":  # of a property
        name = getattr(getattr(function, "__self__", None), "__name__", "")
    return name in METADATA
