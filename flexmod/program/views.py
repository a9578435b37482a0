"""Captured tensors that are indexed axis by axis: `table[h][q_idx]`, `table[:, kv_idx]`, ..."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexmod.errors import TraceError
from flexmod.program.proxy import Proxy, Traced
from flexmod.program.record import Recorder

LARGEST_VECTOR = 256


class View(Traced):
    """A captured tensor of which some axes are indexed by traced values and some are free."""

    def __init__(self, recorder: Recorder, tensor: Tensor, picks: list[Proxy | None]) -> None:
        self.recorder, self.tensor, self.picks = recorder, tensor, picks

    @property
    def shape(self) -> torch.Size:
        free = [n for n, p in zip(self.tensor.shape, self.picks, strict=True) if p is None]
        return torch.Size(free)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        return index_tensor(self.recorder, self.tensor, self.picks, index)

    def __iter__(self) -> Any:
        return (self[n] for n in range(len(self)))

    def elements(self) -> list[Any]:
        if self.ndim != 1 or len(self) > LARGEST_VECTOR:
            raise TraceError(
                f"an axis of a captured tensor is left unindexed (shape {list(self.shape)} "
                "remains): index every axis, or reduce one trailing axis of at most "
                f"{LARGEST_VECTOR} entries"
            )
        return list(self)


def index_tensor(
    recorder: Recorder, tensor: Tensor, picks: Sequence[Proxy | None], index: Any
) -> Any:
    """tensor[index] where the free axes (pick None) meet the parts of a user's index in order.

    Slices, None and Ellipsis are applied by torch; scalars become picks. A fully picked tensor
    is a load.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    free = [axis for axis, pick in enumerate(picks) if pick is None]
    wanted = sum(1 for p in parts if p is not None and p is not Ellipsis)
    if wanted > len(free):
        raise TraceError(f"{wanted} indices for a captured tensor with {len(free)} axes left")
    if Ellipsis in [p for p in parts if not isinstance(p, Traced | Tensor)]:
        where = next(n for n, p in enumerate(parts) if p is Ellipsis)
        parts[where : where + 1] = [slice(None)] * (len(free) - wanted)
    else:
        parts += [slice(None)] * (len(free) - wanted)
    kept: list[Proxy | None] = []
    static: list[Any] = []
    queue = iter(parts)
    for axis, pick in enumerate(picks):
        part: Any = pick if pick is not None else next(queue)
        while part is None:  # a new axis
            static.append(None)
            kept.append(None)
            part = next(queue)
        traced = _as_index(recorder, part, axis, tensor.shape[axis])
        static.append(slice(None) if traced is not None else part)
        kept.append(traced)
    new_axes = [None for _ in queue]
    view = tensor
    if any(s != slice(None) for s in [*static, *new_axes]):
        view = tensor[tuple([*static, *new_axes])]
    kept += new_axes
    if any(pick is None for pick in kept):
        return View(recorder, view, kept)
    return recorder.load(view, [pick for pick in kept if pick is not None])


def _as_index(recorder: Recorder, part: Any, axis: int, length: int) -> Proxy | None:
    """A scalar index as a traced one; None for a slice, which torch applies itself.

    Ints become run-time numbers, so that a mod captures the user's tensor and not a slice of it.
    """
    if isinstance(part, Proxy):
        return part
    if isinstance(part, int | torch.SymInt) and not isinstance(part, bool):
        if not -length <= part < length:
            raise TraceError(f"index {part} is out of range for axis {axis} with {length} entries")
        return recorder.number(part % length, torch.int64)
    if isinstance(part, Tensor) and not part.ndim and part.dtype != torch.bool:
        return recorder.load(part, [])
    if isinstance(part, View | Tensor | list) or type(part).__name__ == "Vector":
        raise TraceError("a captured tensor is indexed with several values at once: use scalars")
    return None
