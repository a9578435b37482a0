"""`trace`: run a mod once on proxies and keep what it did."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import flexmod.program.activations
import flexmod.program.casts
import flexmod.program.composites
import flexmod.program.elementary
import flexmod.program.vectors  # noqa: F401  (these register what they record)
from flexmod import counters
from flexmod.errors import FlexmodError, TraceError
from flexmod.program import recognise
from flexmod.program.ir import ARGUMENTS, Program
from flexmod.program.proxy import CHANGES_CAPTURE, Proxy, inplace_base, recorder_of
from flexmod.program.record import NUMBERS, Recorder
from flexmod.program.refusals import RANDOM
from flexmod.program.source import Site, definition_site, traceback_site, user_site
from flexmod.program.views import View


def trace(
    mod: Callable[..., Any] | Program,
    kind: str | None = None,
    *,
    score_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Program:
    """Record a score_mod or mask_mod as a `Program`.

    Args:
        mod: a function `(score, b, h, q_idx, kv_idx)` or `(b, h, q_idx, kv_idx)`; also a lambda,
            partial, bound method, callable object or nn.Module. A Program is returned as it is.
        kind: "score" or "mask"; when left out, told from the number of arguments (5 or 4;
            arguments with defaults do not count).
        score_dtype: type of `score`: float32, or float64 for float64 attention.
        device: what `score.device` shows to the mod.

    Raises:
        TraceError: naming the user's file, line and expression, and what to write instead.

    Example:
        >>> import flexmod
        >>> print(flexmod.trace(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx))
        mask_mod <lambda>(q_idx, kv_idx)
          %0 = q_idx                                int64
          %1 = kv_idx                               int64
          %2 = ge %0 %1                             bool
          return %2
    """
    if isinstance(mod, Program):
        if kind is not None and mod.kind != kind:
            raise TraceError(f"a {mod.kind}_mod was given where a {kind}_mod is expected")
        return mod
    if not callable(mod):
        raise TraceError(f"a mod must be callable, not {type(mod).__name__}")
    seen = recognise.fingerprint(mod)
    asked = (kind, score_dtype, torch.device(device), torch.get_default_dtype())
    if seen is not None:
        known = recognise.known((seen[0], asked), seen[1])
        if known is not None:
            return known
    kind = _check_arity(mod, kind)
    counters.COUNTS.traces += 1
    real = score_dtype if kind == "score" else torch.get_default_dtype()
    recorder = Recorder(torch.device(device), real)
    arguments = [
        recorder.emit("input", (), score_dtype if name == "score" else torch.int64, name)
        for name in ARGUMENTS[kind]
    ]
    watch = _Watch()
    try:
        with watch:
            result = mod(*arguments)
        if watch.refused is not None:  # table += 1: torch tries again after a TypeError
            raise watch.refused
        value = _finish(recorder, kind, score_dtype, result)
    except Exception as error:
        if isinstance(error, FlexmodError) and not isinstance(error, TraceError):
            raise
        found = watch.site if error is watch.refused else traceback_site(error.__traceback__)
        site = str(found or definition_site(mod))
        raise TraceError(f"{site}\n  {_name(mod)}: {error}") from error.__cause__
    program = recorder.program(kind, _name(mod), value)
    is_lasting = not (watch.read_values or recorder.has_read)
    if seen is not None and is_lasting and recognise.fingerprint(mod) == seen:
        recognise.keep((seen[0], asked), seen[1], program)
    return program


def _finish(recorder: Recorder, kind: str, score_dtype: torch.dtype, result: Any) -> Proxy:
    """Check the mod's result and bring it to its type: bool for a mask, the score's for a score."""
    if isinstance(result, torch.Tensor) and result.numel() == 1:
        result = recorder.load(result.reshape(()), [])
    if isinstance(result, View) and result.shape.numel() == 1:
        result = result.elements()[0]
    if isinstance(result, NUMBERS):
        is_truth = isinstance(result, bool | torch.SymBool)
        result = recorder.number(result, torch.bool if is_truth else score_dtype)
    if not isinstance(result, Proxy):
        raise TraceError(
            f"a {kind}_mod must return one traced scalar, not {type(result).__name__}: "
            "check that every path ends in `return`"
        )
    if kind == "score":
        return recorder.cast(result, score_dtype)
    if result.dtype != torch.bool:
        raise TraceError(
            f"a mask_mod must return bool, not {result.dtype}: write a comparison such as `!= 0`"
        )
    return result


def _check_arity(mod: Callable[..., Any], kind: str | None) -> str:
    """The kind of a mod from its arguments; refuse a mod that cannot take them."""
    count, variadic = _positional(mod)
    if variadic and kind is not None:
        return kind
    found = next((k for k, names in ARGUMENTS.items() if len(names) == count), None)
    if found not in ("score", "mask") or (kind is not None and kind != found):
        wanted = [kind] if kind else ["score", "mask"]
        forms = " or ".join(f"{k}_mod({', '.join(ARGUMENTS[k])})" for k in wanted)
        raise TraceError(f"{_name(mod)} takes {count} positional arguments; expected {forms}")
    return found


def _positional(mod: Callable[..., Any]) -> tuple[int, bool]:
    """How many positional arguments have no default, and whether any number is taken."""
    if isinstance(mod, FunctionType) and not mod.__code__.co_flags & inspect.CO_VARARGS:
        if not hasattr(mod, "__wrapped__"):
            return mod.__code__.co_argcount - len(mod.__defaults__ or ()), False
    target = mod.forward if isinstance(mod, torch.nn.Module) else mod
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return 0, True  # a builtin: believe the caller
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in plain and p.default is p.empty]
    return len(required), any(p.kind is p.VAR_POSITIONAL for p in parameters)


def _name(mod: Any) -> str:
    if isinstance(mod, functools.partial):
        return _name(mod.func)
    return getattr(mod, "__name__", None) or type(mod).__name__


class _Watch(TorchFunctionMode):
    """Notices calls on ordinary tensors inside a mod that would silently become constants.

    read_values: whether something was computed from ordinary tensors, or one was made: then the
    trace may depend on what they hold.
    """

    refused: TraceError | None = None
    read_values = False
    site: Site | str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name.removesuffix("_") in RANDOM:
            raise self._refuse(
                f"torch's {name} in a mod would give one value for all positions: "
                "draw random numbers outside, into a tensor, and index it"
            )
        tensors = any(isinstance(a, torch.Tensor) for a in args)
        traced = recorder_of([*args, *(kwargs or {}).values()]) is not None
        changes = name == "__setitem__" or name != inplace_base(name)
        if changes and tensors and not traced:
            raise self._refuse(CHANGES_CAPTURE)
        if not traced and not recognise.is_metadata(func):
            self.read_values = True
        return func(*args, **(kwargs or {}))

    def _refuse(self, text: str) -> TraceError:
        self.refused, self.site = TraceError(text), user_site()
        return self.refused
