"""Prints docs/api.md: the public API with its signatures and docstrings.

FLEXMOD_REFRESH_DOCS=1 pytest tests/test_docs.py -k page writes it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import flexmod

WIDTH = 100
# Module -> its public names; None: what its __all__ lists.
MODULES: dict[str, tuple[str, ...] | None] = {
    "flexmod": None,
    "flexmod.masks": None,
    "flexmod.mods": None,
    "flexmod.nn": None,
    "flexmod.integrations.transformers": ("register",),
    "flexmod.testing": None,
    "flexmod.cache": ("stats", "reset_stats", "clear_memory", "directory"),
}
MADE_BY_OTHERS = (flexmod.BlockMask, flexmod.Program)  # by functions, not by their names


def page() -> str:
    """The text of docs/api.md for the installed version."""
    parts = [
        f"# API of flexmod {flexmod.__version__}",
        "Made from the docstrings by `scripts/api_page.py`; `help(flexmod.flex_attention)` shows "
        "the same. Names that are not on this page may change without notice.",
    ]
    seen: set[int] = set()
    for module, names in MODULES.items():
        parts += _module(module, names, seen)
    return "\n\n".join(parts) + "\n"


def _module(name: str, names: tuple[str, ...] | None, seen: set[int]) -> Iterator[str]:
    """Its parts; what another module has shown is not shown again."""
    module = importlib.import_module(name)
    yield f"## {name}\n\n{inspect.getdoc(module)}" if name != "flexmod" else f"## {name}"
    for public in names or module.__all__:
        value = getattr(module, public)
        if inspect.ismodule(value) or id(value) in seen:
            continue
        seen.add(id(value))
        yield f"### {name}.{public}\n\n{_block(public, value)}"
        if inspect.isclass(value):
            yield from _methods(f"{name}.{public}", value)


def _methods(owner: str, cls: type) -> Iterator[str]:
    """Public methods and properties that a class itself defines and documents."""
    for name in vars(cls):
        value = inspect.getattr_static(cls, name)
        documented = value.fget if isinstance(value, property) else value
        documented = getattr(documented, "__func__", documented)
        if name.startswith("_") or not inspect.isfunction(documented) or not documented.__doc__:
            continue
        if isinstance(value, property):
            yield f"#### {owner}.{name}\n\n{_fenced(name, documented)}"
        else:
            yield f"#### {owner}.{name}\n\n{_block(name, documented)}"


def _block(name: str, value: Any) -> str:
    return _fenced(f"{name}{_signature(value)}" if callable(value) else name, value)


def _fenced(head: str, value: Any) -> str:
    return f"```text\n{head}\n\n{inspect.getdoc(value)}\n```"


def _signature(value: Any) -> str:
    """Arguments in one line, or one a line where that is too long."""
    if value in MADE_BY_OTHERS:
        return ""
    if inspect.isclass(value) and issubclass(value, BaseException | dict):  # errors, TypedDicts
        return ""
    signature = inspect.signature(value)
    arguments = []
    for p in signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not any(a.startswith("*") for a in arguments):
            arguments.append("*")
        if p.name != "self":
            arguments.append(_argument(p))
    returned = signature.return_annotation
    end = "" if returned is signature.empty or inspect.isclass(value) else f" -> {_type(returned)}"
    short = f"({', '.join(arguments)}){end}"
    if len(short) <= WIDTH - 20:
        return short
    return "(\n    " + ",\n    ".join(arguments) + f",\n){end}"


def _argument(p: inspect.Parameter) -> str:
    star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
    text = f"{star}{p.name}"
    if star:
        return text
    if p.annotation is not p.empty:
        text += f": {_type(p.annotation)}"
    return text if p.default is p.empty else f"{text} = {p.default!r}"


def _type(annotation: Any) -> str:
    """An annotation as it is written."""
    annotation = getattr(annotation, "__forward_arg__", annotation)
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


if __name__ == "__main__":
    print(page(), end="")
