"""The `cpu` engine: attention in torch operations over live blocks only.

The default for CPU tensors. It runs on any device, so it also serves what no kernel serves. Calls
without a score_mod go to torch's fused kernels, large piece by large piece of the map (`fused`).
All others go tile by tile in FlashAttention-2 order (Dao, 2023): a row of query blocks stays, its
runs of key blocks stream past, statistics are rescaled as the running maximum grows.
"""

from flexmod.kernels.cpu.backward import backward
from flexmod.kernels.cpu.forward import forward
from flexmod.kernels.problem import Problem

__all__ = ["backward", "forward", "refuses"]


def refuses(problem: Problem) -> str | None:
    """It serves everything."""
    return None
