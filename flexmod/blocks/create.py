"""`create_block_mask` and `create_mask`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flexmod.blocks.block_mask import BlockMask
from flexmod.blocks.pending import PendingBlockMask
from flexmod.blocks.runs import PARTIAL, Runs
from flexmod.errors import ArgumentError, BlockMaskError, DeviceError, UnsupportedError
from flexmod.program import Program, trace
from flexmod.program.evaluate import evaluate, on_grid, raise_if_invalid
from flexmod.program.specialize import specialize

BlockSize = int | tuple[int, int]


def create_block_mask(
    mask_mod: Callable[..., Any] | Program,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: BlockSize = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """Decide which blocks of a mask are empty, partial or full.

    The mask is traced once and decided on intervals, large squares first: it is never evaluated
    on all Q_LEN x KV_LEN elements, so a million tokens take milliseconds.

    Args:
        mask_mod: `(b, h, q_idx, kv_idx) -> bool`.
        B, H: batch and query heads. None means 1, or, if the mask reads that index, the length of
            the captured tensors' axes that it indexes: `ids[b, q_idx]` with ids [B, S] gives B.
        Q_LEN, KV_LEN: tokens, any number >= 0.
        device: where the map lives; default: that of the mask's captured tensors, else that of the
            query that it is used with (until then torch's default device).
        BLOCK_SIZE: tokens of a block, one number or (query, key).
        separate_full_blocks: False evaluates the mask in full blocks too.
        _compile, compute_dq_write_order, dq_kv_order: torch's, for its kernels; without effect.

    Raises:
        TraceError: the mask cannot be traced. BlockMaskError: B or H is None, but the mask reads
            the index other than as an axis of one length.

    Example:
        >>> import flexmod
        >>> causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
        >>> flexmod.create_block_mask(causal, None, None, 1024, 1024).counts()
        (28, 8, 28)
    """
    block_size = check_block_size(BLOCK_SIZE)
    if torch.compiler.is_compiling():
        extents = (B, H, Q_LEN, KV_LEN)
        create = create_block_mask
        return PendingBlockMask(create, mask_mod, extents, block_size, device, separate_full_blocks)
    program = trace(mask_mod, "mask", device=device or torch.get_default_device())
    shape = _shape(program, B, H, Q_LEN, KV_LEN)
    where = _device(program, device)
    if where.type == "meta":
        raise UnsupportedError(
            'a map cannot be decided on the meta device: name one, as in device="cpu"'
        )
    mask = BlockMask.from_program(program, shape, block_size, where)
    if device is None and not program.captures:
        mask = replace(mask, is_placed=False)
    if separate_full_blocks:
        return mask
    table = mask.runs.table.clone()
    table[:, 2] = PARTIAL
    return replace(mask, runs=Runs(mask.runs.spans, table))


def create_mask(
    mod_fn: Callable[..., Any] | Program,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
) -> Tensor:
    """A mask_mod on every element: bool [B, H, Q_LEN, KV_LEN]. A score_mod: of a score of 0."""
    program = trace(mod_fn, device=device or torch.get_default_device())
    shape = _shape(program, B, H, Q_LEN, KV_LEN)
    where = _device(program, device)
    inputs = on_grid(*(torch.arange(n, device=where) for n in shape))
    inputs["score"] = torch.zeros((), device=where)
    extents = dict(zip(("b", "h", "q_idx", "kv_idx"), shape, strict=True))
    narrow = specialize(program, extents)
    (value,), invalid = evaluate(narrow, inputs)
    raise_if_invalid(narrow, invalid, None)
    return value.expand(shape).clone()


def check_block_size(size: BlockSize) -> tuple[int, int]:
    pair = tuple(size) if isinstance(size, tuple | list) else (size, size)
    if len(pair) != 2 or any(type(n) is not int or n < 1 for n in pair):
        raise ArgumentError(f"BLOCK_SIZE must be a positive int or a pair of them, not {size!r}")
    return pair


def _shape(
    program: Program, batch: int | None, heads: int | None, q_len: int, kv_len: int
) -> tuple[int, int, int, int]:
    planes = (
        _inferred(program, index) if given is None else _extent(index.upper(), given)
        for index, given in (("b", batch), ("h", heads))
    )
    return (*planes, _extent("Q_LEN", q_len), _extent("KV_LEN", kv_len))  # type: ignore[return-value]


def _inferred(program: Program, index: str) -> int:
    """How many values an index takes, from the captured tensors that it reads an axis of."""
    if index not in program.reads:
        return 1
    lines, name = program.instructions, index.upper()
    lengths = {
        program.captures[line.attr.slot].shape[axis]
        for line in lines
        if line.op == "load"
        for axis, position in enumerate(line.args)
        if (lines[position].op, lines[position].attr) == ("input", index)
    }
    if len(lengths) == 1:
        return lengths.pop()
    found = f", and indexes axes of {sorted(lengths)}" if lengths else ""
    raise BlockMaskError(f"{program.name} reads {index} but {name} is None{found}: give {name}")


def _extent(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ArgumentError(f"{name} must be an int >= 0, not {value!r}")
    return value


def _device(program: Program, device: torch.device | str | None) -> torch.device:
    found = {c.device for c in program.captures}
    if device is not None:
        wanted = torch.empty(0, device=device).device  # "cuda" -> "cuda:0"
        if found - {wanted}:
            raise DeviceError(
                f"{program.name} captures tensors on {sorted(map(str, found))} but device is "
                f"{wanted}: move them there"
            )
        return wanted
    if len(found) > 1:
        raise DeviceError(f"{program.name} captures tensors on {sorted(map(str, found))}")
    return found.pop() if found else torch.empty(0).device
