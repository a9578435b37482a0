"""Mods made from mods: boolean algebra of masks, chains of score mods, shifted positions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import Tensor

from flexmod.errors import ArgumentError
from flexmod.masks.arguments import MaskMod, per_batch

SIGNATURES = {
    4: "mask_mod(b, h, q_idx, kv_idx)",
    5: "score_mod(score, b, h, q_idx, kv_idx)",
}


def noop_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Everything is visible. Itself a mask_mod: pass `noop_mask`, not `noop_mask()`."""
    # Written so that interval arithmetic decides it, and so that b and h are not read.
    return kv_idx * 0 == 0


def nothing_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Nothing is visible. Itself a mask_mod; the value of `or_masks()`."""
    return kv_idx * 0 != 0


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """Visible where every one of `mask_mods` says so; all is visible if there are none.

    Example: `and_masks(causal(), document(ids))`, causal inside each document.
    """
    check_arity("and_masks", mask_mods, 4)
    if not mask_mods:
        return noop_mask
    first, *others = mask_mods

    def every(b, h, q_idx, kv_idx):
        visible = first(b, h, q_idx, kv_idx)
        for mask_mod in others:
            visible = visible & mask_mod(b, h, q_idx, kv_idx)
        return visible

    return renamed(every, "and_masks", mask_mods)


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """Visible where at least one of `mask_mods` says so; nothing is visible if there are none.

    Example: `or_masks(causal(), prefix_lm(8))`.
    """
    check_arity("or_masks", mask_mods, 4)
    if not mask_mods:
        return nothing_mask
    first, *others = mask_mods

    def some(b, h, q_idx, kv_idx):
        visible = first(b, h, q_idx, kv_idx)
        for mask_mod in others:
            visible = visible | mask_mod(b, h, q_idx, kv_idx)
        return visible

    return renamed(some, "or_masks", mask_mods)


def not_mask(mask_mod: MaskMod) -> MaskMod:
    """Visible where `mask_mod` is not. Example: `not_mask(padding(n))` keeps keys n, n+1, ..."""
    check_arity("not_mask", (mask_mod,), 4)

    def inverse(b, h, q_idx, kv_idx):
        return ~mask_mod(b, h, q_idx, kv_idx)

    return renamed(inverse, "not_mask", (mask_mod,))


def compose(*score_mods: Callable) -> Callable:
    """The score mods one after the other, left to right; none: the score as it is.

    Example: `compose(softcap(20.0), alibi(8))` caps first and adds the bias to the capped score.
    """
    check_arity("compose", score_mods, 5)

    def chain(score, b, h, q_idx, kv_idx):
        for score_mod in score_mods:
            score = score_mod(score, b, h, q_idx, kv_idx)
        return score

    return renamed(chain, "compose", score_mods)


def shift(mod: Callable, q_offset: int | Tensor = 0, kv_offset: int | Tensor = 0) -> Callable:
    """The mask or score mod `mod`, shown q_idx + q_offset and kv_idx + kv_offset.

    Offsets are ints (negative too) or integer tensors [] or [B]. The shifted positions must lie
    inside whatever tensors `mod` indexes.
    Example: `shift(causal(), q_offset=9)` decodes one query against 10 cached keys: query 0 is
    token 9 and sees keys 0..9.
    """
    arity = check_arity("shift", (mod,), 4, 5)
    q_start = per_batch("q_offset", q_offset, low=None)
    kv_start = per_batch("kv_offset", kv_offset, low=None)

    def shifted_mask(b, h, q_idx, kv_idx):
        return mod(b, h, q_idx + q_start(b), kv_idx + kv_start(b))

    def shifted_score(score, b, h, q_idx, kv_idx):
        return mod(score, b, h, q_idx + q_start(b), kv_idx + kv_start(b))

    return renamed(shifted_mask if arity == 4 else shifted_score, "shift", (mod,))


def check_arity(caller: str, mods: tuple[Any, ...], *allowed: int) -> int | None:
    """Raise unless each mod is a callable of an allowed arity; the arity of the last one."""
    wanted = " or ".join(SIGNATURES[arity] for arity in allowed)
    arity = None
    for mod in mods:
        if not callable(mod):
            found = f"{mod!r} of type {type(mod).__name__}"
            raise ArgumentError(f"{caller} takes functions {wanted}, got {found}")
        arity = positional_count(mod)
        if arity not in allowed:
            found = SIGNATURES.get(arity, f"one of {arity} positional arguments")
            message = f"{caller} takes functions {wanted}, got {label(mod)}, which is {found}"
            maker = arity not in SIGNATURES and mod.__module__.startswith("flexmod.")
            raise ArgumentError(message + (f"; call it: {label(mod)}(...)" if maker else ""))
    return arity


def positional_count(mod: Callable) -> int:
    """Number of positional arguments without a default that `mod` takes."""
    if isinstance(mod, FunctionType) and not hasattr(mod, "__wrapped__"):
        if not mod.__code__.co_flags & inspect.CO_VARARGS:
            return mod.__code__.co_argcount - len(mod.__defaults__ or ())  # Dynamo knows this form
    # nn.Module hides forward behind __call__(*args, **kwargs).
    target = getattr(mod, "forward", mod)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{label(mod)} has no signature to read: wrap it in a def") from error
    return sum(p.kind in positional and p.default is p.empty for p in parameters)


def label(mod: Callable) -> str:
    """The name that combined mods show: a function's own, a partial's function's, or the type."""
    target = getattr(mod, "func", mod)
    return getattr(target, "__name__", type(target).__name__)


def renamed(function: Callable, caller: str, mods: tuple[Callable, ...]) -> Callable:
    function.__name__ = function.__qualname__ = f"{caller}({', '.join(map(label, mods))})"
    return function
