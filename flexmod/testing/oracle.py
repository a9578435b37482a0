"""Attention by its definition, in float64: slow, small, and written without any of flexmod.

The mods are run as the user wrote them, under nested `torch.vmap`, so that an agreement between an
engine and this module says something about the tracer and the kernels both.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Which of (b, h, q_idx, kv_idx) is mapped at each level, outermost first.
_INDEX_AXES = tuple(tuple(0 if at == level else None for at in range(4)) for level in range(4))


def naive(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    scale: float | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Masked softmax attention over whole score matrices, worked out in float64.

    Args:
        query: (B, Hq, Q, E), any float dtype.
        key: (B or 1, Hkv, KV, E), Hq a multiple of Hkv.
        value: (B or 1, Hkv, KV, Ev).
        score_mod: `(score, b, h, q_idx, kv_idx) -> score`; it sees the scaled score in float64.
        mask_mod: `(b, h, q_idx, kv_idx) -> bool`, True where the key is visible.
        scale: factor of query @ key; 1 / sqrt(E) when None.
        rows: (R,) integers, the query rows to work out; all of them when None.

    Returns:
        `(out, lse, max_scores)` in float64: (B, Hq, R, Ev), (B, Hq, R), (B, Hq, R). A row that sees
        nothing has out 0, lse -inf, max -inf. What lies under a masked position (NaN and inf of
        score, key or value included) never counts.

    Gradients flow to query, key, value and to tensors that score_mod captures; those of captured
    tensors are finite only where the derivative of score_mod is finite on masked positions too.
    Captured tensors keep their dtype; Python floats and int / int are taken as float64.

    Memory is O(B Hq R KV), and R * KV * E on top where an input holds NaN or inf.

    Raises:
        whatever the mods raise: IndexError for a captured tensor read out of range, for instance.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
        >>> out, lse, top = naive(q, k, v, mask_mod=lambda b, h, i, j: i >= j)
        >>> out.shape, out.dtype
        (torch.Size([1, 2, 5, 8]), torch.float64)
    """
    return _attend(query, key, value, score_mod, mask_mod, scale, rows, torch.float64)


def naive_same_dtype(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    scale: float | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `naive`, every step rounded to query's dtype: the yardstick for half-precision errors.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 5, 8, dtype=torch.bfloat16) for _ in range(3))
        >>> naive_same_dtype(q, k, v)[0].dtype
        torch.bfloat16
    """
    return _attend(query, key, value, score_mod, mask_mod, scale, rows, query.dtype)


def visible(
    mask_mod: Callable[..., Any] | None,
    B: int,
    H: int,
    Q: int,
    KV: int,
    device: torch.device | str = "cpu",
    rows: Tensor | None = None,
) -> Tensor:
    """`mask_mod` on every position: bool (B, H, Q, KV), or (B, H, R, KV) with `rows` (R,).

    Example:
        >>> visible(lambda b, h, i, j: i >= j, 1, 1, 2, 2)[0, 0].tolist()
        [[True, False], [True, True]]
    """
    indices = _indices(B, H, Q, KV, device, rows)
    shape = tuple(len(axis) for axis in indices)
    if mask_mod is None or 0 in shape:
        return torch.ones(shape, dtype=torch.bool, device=device)

    def kept(*at: Tensor) -> Tensor:
        return torch.as_tensor(mask_mod(*at), device=device).to(torch.bool)

    return _over_positions(kept, (), indices)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    scale: float | None,
    rows: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, q_len, head_dim = query.shape
    kv_len = key.shape[2]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    mask = visible(mask_mod, batch, heads, q_len, kv_len, query.device, rows)
    q = query.to(dtype) if rows is None else query.to(dtype)[:, :, rows.to(query.device)]
    k, v = (_per_query_head(x.to(dtype), batch, heads) for x in (key, value))

    score = _visible_scores(q, k, mask) * scale
    if score_mod is not None and score.numel():
        indices = _indices(batch, heads, q_len, kv_len, query.device, rows)
        score = _modified(score_mod, score, indices)
    score = score.masked_fill(~mask, -math.inf)

    top = score.detach().amax(-1) if kv_len else score.new_full(score.shape[:-1], -math.inf)
    empty = top == -math.inf
    shift = top.masked_fill(empty, 0.0)
    weight = torch.exp(score - shift[..., None])
    # The 1 keeps log and the division, and their derivatives, finite on empty rows.
    total = weight.sum(-1).masked_fill(empty, 1.0)
    lse = (shift + total.log()).masked_fill(empty, -math.inf)
    out = _visible_sum(weight / total[..., None], v, mask)
    return out, lse, top


def _per_query_head(x: Tensor, batch: int, heads: int) -> Tensor:
    # (B or 1, Hkv, KV, E) -> (B, Hq, KV, E): query head h reads key/value head h // (Hq / Hkv).
    x = x.repeat_interleave(heads // x.shape[1], dim=1) if x.shape[1] != heads else x
    return x.expand(batch, -1, -1, -1)


def _visible_scores(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    if bool(torch.isfinite(k).all()) and bool(torch.isfinite(q).all()):
        return q @ k.transpose(-1, -2)
    # Operands are cleared before the product: 0 * NaN would bring the NaN back, backward too.
    at = mask[..., None]
    return (q[:, :, :, None].where(at, 0) * k[:, :, None].where(at, 0)).sum(-1)


def _visible_sum(weight: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    if bool(torch.isfinite(v).all()):
        return weight @ v
    return (weight[..., None] * v[:, :, None].where(mask[..., None], 0)).sum(-2)


def _modified(score_mod: Callable[..., Any], score: Tensor, indices: tuple[Tensor, ...]) -> Tensor:
    def modified(one: Tensor, *at: Tensor) -> Tensor:
        return torch.as_tensor(score_mod(one, *at), device=score.device).to(score.dtype)

    return _over_positions(modified, (score,), indices)


def _indices(
    B: int, H: int, Q: int, KV: int, device: torch.device | str, rows: Tensor | None
) -> tuple[Tensor, ...]:
    axes = [torch.arange(size, device=device) for size in (B, H, Q, KV)]
    if rows is not None:
        axes[2] = rows.to(device=device, dtype=torch.int64)
    return tuple(axes)


def _over_positions(
    fn: Callable[..., Tensor], scores: tuple[Tensor, ...], indices: tuple[Tensor, ...]
) -> Tensor:
    for axes in reversed(_INDEX_AXES):
        fn = torch.vmap(fn, in_dims=(*(0 for _ in scores), *axes))
    with _ScalarIndexing(), _float64_literals():
        return fn(*scores, *indices)


@contextlib.contextmanager
def _float64_literals() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _ScalarIndexing(TorchFunctionMode):
    """`table[i]`, i a 0-dim tensor, as a gather: torch wants a Python int, which vmap refuses."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            where = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(_is_scalar_index(part) for part in where):
                return _gather(args[0], where)
        return func(*args, **(kwargs or {}))


def _is_scalar_index(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dim() == 0 and part.dtype != torch.bool


def _gather(table: Tensor, where: tuple[Any, ...]) -> Tensor:
    axis = 0
    chosen: list[Tensor | None] = []
    spread = table.dim() - sum(part is not None and part is not Ellipsis for part in where)
    for part in where:
        if isinstance(part, int):
            table = table.select(axis, part)
            continue
        if part is Ellipsis:
            chosen += [None] * spread
            axis += spread
            continue
        if part is None:
            table = table.unsqueeze(axis)
        elif isinstance(part, slice):
            table = table[(slice(None),) * axis + (part,)]
        chosen.append(part.to(torch.int64) if isinstance(part, Tensor) else None)
        axis += 1
    return torch.ops.aten.index.Tensor(table, chosen)
