"""A mod that torch.compile has recorded: a graph of scalars, run again on our own stand-ins."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from flexmod.program import source

_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*(?:\n +(?P<code>[^\n]+))?'
)


class Replay(torch.fx.Interpreter):
    """A mod to be traced. Its arguments are the graph's first inputs; `values` are what it reads.

    `site` is the user's line whose operation ran last: `file:line: expression`.
    """

    def __init__(self, graph: torch.fx.GraphModule, values: Sequence[Any], name: str) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.extra_traceback = False
        self.values, self.__name__ = values, name
        self.site: str | None = None

    def __call__(self, *arguments: Any) -> Any:
        try:
            found = self.run(*arguments, *self.values)
        finally:
            source.replayed = None
        return found[0] if isinstance(found, tuple | list) else found

    def run_node(self, node: torch.fx.Node) -> Any:
        frames = list(_FRAME.finditer(node.stack_trace or ""))
        if frames:
            last = frames[-1]
            self.site = f"{last['file']}:{last['line']}: {last['code']}"
        source.replayed = self.site
        return super().run_node(node)
