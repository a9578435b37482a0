"""Attention as a module: mods are submodules, so what they learn is among a model's parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from flexmod import checks
from flexmod.attention import flex_attention
from flexmod.blocks import BlockMask
from flexmod.errors import ArgumentError
from flexmod.masks import and_masks, compose
from flexmod.masks.combine import check_arity, label

__all__ = ["FlexAttention", "MaskMod", "ScoreMod"]


class _Made(nn.Module):
    """A mod that a function makes from tensors, which this module owns."""

    arity: int

    def __init__(self, make: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().__init__()
        name = type(self).__name__
        if not callable(make):
            raise ArgumentError(f"{name} takes a function that makes a mod, not {make!r}")
        try:
            given = inspect.signature(make).bind(*args, **kwargs).arguments
        except TypeError as error:
            raise ArgumentError(f"{name}: {label(make)} {error}") from None
        self.make, self.names, self.plain = make, tuple(given), {}
        for argument, value in given.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(argument, value)
            elif isinstance(value, nn.Parameter):
                self.register_parameter(argument, value)
            else:
                self.plain[argument] = value
        check_arity(name, (self.made(),), self.arity)

    def made(self) -> Callable[..., Any]:
        """The mod of the tensors as they are now: moved, loaded or trained."""
        owned = {n: getattr(self, n) for n in self.names if n not in self.plain}
        return self.make(**self.plain, **owned)

    def extra_repr(self) -> str:
        shown = [
            f"{n}={self.plain[n]!r}" if n in self.plain else f"{n}={list(getattr(self, n).shape)}"
            for n in self.names
        ]
        return ", ".join([label(self.make), *shown])


class ScoreMod(_Made):
    """A score mod of `flexmod.mods` (or your own) whose tensors are parameters and buffers.

    An `nn.Parameter` among the arguments becomes a parameter under its argument's name, any other
    tensor a buffer.

    Args:
        make: a function that returns a score mod. args, kwargs: its arguments.

    Raises:
        ArgumentError: the arguments do not fit, or what is made is not a score mod.

    Example:
        >>> import torch, flexmod
        >>> table = torch.nn.Parameter(torch.zeros(4, 15))
        >>> bias = flexmod.nn.ScoreMod(flexmod.mods.relative_bias, table)
        >>> bias
        ScoreMod(relative_bias, table=[4, 15])
        >>> list(bias.state_dict())
        ['table']
    """

    arity = 5

    def forward(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.made()(score, b, h, q_idx, kv_idx)


class MaskMod(_Made):
    """A mask of `flexmod.masks` (or your own) whose tensors are buffers.

    Example:
        >>> import torch, flexmod
        >>> flexmod.nn.MaskMod(flexmod.masks.document, torch.tensor([0, 0, 1]))
        MaskMod(document, ids=[3])
    """

    arity = 4

    def forward(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.made()(b, h, q_idx, kv_idx)


class _Function(nn.Module):
    """A mod without tensors to own, for its place among the others and its name."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def made(self) -> Callable[..., Any]:
        return self.function

    def _get_name(self) -> str:
        return label(self.function)


class FlexAttention(nn.Module):
    """`flex_attention` with its mods. Projections are yours: it takes and gives heads.

    Args:
        mods: score mods and masks in any order, told apart by their arguments: functions,
            nn.Modules (submodules of this one), `ScoreMod` and `MaskMod`. Score mods are applied
            left to right; a key is visible where all masks say so.
        scale: of the scores; default 1 / sqrt(E).
        sink: [Hq], one more score a head in the denominator; an nn.Parameter learns.
        dropout_p: of the softmax weights, in training only.
        deterministic, backend: as in `flex_attention`.

    Raises:
        ArgumentError: a mod takes neither five nor four arguments; dropout_p out of range.

    Example:
        >>> import torch, flexmod
        >>> slopes = torch.nn.Parameter(torch.full((2,), 0.1))
        >>> attention = flexmod.nn.FlexAttention(
        ...     flexmod.nn.ScoreMod(flexmod.mods.alibi, slopes), flexmod.masks.causal()
        ... )
        >>> attention
        FlexAttention(
          (mods): ModuleList(
            (0): ScoreMod(alibi, slopes=[2])
            (1): causal()
          )
        )
        >>> query = key = value = torch.randn(1, 2, 5, 8)
        >>> attention(query, key, value).shape
        torch.Size([1, 2, 5, 8])
    """

    sink: Tensor | None

    def __init__(
        self,
        *mods: Callable[..., Any],
        scale: float | None = None,
        sink: Tensor | None = None,
        dropout_p: float = 0.0,
        deterministic: bool | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.arities = tuple(check_arity("FlexAttention", (mod,), 4, 5) for mod in mods)
        self.mods = nn.ModuleList(m if isinstance(m, nn.Module) else _Function(m) for m in mods)
        if isinstance(sink, nn.Parameter) or sink is None:
            self.register_parameter("sink", sink)
        else:
            self.register_buffer("sink", sink)
        self.scale, self.dropout_p = scale, checks.dropout(dropout_p)
        self.deterministic, self.backend = deterministic, backend

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        block_mask: BlockMask | Callable[..., Any] | None = None,
        return_lse: bool = False,
    ) -> Any:
        """out [B, Hq, Q, Ev], or (out, lse), of query [B, Hq, Q, E] and key, value [B, Hkv, KV, .].

        Hq is a multiple of Hkv. `block_mask` is for a module without masks: one map for all layers.

        Raises:
            ArgumentError: a `block_mask` for a module that has masks of its own.
        """
        score_mods, mask_mods = self._of_arity(5), self._of_arity(4)
        if mask_mods and block_mask is not None:
            raise ArgumentError(
                "block_mask is given to a FlexAttention that has masks: leave them out of the "
                "module, or combine them into block_mask"
            )
        return flex_attention(
            query,
            key,
            value,
            compose(*score_mods) if score_mods else None,
            and_masks(*mask_mods) if mask_mods else block_mask,
            self.scale,
            enable_gqa=True,
            return_lse=return_lse,
            sink=self.sink,
            dropout_p=self.dropout_p if self.training else 0.0,
            deterministic=self.deterministic,
            backend=self.backend,
        )

    def _of_arity(self, arity: int) -> list[Callable[..., Any]]:
        chosen = [m for m, n in zip(self.mods, self.arities, strict=True) if n == arity]
        return [m.made() if isinstance(m, _Made | _Function) else m for m in chosen]

    def extra_repr(self) -> str:
        sink = None if self.sink is None else list(self.sink.shape)
        shown = {
            "scale": self.scale,
            "sink": sink,
            "dropout_p": self.dropout_p or None,
            "deterministic": self.deterministic,
            "backend": self.backend,
        }
        return ", ".join(f"{name}={value!r}" for name, value in shown.items() if value is not None)
