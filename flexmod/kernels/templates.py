"""From a template in `templates/` and two traced mods to the text of a kernel."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from flexmod.program.emit import Function

_PACKAGE = Path(__file__).resolve().parent.parent
_FUNCTION = re.compile(r"@triton\.jit\ndef (\w+)\(.*?(?=\n\n\n|\Z)", re.DOTALL)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    """Templates lie inside an installed package, or beside it in a source checkout."""
    places = [_PACKAGE / "_templates", _PACKAGE.parent / "templates"]
    return Environment(
        loader=FileSystemLoader(places),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(template: str, score: Function, mask: Function, **holes: str) -> str:
    """A whole kernel module: the template with its holes filled.

    The holes are the two mods, the device functions they use, and the list of their captures.
    """
    captures = [*score.parameters, *mask.parameters]
    return (
        _environment()
        .get_template(template)
        .render(
            functions=device_functions(score.text + mask.text),
            score_mod=score.text.rstrip(),
            mask_mod=mask.text.rstrip(),
            score_arguments="".join(f", {name}" for name, _ in score.parameters),
            mask_arguments="".join(f", {name}" for name, _ in mask.parameters),
            captures=[f'{name}: "{kind}"' if kind else name for name, kind in captures],
            capture_names=[name for name, _ in captures],
            **holes,
        )
    )


def device_functions(text: str) -> str:
    """Those of `functions.py.jinja` that the text calls, and what they call."""
    source = _environment().get_template("functions.py.jinja").render()
    known = {match[1]: match[0] for match in _FUNCTION.finditer(source)}
    used: dict[str, str] = {}
    while wanted := [n for n in known if n not in used and re.search(rf"(?<![.\w]){n}\(", text)]:
        used.update({name: known[name] for name in wanted})
        text = "\n".join(body.split(":\n", 1)[1] for body in used.values())
    return "\n\n\n".join(known[name] for name in known if name in used)
