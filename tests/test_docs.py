"""The documentation is true: its code runs, and prints what it says it prints.

Every ```python block of README.md and docs/*.md is executed, in order, one namespace a page; what
a block prints must be the ```text block right after it. FLEXMOD_REFRESH_DOCS=1 rewrites those.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import io
import os
import pkgutil
import re
import runpy
from pathlib import Path

import pytest

import flexmod

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n?```text\n(?P<text>.*?)```\n)?", re.DOTALL)
NEEDS = re.compile(r"^<!-- needs: (\w+) -->$", re.M)  # a page about another library
REFRESH = os.environ.get("FLEXMOD_REFRESH_DOCS") == "1"
# __main__ runs when it is imported.
MODULES = [
    module.name
    for module in pkgutil.walk_packages(flexmod.__path__, "flexmod.")
    if not module.name.endswith("__main__")
]


def printed(code: str, namespace: dict[str, object], at: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, at, "exec"), namespace)
    # Without spaces at the ends of lines, which editors take out of a page.
    lines = [line.rstrip() for line in output.getvalue().rstrip().splitlines()]
    return "".join(f"{line}\n" for line in lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_runs_and_prints_what_it_says(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = page.read_text(encoding="utf-8")
    for library in NEEDS.findall(text):
        pytest.importorskip(library, reason=f"{page.name} needs {library}")
    namespace: dict[str, object] = {"__name__": page.stem}
    fresh = text
    for block in BLOCK.finditer(text):
        # Blank lines above, so that errors name the page's own line.
        above = text[: block.start("code")].count("\n")
        output = printed("\n" * above + block["code"], namespace, str(page))
        expected = block["text"] or ""
        if REFRESH:
            shown = f"```text\n{output}```\n" if output else ""
            fresh = fresh.replace(block[0], f"```python\n{block['code']}```\n{shown}", 1)
        else:
            assert output == expected, f"{page.name}, the block at line {above + 1}"
    if fresh != text:
        page.write_text(fresh, encoding="utf-8")


def test_the_api_page_is_made_from_the_docstrings() -> None:
    path = ROOT / "docs" / "api.md"
    text = runpy.run_path(str(ROOT / "scripts" / "api_page.py"))["page"]()
    if REFRESH:
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, "FLEXMOD_REFRESH_DOCS=1 writes it anew"
    assert text.startswith(f"# API of flexmod {flexmod.__version__}\n")
    for name in flexmod.__all__:
        shown = (
            f"## flexmod.{name}"
            if inspect.ismodule(getattr(flexmod, name))
            else f"### flexmod.{name}"
        )
        assert f"\n{shown}\n" in text


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module(name)
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(verbose=False)
    report = io.StringIO()
    for test in finder.find(module, name, module=module):
        runner.run(test, out=report.write)
    assert not runner.failures, report.getvalue()


def listed(library: str) -> list[str]:
    """Names in the first column of the README's table of a library."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = re.search(rf"^\| `{re.escape(library)}` \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", readme, re.M)
    assert table, f"README.md has no table of {library}"
    rows = [line.split("|")[1] for line in table[1].splitlines()]
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


@pytest.mark.parametrize("library", [flexmod.masks, flexmod.mods], ids=lambda m: m.__name__)
def test_readme_lists_exactly_the_public_names(library: object) -> None:
    name = library.__name__  # type: ignore[attr-defined]
    assert sorted(listed(name)) == sorted(library.__all__)  # type: ignore[attr-defined]


def test_readme_lists_the_engines_in_order() -> None:
    from flexmod.kernels.choose import BACKENDS

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.split("## Choosing an engine")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.M) == list(BACKENDS)


def test_readme_names_places_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = readme.split("## Where to add things")[1].split("```")[1]
    for line in tree.strip().splitlines():
        for place in re.match(r"[\w/.]+( [\w/.]+)?", line)[0].split():
            assert (ROOT / place).exists(), place


def test_ci_runs_the_readme_test_command() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"```bash\n(.*?)\n```", readme, re.DOTALL)
    assert len(commands) == 2
    assert commands[1].startswith(".venv/bin/python -m pytest")  # what .ci/run looks for
    assert "-m flexmod demo" in commands[0]


def test_demo_prints_a_table_and_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    from flexmod.__main__ import main

    assert main(["demo", "--length", "700", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    rows = dict(re.findall(r"^ *(\w+(?: \w+)?) {2,}(.*)$", shown, re.M))
    assert rows["tokens"].startswith("700 bytes")
    kinds = [int(rows[kind].split()[0].replace(",", "")) for kind in ("empty", "partial", "full")]
    assert sum(kinds) == int(rows["blocks"].split()[0]) == 36
    assert float(rows["error"].split()[0]) < 2e-5
    assert "┌──────┐" in shown and "▄" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--length", "5"], "'5' is not a number of tokens from 64 to"),
        (["--length", "long"], "'long' is not a number of tokens"),
        (["--mods", "causal,foo"], "'foo' is none of causal, document"),
        (["--device", "potato"], "'potato' cannot be used"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_demo_refuses(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from flexmod.__main__ import main

    with pytest.raises(SystemExit) as stop:
        main(["demo", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    from flexmod.__main__ import main

    assert main([]) == 0
    assert "demo" in capsys.readouterr().out
