"""Which engine serves a call."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import NamedTuple, TypeVar

from flexmod.errors import ArgumentError, BackendError
from flexmod.kernels.launch import TooLarge
from flexmod.kernels.problem import (
    Gradients,
    Inputs,
    Problem,
    Result,
    Saved,
    empty_gradients,
    empty_result,
)

log = logging.getLogger("flexmod")
# In order of preference. To add an engine, add its module here: it needs `refuses` and `forward`.
# The reference comes last on purpose: it holds all scores in memory.
BACKENDS = ("hopper", "fa2", "cpu", "reference")
_SLOW = ("cpu", "reference")  # on a GPU: not what anybody hopes for
_warned: set[str] = set()
Returned = TypeVar("Returned")


class Choice(NamedTuple):
    """An engine, and whether the caller asked for it: then nothing else may serve the call."""

    name: str
    is_forced: bool


@cache
def backend(name: str) -> ModuleType:
    """The module of an engine; Triton is imported by the one that needs it, when it is called."""
    if name not in BACKENDS:
        raise ArgumentError(f"backend must be one of {', '.join(BACKENDS)}, not {name!r}")
    return importlib.import_module(f"flexmod.kernels.{name}")


def refusals(problem: Problem) -> dict[str, str | None]:
    """Each engine, in order of preference, and why it cannot serve the problem (None: it can)."""
    found: dict[str, str | None] = {}
    for name in BACKENDS:
        found[name] = backend(name).refuses(problem)
        if found[name] is None and name == "fa2" and problem.device.type == "cpu":
            found[name] = "on CPU tensors it is Triton's interpreter, slow: only when asked for"
    return found


def choose(problem: Problem, wanted: str | None = None) -> Choice:
    """The engine asked for, or the first that does not refuse.

    Raises:
        BackendError: the engine asked for refuses; the text says why.
    """
    if wanted is None:
        reasons = refusals(problem)
        name = next(name for name, reason in reasons.items() if reason is None)
        if problem.device.type != "cpu" and name in _SLOW:
            _warn_once("; ".join(f"{n} refuses: {why}" for n, why in reasons.items() if why), name)
        return Choice(name, False)
    reason = backend(wanted).refuses(problem)
    if reason is not None:
        raise BackendError(f"backend {wanted!r} cannot serve this call: {reason}")
    return Choice(wanted, True)


def forward(problem: Problem, inputs: Inputs, choice: Choice) -> Result:
    """Run an engine; if a kernel cannot be built, the cpu engine, with one warning."""
    if problem.is_empty:
        return empty_result(problem, inputs)
    return _run(choice, lambda engine: engine.forward(problem, inputs))


def backward(problem: Problem, inputs: Inputs, saved: Saved, choice: Choice) -> Gradients:
    """Gradients of a call, by the engine that served its forward."""
    if problem.is_empty:
        return empty_gradients(problem, inputs, saved)
    return _run(choice, lambda engine: engine.backward(problem, inputs, saved))


def instead(error: BackendError, choice: Choice) -> Choice:
    """The engine for a call whose own could not build a kernel; raises if that was asked for."""
    if choice.is_forced or choice.name in _SLOW:
        raise error
    name = "fa2" if choice.name == "hopper" else "cpu"
    _warn_once(str(error), name)
    return Choice(name, False)


def _run(choice: Choice, call: Callable[[ModuleType], Returned]) -> Returned:
    while True:
        try:
            return call(backend(choice.name))
        except TooLarge:  # the next tiles that are planned are smaller, until there are none
            continue
        except BackendError as error:
            choice = instead(error, choice)


def _warn_once(reason: str, instead: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        log.warning("%s; using the slower %s engine instead", reason, instead)
