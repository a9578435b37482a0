"""Where in the user's code something happened: file, line and the expression itself."""

from __future__ import annotations

import linecache
import sys
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import NamedTuple

import torch

_OWN = str(Path(__file__).resolve().parent.parent / "program")
_TORCH = str(Path(torch.__file__).resolve().parent)
replayed: str | None = None  # the user's line, while a recorded graph stands for a mod


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if file == "<string>":  # exec and python -c, but methods that dataclasses write too
        module = str(frame.f_globals.get("__name__"))
        return not module.startswith(("flexmod", "torch", "namedtuple_"))
    return not file.startswith((_OWN, _TORCH, "<frozen"))


def is_torch(code: CodeType) -> bool:
    """Whether it is part of torch."""
    return code.co_filename.startswith(_TORCH)


class Site(NamedTuple):
    """A place in the user's code; its text is made when somebody reads it."""

    code: CodeType
    instruction: int
    lineno: int

    def __str__(self) -> str:
        """`file:line: expression`; the exact expression where Python recorded its columns."""
        place = f"{self.code.co_filename}:{self.lineno}"
        expression = linecache.getline(self.code.co_filename, self.lineno).strip()
        positions = islice(self.code.co_positions(), self.instruction // 2, None)
        start, end, first, last = next(positions, (None,) * 4)
        if start is not None and start == end and first is not None and last is not None:
            line = linecache.getline(self.code.co_filename, start).encode()
            expression = line[first:last].decode(errors="replace").strip() or expression
        return f"{place}: {expression}" if expression else place


def user_site() -> Site | str | None:
    """The innermost frame outside of this package's tracer and torch."""
    if replayed is not None:
        return replayed
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    return Site(frame.f_code, frame.f_lasti, frame.f_lineno) if frame else None


def traceback_site(traceback: TracebackType | None) -> Site | None:
    """The innermost user frame of an exception."""
    site = None
    while traceback is not None:
        if _is_users(traceback.tb_frame):
            site = Site(traceback.tb_frame.f_code, traceback.tb_lasti, traceback.tb_lineno)
        traceback = traceback.tb_next
    return site


def definition_site(mod: object) -> str:
    """Where a mod is defined: for errors that concern the whole of it."""
    if getattr(mod, "site", None) is not None:  # a replay stands where its graph stopped
        return str(mod.site)  # type: ignore[attr-defined]
    function = getattr(mod, "func", mod)  # a partial
    function = getattr(function, "forward", function)  # a module
    for found in (function, getattr(type(function), "__call__", None)):  # noqa: B004
        code = getattr(found, "__code__", None)
        if code is not None:
            return f"{code.co_filename}:{code.co_firstlineno}"
    return "the mod"
