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

from flexmod.blocks import BlockMask, create_block_mask, foreign
from flexmod.blocks.pending import PendingBlockMask
from flexmod.blocks.runs import Runs
from flexmod.errors import FlexmodError, TraceError
from flexmod.kernels.problem import Result
from flexmod.program import text
from flexmod.program.replay import Replay
from flexmod.program.transforms import is_recorded


class Carrier(HigherOrderOperator):
    """The node of a call in Dynamo's graph. It never reaches a compiler: it runs `run`."""

    def __init__(self, run: Callable[..., Result]) -> None:
        super().__init__("flexmod_attention")
        # Dynamo knows by this name how to record functions of five and of four scalars, and how
        # our arguments are to be read: `score_mod` is the fourth, `mask_mod` the last of `mask`.
        self.__name__ = "flex_attention"
        self.__module__ = __name__  # and the name in generated code is this object's all the same
        self.run = run
        self._hidden: Callable[..., Result] | None = None

    def __call__(self, *arguments: Any) -> Result:
        if self._hidden is None:
            self._hidden = torch.compiler.disable(self._call)
        return self._hidden(*arguments)

    def _call(
        self,
        sample: Tensor,  # lends the mods' score its dtype and device
        query: Tensor,
        key: Tensor,
        score_mod: Callable[..., Any],
        mask: tuple[Any, ...],
        scale: float | None,
        settings: dict[str, Any],
        score_values: Sequence[Any] = (),
        mask_values: Sequence[Any] = (),
    ) -> Result:
        value, sink, seed, dropout_p, *parts, mask_mod = mask
        score_mod = _replay(score_mod, score_values, "score_mod")
        mask_mod = _replay(mask_mod, mask_values, "mask_mod")
        try:
            return self.run(
                query,
                key,
                value,
                score_mod if settings["has_score"] else None,
                _restored(settings["mask"], parts, mask_mod),
                scale,
                sink=sink,
                # Torch compiles anew for another probability; another seed is an argument.
                dropout_p=float(dropout_p) if _is_symbolic(dropout_p) else dropout_p,
                dropout_seed=seed,
                **settings["others"],
            )
        except FlexmodError as error:
            if not is_recorded(query):
                raise
            # At a TypeError about an argument Dynamo leaves the graph, and the call itself raises.
            raise TraceError(f"flex_attention refuses an argument: {error}") from error


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
        return {"kind": "pending"}, (wanted.extents, wanted.block_size), wanted.mask_mod
    if foreign.is_torch_map(block_mask):
        extents, block_size = foreign.extents(block_mask), block_mask.BLOCK_SIZE
        return {"kind": "pending"}, (extents, block_size), foreign.listed(block_mask)
    if isinstance(block_mask, BlockMask):
        program, runs = block_mask.program, block_mask.runs
        described = {
            "kind": "map",
            "text": block_mask.text,
            "name": program.name,
            "is_placed": block_mask.is_placed,
        }
        tensors = (runs.spans, runs.table, program.captures)
        place = (program.numbers, block_mask.versions, block_mask.shape, block_mask.block_size)
        return described, (*tensors, *place), _anything
    return {"kind": "mod"}, (), block_mask


def _restored(described: dict[str, Any], parts: list[Any], mask_mod: Callable[..., Any]) -> Any:
    match described["kind"]:
        case "none":
            return None
        case "mod":
            return mask_mod
        case "pending":
            return PendingBlockMask(create_block_mask, mask_mod, *parts)
    spans, table, captures, numbers, versions, shape, block_size = parts
    program = text.restored(described["text"], described["name"], numbers, captures)
    mask = BlockMask(
        tuple(shape), tuple(block_size), program, Runs(spans, table),
        is_placed=described["is_placed"],
    )  # fmt: skip
    for name in ("versions", "_made_from"):  # those of the map itself, not of a graph's tensors
        object.__setattr__(mask, name, tuple(versions))
    return mask


def _same(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score


def _anything(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx == q_idx


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, torch.SymFloat | torch.SymInt)


def _replay(mod: Callable[..., Any], values: Sequence[Any], name: str) -> Callable[..., Any]:
    """What Dynamo has made of a mod; where it has given up, the mod is the user's own function."""
    return Replay(mod, values, name) if isinstance(mod, torch.fx.GraphModule) else mod
