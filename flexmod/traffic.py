"""How many values attention moves between memory and chip, and what its score matrix weighs.

Counts are for one head with T queries and T keys of head_dim d, forward only, in values (times the
bytes of a value for bytes). Sources: FlashAttention (Dao et al., 2022) for the standard and the
first order of loops and for its tiles; FlashAttention-2 (Dao, 2023) for the second order.
"""

from __future__ import annotations

from flexmod.errors import ArgumentError


def standard(seqlen: int, head_dim: int) -> int:
    """Values moved when scores and weights are written out: 4 T^2 + 4 T d.

    Example:
        >>> standard(1024, 64)
        4456448
    """
    _positive(seqlen=seqlen, head_dim=head_dim)
    return 4 * seqlen**2 + 4 * seqlen * head_dim


def flash1(seqlen: int, head_dim: int, block_kv: int) -> int:
    """Values moved with key blocks as the outer loop: 2 T d + n_c (3 T d + 4 T).

    n_c = ceil(T / block_kv): each key block reads all queries, and reads and writes all outputs
    and row statistics.

    Example:
        >>> flash1(1024, 64, 64)
        3342336
    """
    _positive(seqlen=seqlen, head_dim=head_dim, block_kv=block_kv)
    once, per_block = 2 * seqlen * head_dim, 3 * seqlen * head_dim + 4 * seqlen
    return once + -(-seqlen // block_kv) * per_block


def flash2(
    seqlen: int,
    head_dim: int,
    block_q: int,
    block_kv: int | None = None,
    visited: int | None = None,
) -> int:
    """Values moved with query blocks as the outer loop: T d + 2 T d n_r + T d + T.

    n_r = ceil(T / block_q): each query block reads all keys and values.

    Args:
        block_kv: keys a block; needed with `visited` only.
        visited: number of (query block, key block) tiles that the block map leaves to do; the
            middle term is then `visited * 2 * block_kv * d`. All tiles when None.

    Raises:
        ArgumentError: a size below 1, or `visited` without `block_kv` or outside 0 .. n_r * n_c.

    Example:
        >>> flash2(1024, 64, block_q=128)
        1180672
        >>> flash2(1024, 64, block_q=128, block_kv=64, visited=72)
        721920
    """
    _positive(seqlen=seqlen, head_dim=head_dim, block_q=block_q)
    query = out = seqlen * head_dim
    lse = seqlen
    rows = -(-seqlen // block_q)
    if visited is None:
        return query + 2 * seqlen * head_dim * rows + out + lse
    if block_kv is None:
        raise ArgumentError("flash2 needs block_kv to turn visited tiles into values")
    _positive(block_kv=block_kv)
    tiles = rows * -(-seqlen // block_kv)
    if not 0 <= visited <= tiles:
        raise ArgumentError(f"visited is {visited}, but there are {tiles} tiles")
    return query + visited * 2 * block_kv * head_dim + out + lse


def tile_sizes(sram_values: int, head_dim: int) -> tuple[int, int]:
    """`(block_q, block_kv)` for an on-chip memory of M values: min(B_c, d), B_c = ceil(M / 4 d).

    Example:
        >>> tile_sizes(25_600, 64)
        (64, 100)
    """
    _positive(sram_values=sram_values, head_dim=head_dim)
    block_kv = -(-sram_values // (4 * head_dim))
    return min(block_kv, head_dim), block_kv


def score_matrix_bytes(seqlen: int, heads: int = 1, itemsize: int = 2) -> int:
    """Bytes of the T x T score (or weight) matrix that a fused kernel never stores.

    Example:
        >>> score_matrix_bytes(2048) // 2**20  # MiB, bf16
        8
    """
    _positive(seqlen=seqlen, heads=heads, itemsize=itemsize)
    return heads * seqlen**2 * itemsize


def lse_bytes(seqlen: int, heads: int = 1, itemsize: int = 4) -> int:
    """Bytes of the log-sum-exp of each row, which is stored in the matrix's place.

    Example:
        >>> lse_bytes(8192, heads=32) // 2**20  # MiB, fp32
        1
    """
    _positive(seqlen=seqlen, heads=heads, itemsize=itemsize)
    return heads * seqlen * itemsize


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ArgumentError(f"{name} is {size}; it must be at least 1")
