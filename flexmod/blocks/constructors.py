"""Maps whose runs are known in closed form: nothing is classified, nothing waits for the device.

In all of them a query sees one interval of keys, and both of its ends never fall from one query
to the next. So a row of blocks sees the keys from the first query's begin to the last query's end,
and sees as a whole what lies between the last query's begin and the first query's end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flexmod import masks
from flexmod.blocks.grid import Grid
from flexmod.blocks.runs import FULL, PARTIAL, Runs
from flexmod.errors import ArgumentError, BlockMaskError
from flexmod.masks.windows import reach
from flexmod.program import trace

if TYPE_CHECKING:
    from flexmod.blocks.block_mask import BlockMask

BlockSize = int | tuple[int, int]
_RUNS_A_ROW = 3  # partial, full, partial; some may be empty


class Interval(NamedTuple):
    """The half-open interval of keys that each query sees (or of queries that see a key)."""

    begin: Tensor
    end: Tensor


Visible = Callable[[Tensor], Interval]  # of positions, int64 [n]; results [n] or [planes, n]


def from_documents(
    ids: Tensor | Sequence[Any] | None = None,
    *,
    lengths: Tensor | Sequence[int] | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    causal: bool = False,
    total: int | None = None,
    device: torch.device | str | None = None,
    BLOCK_SIZE: BlockSize = 128,
) -> BlockMask:
    """Packed documents: a token sees its own document only; with causal=True, up to itself.

    Args:
        ids: integers [S] or [B, S], equal for tokens of one document, in any order; classified.
        lengths: integers [N], tokens of each document, packed one after the other.
        cu_seqlens: integers [N + 1], where each document begins, and the end of the last.
        total: tokens in all. Tokens after the last document form one more; documents are cut
            here. Default: the sum of the lengths, which is read from the device.

    Raises:
        BlockMaskError: not exactly one of ids, lengths and cu_seqlens; wrong shapes or dtypes.

    Example:
        >>> import flexmod
        >>> packed = flexmod.BlockMask.from_documents(lengths=[100, 156], causal=True)
        >>> packed.shape, packed.counts()
        ((1, 1, 256, 256), (1, 3, 0))
    """
    from flexmod.blocks.create import create_block_mask

    given = [n for n, x in (("ids", ids), ("lengths", lengths), ("cu_seqlens", cu_seqlens))
             if x is not None]  # fmt: skip
    if len(given) != 1:
        raise BlockMaskError(
            f"give one of ids, lengths and cu_seqlens, not {' and '.join(given) or 'none'}"
        )
    if ids is not None:
        table = _integers("ids", ids, (1, 2), device)
        batch = None if table.ndim == 1 else len(table)
        count = table.shape[-1]
        mask_mod = _documents(table, causal)
        return create_block_mask(mask_mod, batch, None, count, count, table.device, BLOCK_SIZE)
    starts = _integers(given[0], lengths if cu_seqlens is None else cu_seqlens, (1,), device)
    if cu_seqlens is None:
        starts = torch.cat([starts.new_zeros(1), starts.cumsum(0)])
    elif not len(starts):
        raise BlockMaskError("cu_seqlens must hold N + 1 entries, the first of them 0")
    if total is None:
        total = int(starts[-1])
    starts = starts.clamp(max=total)
    ends = torch.cat([starts[1:], starts.new_full((1,), total)])
    table = torch.searchsorted(ends, torch.arange(total, device=ends.device), right=True)

    def seen(at: Tensor) -> Interval:
        begin, end = starts[table[at]], ends[table[at]]
        return Interval(begin, at + 1 if causal else end)

    def seen_by(at: Tensor) -> Interval:
        begin, end = starts[table[at]], ends[table[at]]
        return Interval(at if causal else begin, end)

    shape = (1, 1, total, total)
    return _known(_documents(table, causal), shape, BLOCK_SIZE, ends.device, seen, seen_by)


def _documents(table: Tensor, causal: bool) -> Callable[..., Any]:
    inside = masks.document(table)
    return masks.and_masks(inside, masks.causal()) if causal else inside


def from_window(
    window: int,
    Q_LEN: int,
    KV_LEN: int | None = None,
    *,
    causal: bool = True,
    device: torch.device | str | None = None,
    BLOCK_SIZE: BlockSize = 128,
) -> BlockMask:
    """A sliding window: `masks.sliding_window(window, causal)` in closed form.

    Example:
        >>> import flexmod
        >>> flexmod.BlockMask.from_window(256, 1024).counts()
        (43, 14, 7)
    """
    mask_mod = masks.sliding_window(window, causal)
    left, right = reach(window, causal)
    q_len = _extent("Q_LEN", Q_LEN)
    kv_len = _extent("KV_LEN", Q_LEN if KV_LEN is None else KV_LEN)
    where = torch.empty(0, device=device).device

    def around(before: int, after: int, limit: int) -> Visible:
        return lambda at: Interval((at - before).clamp(0, limit), (at + after + 1).clamp(0, limit))

    seen, seen_by = around(left, right, kv_len), around(right, left, q_len)
    return _known(mask_mod, (1, 1, q_len, kv_len), BLOCK_SIZE, where, seen, seen_by)


def from_prefix_lengths(
    lengths: int | Tensor | Sequence[int],
    Q_LEN: int,
    KV_LEN: int | None = None,
    *,
    device: torch.device | str | None = None,
    BLOCK_SIZE: BlockSize = 128,
) -> BlockMask:
    """A prefix that all queries see, then causal: `masks.prefix_lm(lengths)` in closed form.

    lengths: an int, or integers [B], one for each sequence of the batch.

    Example:
        >>> import flexmod
        >>> flexmod.BlockMask.from_prefix_lengths([300, 0], 512).shape
        (2, 1, 512, 512)
    """
    q_len = _extent("Q_LEN", Q_LEN)
    kv_len = _extent("KV_LEN", Q_LEN if KV_LEN is None else KV_LEN)
    if isinstance(lengths, int) and not isinstance(lengths, bool):
        table = torch.full((1,), lengths, device=device)
        mask_mod, batch = masks.prefix_lm(lengths), 1
    else:
        table = _integers("lengths", lengths, (1,), device)
        mask_mod, batch = masks.prefix_lm(table), len(table)
    each = table[:, None]

    def seen(at: Tensor) -> Interval:
        end = torch.maximum(each, at + 1).clamp(max=kv_len)
        return Interval(torch.zeros_like(end), end)

    def seen_by(at: Tensor) -> Interval:
        begin = torch.where(at < each, 0, at).clamp(max=q_len)
        return Interval(begin, torch.full_like(begin, q_len))

    shape = (batch, 1, q_len, kv_len)
    return _known(mask_mod, shape, BLOCK_SIZE, table.device, seen, seen_by)


def _known(
    mask_mod: Callable[..., Any],
    shape: tuple[int, int, int, int],
    size: BlockSize,
    device: torch.device,
    seen: Visible,
    seen_by: Visible,
) -> BlockMask:
    """A map from what each query sees and by what each key is seen."""
    from flexmod.blocks.block_mask import BlockMask
    from flexmod.blocks.create import check_block_size

    block = check_block_size(size)
    program = trace(mask_mod, "mask", device=device)
    grid = Grid.of(program, shape, block)
    runs = _closed_form(seen, grid, device)
    turned = grid._replace(
        q_len=grid.kv_len, kv_len=grid.q_len, block_q=grid.block_kv, block_kv=grid.block_q
    )
    mask = BlockMask(shape, block, program, runs)
    mask.__dict__["transposed"] = _closed_form(seen_by, turned, device)
    return mask


def _closed_form(visible: Visible, grid: Grid, device: torch.device) -> Runs:
    """Three runs a row, of which some may be empty."""
    if not (grid.planes and grid.rows and grid.columns):
        return Runs.nothing(grid.planes * grid.rows, device)
    first = torch.arange(grid.rows, device=device) * grid.block_q
    last = (first + grid.block_q - 1).clamp(max=grid.q_len - 1)
    size = grid.block_kv
    head, tail = visible(first), visible(last)
    begin, end = head.begin // size, (tail.end + size - 1) // size
    end = torch.where(tail.end > head.begin, end, begin)
    whole = (tail.begin + size - 1) // size
    until = torch.where(last - first == grid.block_q - 1, head.end // size, 0)
    any_full = until > whole
    whole, until = torch.where(any_full, whole, end), torch.where(any_full, until, end)
    starts = torch.stack(torch.broadcast_tensors(begin, whole, until), -1)
    stops = torch.stack(torch.broadcast_tensors(whole, until, end), -1)
    middle = torch.arange(_RUNS_A_ROW, device=device) == 1  # not copied from the host
    kinds = torch.where(middle, FULL, PARTIAL).expand_as(starts)
    table = torch.stack([starts, stops, kinds], -1).view(-1, 3).int()
    rows = torch.arange(grid.planes * grid.rows, dtype=torch.int32, device=device)
    spans = torch.stack([rows, rows + 1], 1) * _RUNS_A_ROW
    return Runs(spans, table.contiguous())


def _integers(
    name: str, value: Any, dims: tuple[int, ...], device: torch.device | str | None
) -> Tensor:
    try:
        keep = isinstance(value, Tensor) and device is None
        table = value if keep else torch.as_tensor(value, device=device)
    except (TypeError, ValueError) as error:
        raise BlockMaskError(f"{name} must be integers: {error}") from None
    if table.is_floating_point() or table.dtype == torch.bool:
        if table.numel():
            raise BlockMaskError(f"{name} must be integers, not {table.dtype}")
        table = table.long()
    if table.ndim not in dims:
        shapes = " or ".join(("[N]", "[B, N]")[d - 1] for d in dims)
        raise BlockMaskError(f"{name} must have shape {shapes}, not {list(table.shape)}")
    return table.long()


def _extent(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ArgumentError(f"{name} must be an int >= 0, not {value!r}")
    return value
