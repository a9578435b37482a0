"""`kernel_options`: torch's hints for its kernels. Some steer ours; none may change a result."""

from __future__ import annotations

from typing import Literal, TypedDict, get_args

TorchBackend = Literal["AUTO", "TRITON", "FLASH", "TRITON_DECODE"]
TORCH_BACKENDS: tuple[str, ...] = get_args(TorchBackend)


class FlexKernelOptions(TypedDict, total=False):
    """Keys of `kernel_options`, also with a prefix `fwd_` or `bwd_`.

    The first four steer the tiles of the Triton engine. The others are hints for other compilers:
    they are accepted, and change nothing here; `explain` lists them.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    BLOCK_M1: int
    BLOCK_N1: int
    BLOCK_M2: int
    BLOCK_N2: int
    PRESCALE_QK: bool
    ROWS_GUARANTEED_SAFE: bool
    BLOCKS_ARE_CONTIGUOUS: bool
    WRITE_DQ: bool
    FORCE_USE_FLEX_ATTENTION: bool
    USE_TMA: bool
    BACKEND: TorchBackend
    kpack: int
    matrix_instr_nonkdim: int
    waves_per_eu: int
