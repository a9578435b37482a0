"""`BlockMask`: a mask, its extent, and which blocks of it are empty, partial or full."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flexmod.blocks import algebra, assign, constructors, cut, given, lists, saved, views
from flexmod.blocks.classify import classify
from flexmod.blocks.elements import count_visible
from flexmod.blocks.freshness import STALE, Snapshot, is_fresh, snapshot, versions
from flexmod.blocks.grid import Grid
from flexmod.blocks.overlay import shared, transpose
from flexmod.blocks.runs import EMPTY, Runs
from flexmod.errors import BlockMaskError
from flexmod.program import Program
from flexmod.program.evaluate import evaluate, on_grid, raise_if_invalid
from flexmod.program.specialize import specialize
from flexmod.program.text import structure

_ELEMENTS_AT_ONCE = 1 << 22


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """Which blocks of a (B, H, Q_LEN, KV_LEN) mask need work. Made by `create_block_mask`.

    A block is empty (skipped), partial (the mask is evaluated) or full (the mask is not
    evaluated). The map knows its mask: `dense()` shows it token by token. Parts and combinations
    of maps (`mask[b, h, q_blocks]`, `crop`, `pad`, `concat`, `a & b`, `a | b`, `a - b`, `~a`)
    carry their own mask along, and are right to use at once.

    Attributes:
        shape: (B, H, Q_LEN, KV_LEN) as asked for; B and H may be 1 and broadcast.
        block_size: (query, key) tokens of a block.
        program: the traced mask.
        runs: the live blocks. Planes are kept only for the axes that the mask reads, and planes
            that are alike share their runs.
        offset: (query, key): where the first of each lies in the map that this one was cut from.
        is_placed: whether a device was named; else a call takes the map to its query's device.
    """

    shape: tuple[int, int, int, int]
    block_size: tuple[int, int]
    program: Program
    runs: Runs
    offset: tuple[int, int] = (0, 0)
    is_placed: bool = True
    text: str = field(init=False)  # the program's structure, for graphs
    versions: tuple[int, ...] = field(init=False)  # of captured tensors, for graphs
    _made_from: Snapshot = field(init=False)
    _regridded: dict[tuple[int, int], BlockMask] = field(init=False, default_factory=dict)
    _moved: dict[torch.device, BlockMask] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", structure(self.program))
        object.__setattr__(self, "_made_from", snapshot(self.program))
        object.__setattr__(self, "versions", versions(self._made_from))

    @staticmethod
    def from_program(
        program: Program,
        shape: tuple[int, int, int, int],
        block_size: tuple[int, int],
        device: torch.device,
    ) -> BlockMask:
        grid = Grid.of(program, shape, block_size)
        runs = shared(classify(program, grid, device), grid.planes)
        return BlockMask(shape, block_size, program, runs)

    from_kv_blocks = staticmethod(lists.from_kv_blocks)
    from_dense_blocks = staticmethod(given.from_dense_blocks)
    from_dense = staticmethod(given.from_dense)
    from_topk = staticmethod(given.from_topk)
    from_documents = staticmethod(constructors.from_documents)
    from_window = staticmethod(constructors.from_window)
    from_prefix_lengths = staticmethod(constructors.from_prefix_lengths)
    concat = staticmethod(algebra.concat)

    __getitem__ = cut.take
    crop = cut.crop
    pad = cut.pad
    shift = cut.shift
    __and__ = algebra.intersection
    __or__ = algebra.union
    __sub__ = algebra.difference
    __invert__ = algebra.complement
    __reduce__ = saved.reduce
    update_ = saved.update_
    to_string = views.to_string
    plot = views.plot
    _repr_html_ = views.to_html

    @property
    def grid(self) -> Grid:
        return Grid.of(self.program, self.shape, self.block_size)

    @cached_property
    def transposed(self) -> Runs:
        """Runs of query blocks for each block of keys: the order of a backward pass."""
        grid, kept = self.grid, self.runs.turned
        size = (grid.planes, grid.columns)
        if size not in kept:
            kept[size] = shared(transpose(self.runs, *size), grid.planes)
        return kept[size]

    @cached_property
    def layout(self) -> tuple[Any, ...]:
        """All but which blocks are live, and the tensors that the mask captures."""
        return self.program.identity, self.shape, self.block_size, self.device

    @property
    def device(self) -> torch.device:
        return self.runs.table.device

    @property
    def mask_mod(self) -> Program:
        return self.program

    @property
    def seq_lengths(self) -> tuple[int, int]:
        return self.shape[2:]

    BLOCK_SIZE = property(lambda self: self.block_size)
    ndim = 4  # len(shape), as of the mask that it stands for

    def tiles(self) -> Tensor:
        """Kinds of blocks, int8 [B, H, query blocks, key blocks]: 0 empty, 1 partial, 2 full."""
        grid = self.grid
        kinds = self.runs.tiles(grid.columns).view(grid.batch, grid.heads, grid.rows, grid.columns)
        return kinds.expand(*self.shape[:2], -1, -1)

    def to_dense(self) -> Tensor:
        """1 where a block needs work, int32 [B, H, query blocks, key blocks]: torch's view."""
        return (self.tiles() != EMPTY).int()

    def dense(self) -> Tensor:
        """The mask token by token, bool [B, H, Q_LEN, KV_LEN]."""
        if not self.numel():
            return torch.zeros(self.shape, dtype=torch.bool, device=self.device)
        return torch.cat([self.visible_rows(q) for q in self._row_chunks()], 2)

    def visible_rows(self, q_idx: Tensor) -> Tensor:
        """The mask of some query rows, bool [B, H, len(q_idx), KV_LEN]."""
        batch, heads, q_len, kv_len = self.shape
        extents = {"b": batch, "h": heads, "q_idx": q_len, "kv_idx": kv_len}
        program = specialize(self.program, extents)
        b, h, kv_idx = (torch.arange(n, device=self.device) for n in (batch, heads, kv_len))
        (visible,), invalid = evaluate(program, on_grid(b, h, q_idx, kv_idx))
        raise_if_invalid(program, invalid, None)
        return visible.expand(batch, heads, len(q_idx), kv_len)

    def _row_chunks(self) -> Iterator[Tensor]:
        batch, heads, q_len, kv_len = self.shape
        step = max(1, _ELEMENTS_AT_ONCE // max(batch * heads * kv_len, 1))
        yield from torch.arange(q_len, device=self.device).split(step)

    def counts(self) -> tuple[int, int, int]:
        """How many blocks are (empty, partial, full), over all of B and H."""
        grid = self.grid
        copies = self.shape[0] * self.shape[1] // max(grid.planes, 1)
        partial, full = self.runs.counts()
        total = grid.planes * grid.rows * grid.columns
        return (total - partial - full) * copies, partial * copies, full * copies

    def sparsity(self) -> float:
        """Percent of blocks that are empty, in [0, 100]."""
        counts = self.counts()
        return 100.0 * counts[0] / max(sum(counts), 1)

    def density(self) -> float:
        """Percent of elements that are visible, in [0, 100]. Only partial blocks are evaluated."""
        grid = self.grid
        program = specialize(self.program, grid.extents)
        seen = count_visible(program, grid, self.runs)
        return 100.0 * seen / max(grid.planes * grid.q_len * grid.kv_len, 1)

    def numel(self) -> int:
        batch, heads, q_len, kv_len = self.shape
        return batch * heads * q_len * kv_len

    def regrid(self, block_size: tuple[int, int]) -> BlockMask:
        """The same mask in blocks of another size; remembered."""
        if block_size == self.block_size:
            return self
        if block_size not in self._regridded:
            made = BlockMask.from_program(self.program, self.shape, block_size, self.device)
            self._regridded[block_size] = replace(made, offset=self.offset)
        return self._regridded[block_size]

    def to(self, device: torch.device | str) -> BlockMask:
        """The map and the tensors that its mask captures, on another device."""
        self.check_unchanged()
        captures = tuple(c.to(device) for c in self.program.captures)
        program = replace(self.program, captures=captures)
        return replace(self, program=program, runs=self.runs.to(device), is_placed=True)

    def near(self, device: torch.device) -> BlockMask:
        """Itself; if no device was named for it, the same map on this one, remembered."""
        if self.is_placed or device == self.device:
            return self
        if device not in self._moved:
            self._moved[device] = self.to(device)
        return self._moved[device]

    def check_unchanged(self) -> None:
        """Raise if a captured tensor was changed in place since the map was made."""
        if not is_fresh(self._made_from, self.program.captures):
            raise BlockMaskError(STALE.format(self.program.name))

    def __getattr__(self, name: str) -> Any:
        if name in lists.VIEWS:
            return lists.view(self.tiles(), name)
        raise AttributeError(f"BlockMask has no attribute {name!r}")

    def as_tuple(self, flatten: bool = True) -> tuple[Any, ...]:
        """(Q_LEN, KV_LEN, the eight index lists, Q_BLOCK, KV_BLOCK, mask_mod): torch's order.

        flatten=False keeps the two lengths, and the two block sizes, as pairs.
        """
        index_lists = [getattr(self, name) for name in lists.VIEWS]
        pairs = (self.seq_lengths, self.block_size)
        lengths, block = pairs if flatten else ((pairs[0],), (pairs[1],))
        return (*lengths, *index_lists, *block, self.mask_mod)

    def __str__(self) -> str:
        return views.describe(self)

    __repr__ = __str__


BlockMask.__setattr__ = assign.assign  # type: ignore[method-assign, assignment]
