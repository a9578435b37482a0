"""Rendered text -> file -> module, remembered in memory and on disk by content.

A key is a hash of the text, the specialisation fields, the toolchain and the architecture: never
of a function's identity or an address, so a changed mod can never meet a stale kernel. Machine
code for a module is made and kept by Triton itself.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from flexmod.counters import COUNTS

_modules: dict[str, ModuleType] = {}
_remembered: dict[Hashable, tuple[str, ModuleType]] = {}


def load(
    signature: Hashable, render: Callable[[], str], fields: Mapping[str, Any], toolchain: str
) -> ModuleType:
    """The module of a kernel, found again or built.

    Args:
        signature: decides the text: equal signatures render equal texts. Spares the rendering.
        render: makes the text.
        fields: specialisation (tile sizes, head_dim, ...): part of the key, noted in the file.
        toolchain: compiler version and target architecture.
    """
    quick = (signature, tuple(fields.items()), toolchain)
    if quick in _remembered:
        COUNTS.memory_hits += 1
        return _remembered[quick][1]
    note = ", ".join(f"{name}={value}" for name, value in fields.items())
    text = f"# {toolchain}: {note}\n{render()}"
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    if key in _modules:
        COUNTS.memory_hits += 1
    else:
        _modules[key] = _import(key, _store(key, text))
    _remembered[quick] = (key, _modules[key])
    return _modules[key]


def forget() -> None:
    """Empty the memory; the disk is left alone."""
    _modules.clear()
    _remembered.clear()


@cache
def _directory(root: str) -> Path:
    """The cache directory, private to its user; a temporary one where that cannot be written."""
    path = Path(root)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError:
        return Path(tempfile.mkdtemp(prefix="flexmod-"))


def directory() -> Path:
    """`FLEXMOD_CACHE_DIR`, else `flexmod` in the XDG cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return _directory(os.environ.get("FLEXMOD_CACHE_DIR") or str(Path(base) / "flexmod"))


def _store(key: str, text: str) -> Path:
    """The file of a text. One that is missing or damaged is written anew, atomically."""
    path = directory() / f"{key}.py"
    try:
        intact = path.read_text(encoding="utf-8") == text
    except (OSError, UnicodeDecodeError):
        intact = False
    if intact:
        COUNTS.disk_hits += 1
        return path
    COUNTS.compiles += 1
    write(path, text.encode())
    return path


def write(path: Path, content: bytes) -> None:
    """A whole file or none: other processes may read it at the same time."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(temporary, path)


def _import(key: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"flexmod_kernel_{key}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
