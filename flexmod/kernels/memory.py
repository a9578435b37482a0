"""How much shared memory a kernel takes: an upper bound, from what compilers were seen to keep.

`tests/kernels/test_compile_targets.py` compares it with compiled kernels. What counts:

- the tiles that stay (queries in the forward), and a buffer for each stage of those that stream;
  one stage more where a load inside the loop, such as a table's, makes the pipeline longer, and on
  Blackwell, whose tensor cores read operands of later stages;
- with one stage nothing is staged: tiles that are not needed at the same time share their place;
- tiles of weights or of gradients of scores that pass through shared memory, in the inputs' type;
- float32 products in three parts ("tf32x3") keep a high and a low half of what stays;
- a value a row or key and stage for each captured tensor and each statistic, and barriers.
"""

from __future__ import annotations

from typing import NamedTuple

_BARRIERS = 2048  # bytes


class Work(NamedTuple):
    """What a kernel's memory depends on beside its tiles. `dims`: padded head_dim and value_dim."""

    kernel: str
    arch: str
    dims: tuple[int, int]
    itemsize: int
    gathers: bool = False
    captures: int = 0

    @property
    def is_amd(self) -> bool:
        return self.arch.startswith("gfx")

    @property
    def is_blackwell(self) -> bool:
        return self.arch.startswith("sm_10")

    @property
    def reads_shared(self) -> bool:
        """Whether tensor cores read operands, weights among them, from shared memory."""
        return self.arch.startswith(("sm_9", "sm_10"))


def shared_bytes(work: Work, q: int, kv: int, stages: int) -> int:
    """Bytes that a kernel takes at most, with tiles of `q` queries and `kv` keys."""
    buffers = stages + work.gathers + work.is_blackwell if stages > 1 else 1
    if work.is_amd and stages == 1:  # operands go to registers, one after the other
        elements = max(q, kv) * max(work.dims) + 2 * q * kv
    elif work.kernel == "forward":
        elements = _forward(work, q, kv, buffers)
    else:
        elements = _backward(work, q, kv, buffers)
    rows = 8 * (work.captures + (work.kernel != "forward")) * buffers * (q + kv)
    return elements * work.itemsize + rows + _BARRIERS * work.reads_shared


def _forward(work: Work, q: int, kv: int, buffers: int) -> int:
    """Elements. Keys and values share one place where nothing is staged."""
    head, value = work.dims
    copies = _halves(work)
    stays = copies * q * head
    if buffers > 1:
        weights = q * kv if work.reads_shared or copies > 1 else 0
        return stays + buffers * kv * (head + value) + copies * weights
    read = copies if work.reads_shared and q >= 64 else 1  # by a warp group's product
    return stays + read * kv * max(head, value) + copies * q * kv


def _backward(work: Work, q: int, kv: int, buffers: int) -> int:
    """Elements. Both tiles of a stage are needed at once."""
    stays, streams = (q, kv) if work.kernel == "backward_query" else (kv, q)
    both, copies = sum(work.dims), _halves(work)
    scores = q * kv if buffers == 1 else 2 * copies * q * kv  # gradients, weights beside them
    return copies * stays * both + buffers * streams * both + scores


def _halves(work: Work) -> int:
    return 2 if work.itemsize == 4 and not work.is_amd else 1
