"""From a template in `templates/` and two traced mods to the text of a kernel."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import BytecodeCache, Environment, FileSystemLoader, StrictUndefined
from jinja2.bccache import Bucket

from flexmod.kernels.compile import directory, write
from flexmod.kernels.fa2 import sums_text
from flexmod.kernels.fa2.sums import Plan
from flexmod.program.emit import Function

_PACKAGE = Path(__file__).resolve().parent.parent
_FUNCTION = re.compile(r"@triton\.jit\ndef (\w+)\(.*?(?=\n\n\n|\Z)", re.DOTALL)


class _ParsedTemplates(BytecodeCache):
    """Templates as Jinja has compiled them, kept beside the kernels: parsing them takes longer
    than the rest of a first call. Jinja's keys and checksums are of their text and its version."""

    def load_bytecode(self, bucket: Bucket) -> None:
        # A damaged file is as good as none: the code stays unset, and is made anew.
        with suppress(Exception), self._path(bucket).open("rb") as file:
            bucket.load_bytecode(file)

    def dump_bytecode(self, bucket: Bucket) -> None:
        with suppress(OSError):
            write(self._path(bucket), bucket.bytecode_to_string())

    def _path(self, bucket: Bucket) -> Path:
        return directory() / f"{bucket.key}.jinja"


@lru_cache(maxsize=1)
def _environment() -> Environment:
    """Templates lie inside an installed package, or beside it in a source checkout."""
    places = [_PACKAGE / "_templates", _PACKAGE.parent / "templates"]
    return Environment(
        loader=FileSystemLoader(places),
        bytecode_cache=_ParsedTemplates(),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(
    template: str,
    *,
    mods: Mapping[str, Function],
    sums: Plan,
    dropout: bool,
    real: str,
    fields: Mapping[str, Any],
) -> str:
    """A whole kernel module: the template with its holes filled.

    The holes are the mods and what sums their captured tensors' gradients, the device functions
    that these use, the list of captures (tensors of all mods first), and the type of run-time
    floats. `fields` are the compile-time arguments, of which a hopper kernel needs the number of
    consumers in its text.
    """
    tensors = [name for mod in mods.values() for name in mod.tensors] + sums_text.tensors(sums)
    captures = [(name, "") for name in tensors]
    captures += [pair for mod in mods.values() for pair in mod.values]
    captures += [(name, "") for name in sums_text.sizes(sums)]
    hopper = template.startswith("hopper")
    additions = sums_text.hopper_functions(sums) if hopper else sums_text.functions(sums)
    used = [mod.text for mod in mods.values()] + ["dropout_keep("] * dropout + [additions]
    holes = {f"{kind}_mod": mod.text.rstrip() for kind, mod in mods.items()}
    holes |= {
        f"{kind}_arguments": "".join(f", {name}" for name, _ in mod.parameters)
        for kind, mod in mods.items()
    }
    return (
        _environment()
        .get_template(template)
        .render(
            **holes,
            functions=device_functions("".join(used)),
            additions=additions,
            sum_arguments="".join(f", {name}" for name in sums_text.parameters(sums)),
            captures=[f'{name}: "{kind}"' if kind else name for name, kind in captures],
            capture_names=[name for name, _ in captures],
            real=real,
            fields=fields,
        )
    )


def device_functions(text: str) -> str:
    """Those of the templates `functions` and `diagonals` that a text calls, and what they call."""
    files = [_environment().get_template(f"{name}.py.jinja") for name in ("functions", "diagonals")]
    source = "\n\n\n".join(file.render().strip() for file in files)
    known = {match[1]: match[0] for match in _FUNCTION.finditer(source)}
    used: dict[str, str] = {}
    while wanted := [n for n in known if n not in used and re.search(rf"(?<![.\w]){n}\(", text)]:
        used.update({name: known[name] for name in wanted})
        text = "\n".join(body.split(":\n", 1)[1] for body in used.values())
    return "\n\n\n".join(known[name] for name in known if name in used)
