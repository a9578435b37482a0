"""What Gluon calls differently in the versions of Triton that the hopper kernels run on."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

# Triton 3.9 keeps the older names, but they only raise.
copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_tile = gl.shared_memory_descriptor
seen_as = getattr(_tile, "reinterpret", None) or _tile._reinterpret  # tile, dtype, shape, layout
synchronize = getattr(gl, "barrier", None) or gl.thread_barrier


@builtin
def _reduce_add(tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    """Add a tile in shared memory to one in global memory, by the bulk copy engine.

    Triton 3.6 has the operation, but no name for it.
    """
    from triton._C.libtriton import ir

    place = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, place, src.handle
    )


add_out = getattr(tma, "async_atomic_add", None) or _reduce_add
