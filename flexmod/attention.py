"""`flex_attention`: check the arguments, choose an engine, run it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmod import checks, compiled, library
from flexmod.autograd import attend
from flexmod.blocks import BlockMask, foreign
from flexmod.blocks.memory import map_of
from flexmod.blocks.pending import PendingBlockMask
from flexmod.kernels.problem import Inputs, Problem, Result
from flexmod.program import Program, trace
from flexmod.program.specialize import specialize

Mod = Callable[..., Any] | Program
_MAP_BLOCK = 128


class AuxRequest(NamedTuple):
    """What to return beside the output: True for each thing wanted."""

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """What was asked for: [B, Hq, Q] each, float32 (float64 for float64 inputs); else None.

    lse: natural logarithm of the sum of exponentials of the visible scores; -inf for none.
    max_scores: the largest visible score.
    """

    lse: Tensor | None = None
    max_scores: Tensor | None = None


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    block_mask: BlockMask | Mod | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> Any:
    """Attention with a score_mod and a mask, both a few lines of Python.

    Args:
        query: [B, Hq, Q, E], float64, float32, bfloat16 or float16, any strides, any lengths >= 0.
        key, value: [B or 1, Hkv, KV, E] and [B or 1, Hkv, KV, Ev], of the query's dtype.
        score_mod: `(score, b, h, q_idx, kv_idx) -> score`. It sees the scaled score, float32
            (float64 for float64 inputs), and h is the query head.
        block_mask: a BlockMask, torch's too, or a function `(b, h, q_idx, kv_idx) -> bool`.
        scale: of the scores; default 1 / sqrt(E).
        enable_gqa: allow fewer key/value heads: Hq must be a multiple of Hkv.
        return_lse: return (out, lse). return_aux: return (out, AuxOutput).
        kernel_options: hints (BLOCK_M, BLOCK_N, num_warps, num_stages, ...); they never change a
            result.
        sink: [Hq]; one more score a head, in the denominator of every row, with no value. lse
            includes it. It may need a gradient.
        dropout_p: probability in [0, 1) that a softmax weight is dropped; the others are scaled
            by 1 / (1 - p). Which ones is a function of (dropout_seed, b, h, q_idx, kv_idx) alone.
        dropout_seed: an int; default: drawn from torch's generator.
        deterministic: True: all gradients are bitwise equal from run to run; default:
            `torch.are_deterministic_algorithms_enabled()`.
        backend: "fa2", "cpu" or "reference"; default: the best that can serve the call.

    Returns:
        out [B, Hq, Q, Ev] in the query's dtype and stride order. A row that sees no key is 0,
        with lse -inf.

    Raises:
        ArgumentError, BlockMaskError, UnsupportedError, DeviceError: the text names the argument.
        TraceError: a mod cannot be traced. IndexRangeError: a mod reads past a captured tensor.
        BackendError: the backend asked for cannot serve the call.

    Example:
        >>> import torch, flexmod
        >>> q = k = v = torch.ones(1, 2, 4, 8)
        >>> soft_alibi = lambda score, b, h, q_idx, kv_idx: score - 0.5 * (q_idx - kv_idx).abs()
        >>> out = flexmod.flex_attention(q, k, v, soft_alibi, flexmod.masks.causal())
        >>> out.shape
        torch.Size([1, 2, 4, 8])
    """
    checks.returns(return_lse, return_aux)
    arguments: tuple[Any, ...] = (query, key, value, score_mod, block_mask, scale)
    others: dict[str, Any] = {
        "enable_gqa": enable_gqa,
        "kernel_options": kernel_options,
        "sink": sink,
        "dropout_p": dropout_p,
        "dropout_seed": dropout_seed,
        "deterministic": deterministic,
        "backend": backend,
    }
    if torch.compiler.is_dynamo_compiling():
        result = compiled.attend(_carrier, *arguments, **others)
    else:
        result = _attend(*arguments, **others)
    return _returned(result, return_lse, return_aux)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None,
    block_mask: BlockMask | Mod | None,
    scale: float | None,
    *,
    enable_gqa: bool,
    kernel_options: Mapping[str, Any] | None,
    sink: Tensor | None,
    dropout_p: float,
    dropout_seed: int | None,
    deterministic: bool | None,
    backend: str | None,
) -> Result:
    """Check the arguments, trace the mods, and run the call: itself, or as one operation."""
    query, key, value = checks.autocast(query, key, value)
    checks.tensors(query, key, value, enable_gqa)
    inputs = Inputs(query, key, value)
    checks.sink(sink, query)
    score = None
    if score_mod is not None:
        work = torch.float64 if query.dtype == torch.float64 else torch.float32
        score = trace(score_mod, "score", score_dtype=work, device=query.device)
        checks.captures(score, query.device)
    settings: dict[str, Any] = {
        "kernel_options": kernel_options,
        "dropout_p": checks.dropout(dropout_p),
        "deterministic": _deterministic(deterministic),
        "sink": sink,
    }
    if library.watches((*inputs, *(score.captures if score else ()))):
        drawn = _seed_tensor(dropout_p, dropout_seed)
        return _as_operation(inputs, score, block_mask, scale, drawn, backend, **settings)
    seed = _seed(dropout_p, dropout_seed)
    problem = make_problem(inputs, score, block_mask, scale, dropout_seed=seed, **settings)
    return attend(problem, inputs, score, backend)


def _as_operation(
    inputs: Inputs,
    score: Program | None,
    block_mask: BlockMask | Mod | None,
    scale: float | None,
    seed: Tensor | None,
    backend: str | None,
    **settings: Any,
) -> Result:
    """The call as `torch.ops.flexmod.attention`. Its kernel calls `make_problem`."""
    query, key, _ = inputs
    mask, block_size = _undecided(block_mask, query, key.shape[2])
    settings["kernel_options"] = checks.options(settings["kernel_options"])
    scale = _scale(scale, query)
    return library.attend(
        inputs, score, mask, scale, block_size=block_size, seed=seed, backend=backend, **settings
    )


def make_problem(
    inputs: Inputs,
    score: Program | None,
    block_mask: BlockMask | Mod | None,
    scale: float | None = None,
    kernel_options: Mapping[str, Any] | None = None,
    **others: Any,
) -> Problem:
    """Fit the mods to the tensors, and gather what a kernel depends on.

    `others` are further fields of the problem: sink, dropout, ...
    """
    query, key, value = inputs
    batch, heads, q_len, head_dim = query.shape
    kv_len = key.shape[2]
    extents = {"b": batch, "h": heads, "q_idx": q_len, "kv_idx": kv_len}
    mask = _block_mask(block_mask, query, kv_len)
    return Problem(
        batch=batch,
        heads=heads,
        kv_heads=key.shape[1],
        q_len=q_len,
        kv_len=kv_len,
        head_dim=head_dim,
        value_dim=value.shape[-1],
        dtype=query.dtype,
        device=query.device,
        scale=_scale(scale, query),
        score=specialize(score, extents) if score is not None else None,
        mask=mask,
        mask_program=specialize(mask.program, extents) if mask else None,
        options=checks.options(kernel_options),
        **others,
    )


def _scale(scale: float | None, query: Tensor) -> float:
    if scale is None:
        return 1 / math.sqrt(max(query.shape[-1], 1))
    return scale if isinstance(scale, torch.SymFloat) else float(scale)


def _seed(p: float, seed: int | None) -> int:
    """64 bits; drawn only where they are used."""
    if seed is None:
        return int(torch.randint(2**63 - 1, ()).item()) if p else 0
    return checks.seed(seed) & (2**64 - 1)


def _seed_tensor(p: float, seed: int | None) -> Tensor | None:
    """The same as a 0-dim tensor, drawn anew on each run of a graph."""
    if not p:
        return None
    if seed is None:
        return torch.randint(2**63 - 1, (), device="cpu")
    low = checks.seed(seed) & (2**64 - 1)
    return torch.full((), low - (low >> 63 << 64), dtype=torch.int64, device="cpu")


def _deterministic(asked: bool | None) -> bool:
    return torch.are_deterministic_algorithms_enabled() if asked is None else bool(asked)


def _block_mask(given: Any, query: Tensor, kv_len: int) -> BlockMask | None:
    """The map of a call; a mask_mod, and torch's map, become one."""
    if given is None:
        return None
    batch, heads, q_len, _ = query.shape
    shape = (batch, heads, q_len, kv_len)
    if foreign.is_torch_map(given):
        given = foreign.from_torch(given)
    if not isinstance(given, BlockMask):
        program = trace(given, "mask", device=query.device)
        checks.mask_captures(program, query.device)
        return map_of(program, shape, (_MAP_BLOCK, _MAP_BLOCK), query.device)
    given = given.near(query.device)
    checks.block_mask(given, shape, query.device)
    return given


def _undecided(
    given: Any, query: Tensor, kv_len: int
) -> tuple[BlockMask | Program | None, tuple[int, int]]:
    """The mask of a call whose tensors have no values yet, and the blocks to decide it in."""
    lengths = (query.shape[2], kv_len)
    block_size, extents = (_MAP_BLOCK, _MAP_BLOCK), (*query.shape[:2], *lengths)
    if isinstance(given, PendingBlockMask):
        extents, block_size = given.wanted.extents, given.wanted.block_size
        given = given.wanted.mask_mod
    if foreign.is_torch_map(given):
        extents, block_size = foreign.extents(given), tuple(given.BLOCK_SIZE)
        given = foreign.listed(given)
    if isinstance(given, BlockMask):
        given = given.near(query.device)
        checks.block_mask(given, (*query.shape[:2], *lengths), query.device)
        return given, given.block_size
    if given is None:
        return None, block_size
    program = trace(given, "mask", device=query.device)
    checks.extents(program, extents, (*query.shape[:2], *lengths))
    checks.mask_captures(program, query.device)
    return program, block_size


def _returned(result: Result, return_lse: bool, return_aux: AuxRequest | None) -> Any:
    if return_aux is not None:
        lse = result.lse if return_aux.lse else None
        return result.out, AuxOutput(lse, result.max_scores if return_aux.max_scores else None)
    return (result.out, result.lse) if return_lse else result.out


library.implement(make_problem)
_carrier = compiled.Carrier(_attend)
