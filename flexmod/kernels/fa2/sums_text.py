"""The text in the backward kernels that makes the sums of captured tensors' gradients."""

from __future__ import annotations

from functools import lru_cache

from flexmod.kernels.fa2.sums import Plan
from flexmod.program.gradient import LoadGradient

_BY_QUERY = ("plane", "row", "diagonal", "element")  # summed by the kernel that walks a query tile
HOPPER = frozenset({"plane", "column", "diagonal"})  # what `hopper_functions` adds up


def tensors(plan: Plan) -> list[str]:
    """Names of the buffers in the signature of the backward kernels."""
    return [f"sum{n}" for n in range(len(plan.loads))]


def sizes(plan: Plan) -> list[str]:
    """Names of the lengths of captured tensors there."""
    return [
        f"sum{n}_size{axis}"
        for n, (load, kind) in enumerate(zip(plan.loads, plan.kinds, strict=True))
        if kind == "element"
        for axis in range(len(load.indices))
    ]


def parameters(plan: Plan) -> list[str]:
    return tensors(plan) + sizes(plan)


@lru_cache(maxsize=256)
def functions(plan: Plan) -> str:
    """Of both fa2 kernels."""
    return "\n\n\n".join([*_query_functions(plan), *_key_functions(plan)])


def _query_functions(plan: Plan) -> list[str]:
    """Text of start_query_sums, add_query_sums and store_query_sums."""
    kept = [n for n, kind in enumerate(plan.kinds) if kind in ("plane", "row")]
    start = ["tl.zeros([TILE_Q], work)"] * len(kept)  # by rows: no warp waits for another
    signature = "".join(f", {name}" for name in parameters(plan))
    lines = []
    for n, (load, kind) in enumerate(zip(plan.loads, plan.kinds, strict=True)):
        if kind in _BY_QUERY:
            lines += [_value(n, load), *_ADDITIONS.get(kind, lambda *_: [])(n, load)]
    place = {n: position for position, n in enumerate(kept)}
    added = [f"sums[{place[n]}] + tl.sum(value{n}, 1)" for n in kept]
    stores = []
    for n in kept:
        if plan.kinds[n] == "plane":
            stores.append(f"tl.store(sum{n} + plane * tiles + tile, tl.sum(sums[{place[n]}]))")
        else:
            address = f"sum{n} + plane.to(tl.int64) * q_len + rows"
            stores.append(f"tl.store({address}, sums[{place[n]}], mask=rows < q_len)")
    return [
        _function("start_query_sums(TILE_Q: tl.constexpr, work: tl.constexpr)", [], start),
        _function(
            "add_query_sums(sums, results, weight, plane, first_row, first_key, q_len, kv_len,\n"
            f"                   TILE_Q: tl.constexpr, TILE_KV: tl.constexpr{signature})",
            lines, added,
        ),
        _function(f"store_query_sums(sums, plane, tile, tiles, rows, q_len{signature})", stores),
    ]  # fmt: skip


def _key_functions(plan: Plan) -> list[str]:
    """Text of start_key_sums, add_key_sums and store_key_sums."""
    kept = [n for n, kind in enumerate(plan.kinds) if kind == "column"]
    signature = "".join(f", {name}" for name in parameters(plan))
    lines = [_value(n, plan.loads[n]) for n in kept]
    added = [f"sums[{position}] + tl.sum(value{n}, 0)" for position, n in enumerate(kept)]
    stores = [
        f"tl.store(sum{n} + plane.to(tl.int64) * kv_len + keys, sums[{position}], "
        "mask=keys < kv_len)"
        for position, n in enumerate(kept)
    ]
    return [
        _function("start_key_sums(TILE_KV: tl.constexpr, work: tl.constexpr)", [],
                  ["tl.zeros([TILE_KV], work)"] * len(kept)),
        _function("add_key_sums(sums, results, weight,\n"
                  "                 TILE_Q: tl.constexpr, TILE_KV: tl.constexpr)", lines, added),
        _function(f"store_key_sums(sums, plane, keys, kv_len{signature})", stores),
    ]  # fmt: skip


@lru_cache(maxsize=256)
def hopper_functions(plan: Plan) -> str:
    """Text of add_sums, for a tile [TILE_KV, TILE_Q] and a gradient of 1: sums leave it at once.

    Sums over a plane leave as sums over queries.
    """
    lines = []
    for n, (load, kind) in enumerate(zip(plan.loads, plan.kinds, strict=True)):
        if kind == "product":
            continue
        value = f"results[{load.value}] * grad"
        lines.append(
            f"value{n} = " + (value if plan.finite[n] else f"tl.where(grad == 0.0, 0.0, {value})")
        )
        if kind == "diagonal":
            lines += _line(n)
            lines.append(f"add_diagonals(line{n}, value{n}, keys[:, None], rows[None, :], 1)")
        else:
            address = f"sum{n} + plane.to(tl.int64) * kv_len + keys"
            added = f"tl.sum(value{n}, 1), mask=keys < kv_len"
            lines.append(f'tl.atomic_add({address}, {added}, sem="relaxed")')
    signature = "".join(f", {name}" for name in parameters(plan))
    return _function(
        "add_sums(results, grad, plane, rows, keys, q_len, kv_len,\n"
        f"             TILE_Q: tl.constexpr, TILE_KV: tl.constexpr{signature})",
        lines,
    )  # fmt: skip


def _function(head: str, lines: list[str], results: list[str] | None = None) -> str:
    """A jit function; results are returned as a tuple, which may be empty."""
    body = list(lines)
    if results is not None:
        body.append(f"return ({''.join(f'{r}, ' for r in results)})")
    return f"@triton.jit\ndef {head}:\n    " + "\n    ".join(body or ["pass"])


def _value(n: int, load: LoadGradient) -> str:
    """What a load receives, 0 where nothing is seen."""
    value = f"tl.broadcast_to(results[{load.value}], [TILE_Q, TILE_KV])"
    return f"value{n} = tl.where(weight == 0.0, 0.0, {value})"


def _add_diagonals(n: int, load: LoadGradient) -> list[str]:
    return [
        *_line(n),
        "rows = first_row + tl.arange(0, TILE_Q)[:, None]",
        "keys = first_key + tl.arange(0, TILE_KV)[None, :]",
        f"add_diagonals(line{n}, value{n}, rows, keys, -1)",
    ]


def _line(n: int) -> list[str]:
    """Where the sum of the main diagonal of a plane is."""
    return [
        f"line{n} = sum{n} + plane.to(tl.int64) * (q_len + kv_len + 2 * (TILE_Q + TILE_KV))",
        f"line{n} += q_len + TILE_Q + TILE_KV",
    ]


def _add_elements(n: int, load: LoadGradient) -> list[str]:
    lines = [f"flat{n} = tl.zeros([TILE_Q, TILE_KV], tl.int64)"]
    for axis, position in enumerate(load.indices):
        size = f"sum{n}_size{axis}"
        lines += [
            f"index = results[{position}]",
            f"index = tl.where(index < 0, index + {size}, index)",
            f"index = tl.minimum(tl.maximum(index, 0), {size} - 1)",
            f"flat{n} = flat{n} * {size} + index",
        ]
    return [
        *lines,
        f'tl.atomic_add(sum{n} + flat{n}, value{n}, mask=weight != 0.0, sem="relaxed")',
    ]


_ADDITIONS = {"diagonal": _add_diagonals, "element": _add_elements}
