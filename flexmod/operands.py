"""Arguments of `torch.ops.flexmod.attention`: tensors, and text for all else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmod.blocks import BlockMask
from flexmod.kernels.problem import Inputs
from flexmod.program import Program, text
from flexmod.program.transforms import as_tensor


class Call(NamedTuple):
    """Arguments of the operation."""

    query: Tensor
    key: Tensor
    value: Tensor
    sink: Tensor | None
    captures: list[Tensor]  # of the score program
    mask_captures: list[Tensor]
    runs: list[Tensor]  # spans and table of a map; none: the mask is decided when it runs
    versions: Sequence[int]  # of mask_captures, where the runs were made from them
    scale: Tensor | None  # where it is not in the spec
    seed: Tensor | None  # int64 [], of dropout
    spec: str  # JSON: programs and settings

    @property
    def inputs(self) -> Inputs:
        return Inputs(self.query, self.key, self.value)

    @property
    def form(self) -> str:
        """The overload: "host" if the mask is decided when it runs, or numbers are tensors."""
        decides = bool(self.mask_captures) or json.loads(self.spec)["mask"] is not None
        numbers = [x for x in (*self.captures, *self.mask_captures) if not text.is_held(x)]
        waits = (decides and not self.runs) or numbers or (self.scale, self.seed) != (None, None)
        return "host" if waits else "default"

    @property
    def backward_form(self) -> str:
        """As `form`; a backward reads a map by columns, which are counted on the host."""
        return "host" if self.runs else self.form

    @property
    def fixed(self) -> list[Tensor]:
        """What may have a gradient, beside captured tensors."""
        return [*self.inputs, *([] if self.sink is None else [self.sink])]


def written(
    inputs: Inputs,
    score: Program | None,
    mask: BlockMask | Program | None,
    scale: float,
    *,
    block_size: tuple[int, int],
    sink: Tensor | None,
    seed: Tensor | None,
    **settings: Any,
) -> Call:
    """A call. A mask that is a Program is decided when it runs, in blocks of `block_size`.

    `settings` are plain values: kernel_options, dropout_p, deterministic, wants_max_scores,
    backend.
    """
    runs: list[Tensor] = []
    versions: Sequence[int] = ()
    if isinstance(mask, BlockMask):
        runs = [mask.runs.spans, mask.runs.table]
        if not torch.compiler.is_exporting():  # an exported model has copies of its own
            versions = mask.versions
    masked = mask.program if isinstance(mask, BlockMask) else mask
    captures, mask_captures = (list(p.captures) if p else [] for p in (score, masked))
    is_dynamic = isinstance(scale, torch.SymFloat)
    spec = {
        "score": _text(score),
        "mask": _text(masked),
        "block_size": block_size,
        "scale": None if is_dynamic else scale,
        **settings,
    }
    dynamic = as_tensor(scale, torch.float64) if is_dynamic else None
    tensors = (*inputs, sink, captures, mask_captures, runs)
    return Call(*tensors, versions, dynamic, seed, json.dumps(spec))


def _text(program: Program | None) -> list[Any] | None:
    if program is None:
        return None
    sites = {position: str(site) for position, site in program.sites.items()}
    return [text.structure(program), program.name, program.numbers, sites]


class Spec(NamedTuple):
    """A spec, read. The programs have placeholders for captured tensors."""

    score: Program | None
    mask: Program | None
    settings: dict[str, Any]


@lru_cache(maxsize=512)
def read(spec: str, captures: int, mask_captures: int) -> Spec:
    settings = json.loads(spec)
    programs: list[Program | None] = []
    for saved, count in ((settings["score"], captures), (settings["mask"], mask_captures)):
        if saved is not None:
            structure, name, numbers, sites = saved
            places = {int(position): site for position, site in sites.items()}
            saved = text.restored(structure, name, numbers, [torch.empty(0)] * count, places)
        programs.append(saved)
    del settings["score"], settings["mask"]
    score, mask = programs
    return Spec(score, mask, settings)
