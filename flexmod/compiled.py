"""Under torch.compile: a call carried through Dynamo with its mods as graphs.

Dynamo records a mod as a graph of scalars, with everything that it reads as an input or under a
guard, so a changed tensor or number is never missed. Our own tracer then runs on that graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator

from flexmod.blocks import BlockMask
from flexmod.blocks.pending import PendingBlockMask
from flexmod.blocks.runs import Runs
from flexmod.errors import TraceError
from flexmod.kernels.problem import Result
from flexmod.program import text


class Carrier(HigherOrderOperator):
    """The node of a call in Dynamo's graph. It never reaches a compiler: it runs `run`."""

    def __init__(self, run: Callable[..., Result]) -> None:
        super().__init__("flexmod_attention")
        # Dynamo knows by this name how to record functions of five and of four scalars, and how
        # our arguments are to be read: `score_mod` is the fourth, `mask_mod` the last of `mask`.
        self.__name__ = "flex_attention"
        self.__module__ = __name__  # and the name in generated code is this object's all the same
        self.run = run

    def __call__(  # type: ignore[override]
        self,
        sample: Tensor,  # lends the mods' score its dtype and device
        query: Tensor,
        key: Tensor,
        score_mod: torch.fx.GraphModule,
        mask: tuple[Any, ...],
        scale: float | None,
        settings: dict[str, Any],
        score_values: Sequence[Any] = (),
        mask_values: Sequence[Any] = (),
    ) -> Result:
        value, sink, seed, dropout_p, *parts, mask_mod = mask
        return self.run(
            query,
            key,
            value,
            _Recorded(score_mod, score_values) if settings["has_score"] else None,
            _restored(settings["mask"], parts, _Recorded(mask_mod, mask_values)),
            scale,
            sink=sink,
            dropout_p=dropout_p,
            dropout_seed=seed,
            **settings["others"],
        )


def attend(
    carrier: Carrier,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None,
    block_mask: Any,
    scale: float | None,
    *,
    sink: Tensor | None,
    dropout_p: float,
    dropout_seed: int | None,
    **others: Any,
) -> Result:
    """What Dynamo traces: plain values and tensors for the carrier."""
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    sample = torch.empty((), dtype=work, device=query.device)
    described, parts, mask_mod = _described(block_mask)
    settings = {"has_score": score_mod is not None, "mask": described, "others": others}
    mask = (value, sink, dropout_seed, dropout_p, *parts, mask_mod)
    return Result(
        *carrier(
            sample, query, key, _same if score_mod is None else score_mod, mask, scale, settings
        )
    )


def _described(block_mask: Any) -> tuple[dict[str, Any], tuple[Any, ...], Callable[..., Any]]:
    """A mask as plain values, tensors, and the function to record."""
    if block_mask is None:
        return {"kind": "none"}, (), _anything
    if isinstance(block_mask, PendingBlockMask):
        wanted = block_mask.wanted
        return {"kind": "pending"}, (wanted.shape, wanted.block_size), wanted.mask_mod
    if isinstance(block_mask, BlockMask):
        program, runs = block_mask.program, block_mask.runs
        described = {"kind": "map", "text": block_mask.text, "name": program.name}
        tensors = (runs.spans, runs.table, program.captures)
        place = (program.numbers, block_mask.shape, block_mask.block_size)
        return described, (*tensors, *place), _anything
    return {"kind": "mod"}, (), block_mask


def _restored(described: dict[str, Any], parts: list[Any], mask_mod: _Recorded) -> Any:
    match described["kind"]:
        case "none":
            return None
        case "mod":
            return mask_mod
        case "pending":
            shape, block_size = parts
            return PendingBlockMask(mask_mod, shape, block_size)
    spans, table, captures, numbers, shape, block_size = parts
    program = text.restored(described["text"], described["name"], numbers, captures)
    return BlockMask(tuple(shape), tuple(block_size), program, Runs(spans, table))


def _same(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score


def _anything(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx == q_idx


class _Recorded:
    """A mod as Dynamo has recorded it: a graph whose last inputs are what it reads."""

    def __init__(self, graph: torch.fx.GraphModule, values: Sequence[Any]) -> None:
        self.graph, self.values = graph, values

    def __call__(self, *arguments: Any) -> Any:
        interpreter = torch.fx.Interpreter(self.graph, garbage_collect_values=False)
        interpreter.extra_traceback = False
        found = interpreter.run(*arguments, *self.values)
        return found[0] if isinstance(found, tuple | list) else found
