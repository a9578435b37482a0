"""torch's own `BlockMask`, as one of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from flexmod.blocks.block_mask import BlockMask
from flexmod.blocks.given import from_dense_blocks, listed_blocks
from flexmod.blocks.memory import is_lasting
from flexmod.blocks.runs import EMPTY, FULL, PARTIAL
from flexmod.errors import BlockMaskError
from flexmod.program import Program, trace

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

_MODULE = "torch.nn.attention.flex_attention"
_SLICED = "_sliced_mask_mod_error"  # what torch puts in the place of a slice's mask


class _Converted(NamedTuple):
    """A map of ours, and all that it was made from."""

    plain: tuple[Any, ...]
    tensors: tuple[Tensor | None, ...]
    versions: tuple[int | None, ...]
    mask: BlockMask


_converted: WeakKeyDictionary[Any, _Converted] = WeakKeyDictionary()


def is_torch_map(value: Any) -> bool:
    """Whether a value is torch's BlockMask; torch's module is not imported to find out."""
    return type(value).__name__ == "BlockMask" and type(value).__module__ == _MODULE


def from_torch(given: TorchBlockMask) -> BlockMask:
    """The same mask as a map of ours.

    Visible is what torch's kernels show: full blocks that are listed, and `mask_mod` inside of the
    listed partial ones. Where the lists say no more than the mask does, as those that
    torch's `create_block_mask` makes, the mask alone is kept. The map is remembered until a list
    or the mask changes.

    Raises:
        BlockMaskError: a slice, whose mask torch has dropped; lists that do not fit.
    """
    program = trace(mask_of(given), "mask", device=given.kv_indices.device)
    tensors = (
        given.kv_num_blocks, given.kv_indices, given.full_kv_num_blocks, given.full_kv_indices,
        *program.captures,
    )  # fmt: skip
    if any(x is not None and x.is_inference() for x in tensors):  # no counter tells of changes
        return _made(given, program)
    numbers = tuple(map(repr, program.numbers))  # 0.0 equals -0.0
    plain = (program.key, numbers, tuple(given.seq_lengths), tuple(given.BLOCK_SIZE))
    versions = tuple(x if x is None else x._version for x in tensors)
    found = _converted.get(given)
    if (
        found is None
        or (found.plain, found.versions) != (plain, versions)
        or any(a is not b for a, b in zip(found.tensors, tensors, strict=True))
    ):
        with torch.inference_mode(False):
            found = _Converted(plain, tensors, versions, _made(given, program))
        if is_lasting(found.mask):
            _converted[given] = found
    return found.mask


def extents(given: TorchBlockMask) -> tuple[int, int, int, int]:
    """(B, H, Q_LEN, KV_LEN) of torch's map."""
    *planes, _, _ = given.kv_indices.shape
    batch, heads = [1, 1, *planes][-2:]
    return batch, heads, given.seq_lengths[0], given.seq_lengths[1]


def mask_of(given: TorchBlockMask) -> Callable[..., Any]:
    """Its mask_mod; an error for a slice."""
    if getattr(given.mask_mod, "__name__", "") == _SLICED:
        raise BlockMaskError(
            "block_mask is a slice of torch's BlockMask, and torch drops the mask of a slice: set "
            "its mask_mod, or slice a map of flexmod.create_block_mask, which keeps it"
        )
    return given.mask_mod


def listed(given: TorchBlockMask) -> Callable[..., Any]:
    """Its lists and its mask as one mask_mod: for graphs, where no list can be looked at."""
    block = (given.BLOCK_SIZE[0], given.BLOCK_SIZE[1])
    return listed_blocks(_kinds(given), block, mask_of(given))


def _made(given: TorchBlockMask, program: Program) -> BlockMask:
    shape, block = extents(given), (given.BLOCK_SIZE[0], given.BLOCK_SIZE[1])
    _check_range(given)
    kinds = _kinds(given)
    by_lists = from_dense_blocks(kinds, mask_of(given), shape[2:], block)
    by_mask = BlockMask.from_program(program, shape, block, kinds.device)
    ours = by_mask.tiles()
    says_more = ((kinds == EMPTY) & (ours != EMPTY)) | ((kinds == FULL) & (ours != FULL))
    return by_lists if bool(says_more.any()) else by_mask


def _kinds(given: TorchBlockMask) -> Tensor:
    """Kinds of blocks, int8 [B, H, query blocks, key blocks]."""
    kinds = _scattered(given, given.kv_num_blocks, given.kv_indices, PARTIAL)
    if given.full_kv_num_blocks is not None and given.full_kv_indices is not None:
        full = _scattered(given, given.full_kv_num_blocks, given.full_kv_indices, FULL)
        kinds = torch.maximum(kinds, full)
    return kinds[(None,) * (4 - kinds.ndim)]


def _scattered(given: TorchBlockMask, counts: Tensor, indices: Tensor, kind: int) -> Tensor:
    columns = _columns(given)
    place = torch.where(_counts(counts, indices), indices, columns).long()
    kinds = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.int8, device=indices.device)
    return kinds.scatter(-1, place, kind)[..., :columns]


def _columns(given: TorchBlockMask) -> int:
    return (given.seq_lengths[1] + given.BLOCK_SIZE[1] - 1) // given.BLOCK_SIZE[1]


def _counts(counts: Tensor, indices: Tensor) -> Tensor:
    """Which entries of a list count."""
    return torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]


def _check_range(given: TorchBlockMask) -> None:
    columns = _columns(given)
    for name in ("kv", "full_kv"):
        counts = getattr(given, f"{name}_num_blocks")
        indices = getattr(given, f"{name}_indices")
        if indices is None:
            continue
        outside = _counts(counts, indices) & ((indices < 0) | (indices >= columns))
        if bool(outside.any()):
            raise BlockMaskError(f"block_mask: {name}_indices must lie in [0, {columns})")
