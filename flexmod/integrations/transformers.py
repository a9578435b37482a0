"""Hugging Face transformers: models run with `attn_implementation="flexmod"`, from 4.57 on."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexmod import masks, mods
from flexmod.attention import flex_attention
from flexmod.blocks import BlockMask, create_block_mask, create_mask
from flexmod.errors import ArgumentError, UnsupportedError
from flexmod.masks.arguments import MaskMod
from flexmod.mods.arguments import ScoreMod

OLDEST = (4, 57)
# Arguments that change a result elsewhere, and what to do where they are given.
_REFUSED = {
    "output_attentions": "weights are never held in memory: load the model with "
    'attn_implementation="eager" to see them',
    "head_mask": "scale heads by a score_mod or after attention",
    "layer_head_mask": "scale heads by a score_mod or after attention",
}


def register(name: str = "flexmod", *, backend: str | None = None) -> str:
    """Make `attn_implementation=name` known to transformers. Once a process is enough.

    A mask is traced and mapped once a forward pass for each kind of layer, as a `BlockMask`: no
    mask of the size queries x keys is made. Padding, packed sequences (position_ids that restart),
    caches, sliding windows, soft caps, sinks and relative biases are served, and trained.

    Args:
        name: what models are told; another name with another `backend` may be registered too.
        backend: the engine, as in `flex_attention`; default: the best that can serve the call.

    Returns:
        name.

    Raises:
        UnsupportedError: transformers is missing or older than 4.57.

    Example:
        >>> from flexmod.integrations import transformers  # doctest: +SKIP
        >>> transformers.register()  # doctest: +SKIP
        'flexmod'
        >>> AutoModel.from_pretrained(..., attn_implementation="flexmod")  # doctest: +SKIP
    """
    attentions, mask_functions = _interfaces()
    attentions.register(name, partial(attention, backend=backend))
    mask_functions.register(name, block_mask)
    return name


def _interfaces() -> tuple[Any, Any]:
    """transformers' tables of attention and of mask functions."""
    try:
        import transformers
    except ImportError:
        raise UnsupportedError(
            "transformers is not installed: pip install 'flexmod[transformers]'"
        ) from None
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < OLDEST:
        raise UnsupportedError(
            f"transformers {transformers.__version__} is too old: 4.57 is needed"
        )
    return transformers.AttentionInterface, transformers.AttentionMaskInterface


def block_mask(
    *,
    batch_size: int,
    kv_length: int,
    mask_function: MaskMod,
    attention_mask: Tensor | BlockMask | None = None,
    q_length: int = 1,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    cache_position: Tensor | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> BlockMask | None:
    """The map of one forward pass: transformers' mask of positions, padding and offsets.

    One query (a step of decoding) is not worth intervals: its row of keys is worked out as it is,
    and where it hides nothing there is no map.

    Args:
        mask_function: of absolute positions.
        attention_mask: bool [B, positions], False for padding; a shorter one is padding after it.
            A map is returned as it is: generate() with a static cache makes it ahead of the pass.
        q_length, q_offset: the queries are the positions from q_offset on; version 4 tells
            `cache_position` [queries] instead, whose entries follow each other.
        kv_length, kv_offset: the keys are the positions from kv_offset on.
    """
    if isinstance(attention_mask, BlockMask):
        return attention_mask
    if cache_position is not None:
        q_length, q_offset, device = len(cache_position), cache_position[0], cache_position.device
    visible = masks.shift(mask_function, _kept(q_offset), _kept(kv_offset))
    if attention_mask is not None:
        visible = _without_padding(visible, attention_mask, kv_length, kv_offset)
    if q_length != 1 or torch.compiler.is_compiling():
        return create_block_mask(visible, batch_size, None, q_length, kv_length, device)
    row = create_mask(visible, batch_size, None, 1, kv_length, device)
    return None if bool(row.all()) else BlockMask.from_dense(row)


def _kept(offset: int | Tensor) -> int | Tensor:
    """A static cache counts on in its own tensor while the map is in use."""
    return offset.clone() if isinstance(offset, Tensor) else offset


def _without_padding(
    visible: MaskMod, attention_mask: Tensor, kv_length: int, kv_offset: int | Tensor
) -> MaskMod:
    keys = torch.arange(kv_length, device=attention_mask.device) + kv_offset
    known = keys.clamp(max=attention_mask.shape[-1] - 1)
    keep = attention_mask[:, known] & (keys == known)
    # One read of the device, and kernels and maps need not look at a table that hides nothing.
    if not torch.compiler.is_compiling() and bool(keep.all()):
        return visible
    return masks.and_masks(visible, masks.key_padding(keep))


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    *,
    backend: str | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as transformers calls it.

    Args:
        query: [B, Hq, Q, E]; key, value: [B, Hkv, KV, E], heads not repeated.
        attention_mask: what `block_mask` made; or a user's own [B or 1, Hq or 1, Q, KV], bool or
            added to the scores; None: `module.is_causal` and `sliding_window` say what is visible.
        s_aux: [Hq], a sink a head. position_bias: [B or 1, Hq, Q, KV], added to the scores.

    Returns:
        (out [B, Q, Hq, E], None): weights are never held in memory.
    """
    for name, instead in _REFUSED.items():
        if others.get(name) is not None and others[name] is not False:
            raise UnsupportedError(f"{name} is not supported by flexmod: {instead}")
    visible: Any = attention_mask
    biases = [position_bias]
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        visible = _default_mask(causal, sliding_window, query.shape[2], key.shape[2])
    elif isinstance(attention_mask, Tensor):
        visible, bias = _own_mask(attention_mask, key.shape[2])
        biases.append(bias)
    score_mods = [mods.softcap(softcap)] if softcap is not None else []
    score_mods += [_added(bias) for bias in biases if bias is not None]
    out = flex_attention(
        query,
        key,
        value,
        masks.compose(*score_mods) if score_mods else None,
        visible,
        scaling,
        enable_gqa=True,
        sink=s_aux,
        dropout_p=dropout,
        backend=backend,
    )
    return out.transpose(1, 2).contiguous(), None


def _default_mask(causal: bool, window: int | None, q_len: int, kv_len: int) -> MaskMod | None:
    """For models that make no mask: the queries are the last of the keys."""
    if not causal or q_len == 1:
        return None
    mask = masks.causal() if window is None else masks.sliding_window(window)
    return masks.shift(mask, q_offset=kv_len - q_len)


def _own_mask(table: Tensor, kv_len: int) -> tuple[BlockMask | None, Tensor | None]:
    """A user's mask of 4 axes as a map, if it is of bool, or as a bias."""
    if table.ndim != 4 or table.shape[-1] < kv_len:
        raise ArgumentError(
            f"attention_mask must be [B or 1, Hq or 1, queries, {kv_len} keys], "
            f"not {list(table.shape)}"
        )
    table = table[..., :kv_len]
    return (BlockMask.from_dense(table), None) if table.dtype == torch.bool else (None, table)


def _added(table: Tensor) -> ScoreMod:
    batch, heads = table.shape[:2]
    return lambda score, b, h, q_idx, kv_idx: (
        score + table[b if batch > 1 else 0, h if heads > 1 else 0, q_idx, kv_idx]
    )
