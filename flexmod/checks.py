"""What `flex_attention` refuses, in torch's order, and what torch lets through wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from flexmod.blocks import BlockMask
from flexmod.errors import ArgumentError, BlockMaskError, DeviceError, UnsupportedError
from flexmod.kernels.problem import Inputs
from flexmod.options import TORCH_BACKENDS, FlexKernelOptions
from flexmod.program import Program
from flexmod.program.transforms import is_recorded

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TILE_OPTIONS = tuple(FlexKernelOptions.__annotations__)[:4]
OTHER_OPTIONS = tuple(FlexKernelOptions.__annotations__)[4:]


def tensors(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Shapes, dtypes and devices of query, key and value."""
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise ArgumentError(f"{name} must be a tensor, not {type(x).__name__}")
        if x.is_nested:
            raise UnsupportedError(f"{name} is a nested tensor: pad it and pass a padding mask")
    if len({x.device for x in named.values()}) > 1:
        places = ", ".join(f"{name} {x.device}" for name, x in named.items())
        raise DeviceError(f"query, key and value must be on one device; got {places}")
    if query.ndim and key.ndim and query.shape[-1] != key.shape[-1]:
        raise ArgumentError(
            f"query and key must have one head_dim; got {query.shape[-1]} and {key.shape[-1]}"
        )
    for name, x in named.items():
        if x.ndim != 4:
            raise UnsupportedError(
                f"{name} must be 4-D [batch, heads, seqlen, head_dim]; got shape {list(x.shape)}"
            )
    _heads(query, key, value, enable_gqa)
    if key.shape[0] not in (1, query.shape[0]):
        raise ArgumentError(
            f"key's batch must be {query.shape[0]} (the query's) or 1, not {key.shape[0]}"
        )
    if key.shape[0] != value.shape[0]:
        raise ArgumentError(
            f"key and value must have one batch; got {key.shape[0]} and {value.shape[0]}"
        )
    if key.shape[2] != value.shape[2]:
        raise ArgumentError(
            f"key and value must have one seqlen; got {key.shape[2]} and {value.shape[2]}"
        )
    _dtypes(named)
    if query.shape[-1] == 0 or value.shape[-1] == 0:
        raise ArgumentError("head_dim must be at least 1")


def _heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    heads, kv_heads = query.shape[1], key.shape[1]
    if kv_heads != value.shape[1]:
        raise ArgumentError(
            f"key and value must have the same heads; got {kv_heads} and {value.shape[1]}"
        )
    if heads == kv_heads:
        return
    if not enable_gqa:
        raise ArgumentError(
            f"query has {heads} heads, key and value {kv_heads}: pass enable_gqa=True to share them"
        )
    if kv_heads == 0 or heads % kv_heads:
        raise ArgumentError(
            f"with enable_gqa the query's heads ({heads}) must be a multiple of key's ({kv_heads})"
        )


def _dtypes(named: Mapping[str, Tensor]) -> None:
    dtypes = {name: x.dtype for name, x in named.items()}
    if len(set(dtypes.values())) > 1:
        found = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise ArgumentError(f"query, key and value must have one dtype; got {found}")
    if dtypes["query"] not in DTYPES:
        raise ArgumentError(
            f"dtype {dtypes['query']} is not supported: use float32, bfloat16, float16 or float64"
        )


def arguments(
    query: Any,
    key: Any,
    value: Any,
    enable_gqa: bool,
    sink_given: Any,
    dropout_p: Any,
) -> None:
    """What comes before the mods; kernel_options come after them, as in torch."""
    tensors(query, key, value, enable_gqa)
    sink(sink_given, query)
    dropout(dropout_p)


def autocast(query: Tensor, key: Tensor, value: Tensor) -> Inputs:
    """Under autocast query, key and value take its dtype, but for float64: torch's rule."""
    inputs = Inputs(query, key, value)
    for kind in {x.device.type for x in inputs if isinstance(x, Tensor)}:
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            inputs = Inputs(*(_cast(x, kind) for x in inputs))
    return inputs


def _cast(x: Any, kind: str) -> Any:
    if not isinstance(x, Tensor) or x.device.type != kind or not x.is_floating_point():
        return x
    return x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(kind))


def returns(return_lse: bool, return_aux: Any) -> None:
    if return_lse and return_aux is not None:
        raise ArgumentError(
            "give return_lse or return_aux, not both: return_aux=AuxRequest(lse=True)"
        )


def options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The tile hints among kernel_options; an unknown key raises."""
    hints = {}
    for name, value in (given or {}).items():
        base = name.removeprefix("fwd_").removeprefix("bwd_")
        if base not in TILE_OPTIONS + OTHER_OPTIONS:
            known = ", ".join(TILE_OPTIONS + OTHER_OPTIONS)
            raise ArgumentError(f"kernel_options has an unknown key {name!r}; known: {known}")
        if base == "BACKEND" and value not in TORCH_BACKENDS:
            raise ArgumentError(
                f"kernel_options BACKEND must be one of {', '.join(TORCH_BACKENDS)}, not "
                f"{value!r}; "
                "to choose an engine of flexmod pass backend=..."
            )
        if base in TILE_OPTIONS:
            if not isinstance(value, int) or value < 1 or value & (value - 1):
                if base != "num_stages" or not isinstance(value, int) or value < 1:
                    raise ArgumentError(
                        f"kernel_options {name} must be a power of two, not {value!r}"
                    )
            hints[name] = max(value, 16) if base.startswith("BLOCK") else value
    return hints


def sink(given: Tensor | None, query: Tensor) -> None:
    """One float a query head, on the query's device."""
    if given is None:
        return
    if not isinstance(given, Tensor) or given.shape != (query.shape[1],):
        shape = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise ArgumentError(f"sink must have shape [{query.shape[1]}] (query heads), not {shape}")
    if not given.is_floating_point():
        raise ArgumentError(f"sink must be a floating-point tensor, not {given.dtype}")
    if given.device != query.device:
        raise DeviceError(f"sink is on {given.device}, but query is on {query.device}")


def dropout(p: float) -> float:
    if not isinstance(p, int | float) or not 0 <= p < 1:
        raise ArgumentError(f"dropout_p must be in [0, 1), not {p!r}")
    return float(p)


def seed(given: Any) -> int:
    if not isinstance(given, Integral) or isinstance(given, bool):
        raise ArgumentError(f"dropout_seed must be an int, not {given!r}")
    return int(given)


def captures(program: Program | None, device: torch.device) -> None:
    """Captured tensors must live where the query does."""
    if program is None:
        return
    for tensor in program.captures:
        if tensor.device != device:
            raise DeviceError(
                f"{program.name} captures a tensor of shape {list(tensor.shape)} on "
                f"{tensor.device}, but query is on {device}: move it with .to({str(device)!r})"
            )


def mask_captures(program: Program, device: torch.device) -> None:
    """A mask is a decision: it has no gradient."""
    captures(program, device)
    if torch.is_grad_enabled() and any(c.requires_grad for c in program.captures):
        raise ArgumentError(
            f"{program.name} captures a tensor that needs a gradient, but a mask has none: "
            "use tensor.detach() in the mask, or a score_mod"
        )


def extents(
    program: Program,
    made: tuple[int | None, int | None, int, int],
    shape: tuple[int, int, int, int],
) -> None:
    """A mask made for (B, H, Q_LEN, KV_LEN) must be right for a call of this shape."""
    if made[2:] != shape[2:]:
        raise BlockMaskError(
            f"block_mask was made for Q_LEN, KV_LEN = {made[2:]}, but query and key have "
            f"{shape[2:]}: make one for these lengths"
        )
    for axis, name, index in ((0, "B", "b"), (1, "H", "h")):
        if made[axis] == shape[axis]:
            continue
        if made[axis] not in (1, None):
            raise BlockMaskError(
                f"block_mask has {name}={made[axis]}, the call {shape[axis]}: make it with "
                f"{name}={shape[axis]}, or {name}=None if the mask does not read {index}"
            )
        if index in program.reads:
            raise BlockMaskError(
                f"block_mask has {name}=1 but its mask reads {index}: it would hold for {index}=0 "
                f"only; make it with {name}={shape[axis]}"
            )


def block_mask(mask: BlockMask, shape: tuple[int, int, int, int], device: torch.device) -> None:
    """A map must cover exactly the call's tokens, and be made for its batch and heads."""
    extents(mask.program, mask.shape, shape)
    if mask.device != device:
        raise DeviceError(
            f"block_mask is on {mask.device}, but query is on {device}: use block_mask.to(...)"
        )
    mask_captures(mask.program, device)
    if not any(is_recorded(c) for c in mask.program.captures):  # else when the graph runs
        mask.check_unchanged()
