"""The shape of the project: who may import whom, what is public, how long a file may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import flexmod

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "flexmod"
MODULES = sorted(PACKAGE.rglob("*.py"))
TEMPLATES = sorted((ROOT / "templates").glob("*.jinja"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
LONGEST_FILE = 300  # lines

# A part may import parts of lower rank, and itself. Parts of one rank don't import each other.
RANKS = {
    "errors": 0,
    "options": 0,
    "counters": 0,
    "progress": 0,
    "bounded": 0,
    "program": 1,
    "masks": 1,
    "mods": 1,
    "traffic": 1,
    "blocks": 2,
    "formula": 2,
    "kernels": 3,
    "checks": 4,
    "autograd": 4,
    "memo": 4,
    "compiled": 4,
    "operands": 4,
    "cache": 5,
    "given": 5,
    "library": 5,
    "returned": 5,
    "attention": 6,
    "explain": 7,
    "patch": 7,
    "testing": 7,
    "integrations": 7,
    "nn": 7,
    "demo_text": 7,
    "demo": 8,
    "bench": 8,
    "__init__": 9,
    "__main__": 10,
}
# What a part may not import, at any place: program, blocks and the library must work without.
BARRED = {
    **{part: {"triton", "jinja2"} for part in ("program", "blocks", "masks", "mods", "errors")},
    "testing": {"triton", "jinja2", "flexmod"},
}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Absolute names of what a module imports; `from flexmod import x` is flexmod.x."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            whole = node.module == "flexmod"
            yield from (f"flexmod.{a.name}" for a in node.names) if whole else [str(node.module)]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=named)
def test_imports_go_one_way(path: Path) -> None:
    part = part_of(path)
    assert part in RANKS, f"give {part} a rank"
    for name in imports(path):
        package, _, rest = name.partition(".")
        if package != "flexmod" or not rest:
            continue
        other = rest.split(".")[0]
        if other in RANKS:  # else a name of flexmod/__init__.py, such as __version__
            lower = RANKS[other] < RANKS[part]
            assert other == part or lower, f"{named(path)} must not import {name}"


@pytest.mark.parametrize("path", MODULES, ids=named)
def test_parts_do_without_what_they_must_not_need(path: Path) -> None:
    barred = BARRED.get(part_of(path), set())
    found = {name.split(".")[0] for name in imports(path)}
    assert not found & barred


def test_importing_flexmod_is_light() -> None:
    code = "import sys, flexmod; print(*[m for m in ('triton', 'jinja2') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.split() == []


def test_public_names_are_sorted_and_exist() -> None:
    assert flexmod.__all__ == sorted(flexmod.__all__)
    assert all(hasattr(flexmod, name) for name in flexmod.__all__)


@pytest.mark.parametrize("library", [flexmod.masks, flexmod.mods], ids=lambda m: m.__name__)
def test_library_names_are_sorted_and_exist(library: object) -> None:
    names = library.__all__  # type: ignore[attr-defined]
    assert names == sorted(names)
    assert all(callable(getattr(library, name)) for name in names)


def test_every_imported_public_name_is_listed() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    taken = [n for node in tree.body if isinstance(node, ast.ImportFrom) for n in node.names]
    assert sorted(alias.asname or alias.name for alias in taken) == flexmod.__all__


@pytest.mark.parametrize("path", [*MODULES, *TEMPLATES, *TESTS], ids=named)
def test_files_are_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LONGEST_FILE, f"{named(path)} has {lines} lines: make two subjects of it"
