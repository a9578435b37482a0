"""`flex_attention`: check the arguments, choose an engine, run it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from flexmod import checks, compiled, given, library, memo
from flexmod.autograd import attend, run
from flexmod.counters import COUNTS
from flexmod.given import Map, Mod
from flexmod.kernels.problem import Inputs, Operands, Problem, Result
from flexmod.program import Program
from flexmod.program.specialize import specialize
from flexmod.returned import AuxOutput, AuxRequest, returned


class _More(TypedDict, total=False):
    """Arguments that do not change what is returned."""

    sink: Tensor | None
    dropout_p: float
    dropout_seed: int | None
    deterministic: bool | None
    backend: str | None


@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Mod | None = ...,
    block_mask: Map | None = ..., scale: float | None = ..., enable_gqa: bool = ...,
    return_lse: Literal[False] = ..., kernel_options: Mapping[str, Any] | None = ..., *,
    return_aux: None = ..., **more: Unpack[_More],
) -> Tensor: ...  # fmt: skip
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Mod | None = ...,
    block_mask: Map | None = ..., scale: float | None = ..., enable_gqa: bool = ..., *,
    return_lse: Literal[True], kernel_options: Mapping[str, Any] | None = ...,
    return_aux: None = ..., **more: Unpack[_More],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Mod | None = ...,
    block_mask: Map | None = ..., scale: float | None = ..., enable_gqa: bool = ...,
    return_lse: Literal[False] = ..., kernel_options: Mapping[str, Any] | None = ..., *,
    return_aux: AuxRequest, **more: Unpack[_More],
) -> tuple[Tensor, AuxOutput]: ...  # fmt: skip
@overload
def flex_attention(  # where the type checker cannot tell what is asked for
    query: Tensor, key: Tensor, value: Tensor, score_mod: Mod | None = ...,
    block_mask: Map | None = ..., scale: float | None = ..., enable_gqa: bool = ...,
    return_lse: bool = ..., kernel_options: Mapping[str, Any] | None = ..., *,
    return_aux: AuxRequest | None = ..., **more: Unpack[_More],
) -> Any: ...  # fmt: skip
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    block_mask: Map | None = None,
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
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
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
        backend: "hopper", "fa2", "cpu" or "reference"; default: the best that can serve the call.

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
    if return_aux is not None:
        checks.returns(return_lse, return_aux)
    wants_max_scores = return_aux is not None and bool(return_aux.max_scores)
    if torch.compiler.is_dynamo_compiling():
        result = compiled.attend(
            _carrier, query, key, value, score_mod, block_mask, scale,
            enable_gqa=enable_gqa, kernel_options=kernel_options, sink=sink, dropout_p=dropout_p,
            dropout_seed=dropout_seed, deterministic=deterministic, backend=backend,
            wants_max_scores=wants_max_scores,
        )  # fmt: skip
    else:
        result = _attend(
            query, key, value, score_mod, block_mask, scale,
            enable_gqa=enable_gqa, kernel_options=kernel_options, sink=sink, dropout_p=dropout_p,
            dropout_seed=dropout_seed, deterministic=deterministic, backend=backend,
            wants_max_scores=wants_max_scores,
        )  # fmt: skip
    return returned(result, return_lse, return_aux)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None,
    block_mask: Map | None,
    scale: float | None,
    *,
    enable_gqa: bool,
    kernel_options: Mapping[str, Any] | None,
    sink: Tensor | None,
    dropout_p: float,
    dropout_seed: int | None,
    deterministic: bool | None,
    backend: str | None,
    wants_max_scores: bool,
) -> Result:
    """Check the arguments, trace the mods, and run the call: itself, or as one operation."""
    if torch._C._is_any_autocast_enabled():
        query, key, value = checks.autocast(query, key, value)
    in_order = given.deterministic(deterministic)
    arguments = memo.arguments_key(
        query, key, value, sink, scale, dropout_p, kernel_options,
        bool(enable_gqa), wants_max_scores, in_order, backend,
    )  # fmt: skip
    calls = memo.known(arguments)
    if calls is None:
        checks.arguments(query, key, value, enable_gqa, sink, dropout_p)
        calls = memo.checked(arguments)
    score = given.score(score_mod, query)
    captures = () if score is None else score.captures
    is_watched = arguments is None and library.watches((query, key, value, *captures))
    programs = None
    if not is_watched:
        seed = given.seed(dropout_p, dropout_seed)
        mask = given.block_mask(block_mask, query, key.shape[2])
        programs = memo.programs_key(score, mask)
        prepared = None if programs is None else calls.get(programs)
        if prepared is not None:
            COUNTS.memory_hits += 1
            if mask is not None:
                mask.check_unchanged()
            return run(prepared, Operands(query, key, value, sink, captures, mask, seed))
    checks.captures(score, query.device)
    inputs = Inputs(query, key, value)
    settings: dict[str, Any] = {
        "kernel_options": kernel_options,
        "dropout_p": float(dropout_p),
        "deterministic": in_order,
        "sink": sink,
        "wants_max_scores": wants_max_scores,
    }
    if is_watched:
        drawn = given.seed_tensor(dropout_p, dropout_seed)
        return _as_operation(inputs, score, block_mask, scale, drawn, backend, **settings)
    problem = make_problem(inputs, score, mask, scale, dropout_seed=seed, **settings)
    result, prepared = attend(problem, inputs, score, backend)
    if prepared is not None and prepared.is_lasting and programs is not None:
        calls.keep(programs, prepared)
    return result


def _as_operation(
    inputs: Inputs,
    score: Program | None,
    block_mask: Map | None,
    scale: float | None,
    seed: Tensor | None,
    backend: str | None,
    **settings: Any,
) -> Result:
    """The call as `torch.ops.flexmod.attention`. Its kernel calls `make_problem`."""
    query, key, _ = inputs
    mask, block_size = given.undecided(block_mask, query, key.shape[2])
    settings["kernel_options"] = checks.options(settings["kernel_options"])
    scale = given.scale(scale, query)
    return library.attend(
        inputs, score, mask, scale, block_size=block_size, seed=seed, backend=backend, **settings
    )


def make_problem(
    inputs: Inputs,
    score: Program | None,
    block_mask: Map | None,
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
    mask = given.block_mask(block_mask, query, kv_len)
    if mask is not None:
        checks.block_mask(mask, (batch, heads, q_len, kv_len), query.device)
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
        scale=given.scale(scale, query),
        score=specialize(score, extents) if score is not None else None,
        mask=mask,
        mask_program=specialize(mask.program, extents) if mask else None,
        options=checks.options(kernel_options),
        **others,
    )


library.implement(make_problem)
_carrier = compiled.Carrier(_attend)
