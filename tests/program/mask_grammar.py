"""Random masks for hypothesis: trees of integer operations on b, h, q_idx, kv_idx and tables.

Loaded with runpy, so that tests in several folders can share it.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

_INDICES = st.sampled_from(["b", "h", "q", "kv", "q", "kv"])
_CONSTANTS = st.integers(-9, 40)
_DIVISORS = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16, -1, -3, -4])
_TABLES = st.lists(st.integers(-6, 30), min_size=1, max_size=9)
_SORTED = st.lists(st.integers(0, 6), min_size=1, max_size=24).map(sorted)
_FLAGS = st.lists(st.booleans(), min_size=1, max_size=9)
_COMPARISONS = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])


def _numbers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    either = st.one_of(inner, _CONSTANTS)
    return st.one_of(
        st.tuples(st.sampled_from(["+", "-", "*"]), inner, either),
        st.tuples(st.sampled_from(["//", "%"]), inner, _DIVISORS),
        st.tuples(st.sampled_from(["//", "%"]), inner, st.tuples(st.just("positive"), inner)),
        st.tuples(st.sampled_from(["min", "max"]), inner, either),
        st.tuples(st.sampled_from(["abs", "negate", "invert", "sign"]), inner),
        st.tuples(st.sampled_from(["&", "|", "^"]), inner, either),
        st.tuples(st.just("where"), st.tuples(_COMPARISONS, inner, either), inner, either),
        st.tuples(st.just("load"), st.one_of(_TABLES, _SORTED), inner),
        st.tuples(st.just("load negative"), _TABLES, inner),
    )


NUMBERS = st.recursive(_INDICES, _numbers, max_leaves=5)


def _truths(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.tuples(st.sampled_from(["&", "|", "^"]), inner, inner),
        st.tuples(st.just("not"), inner),
        st.tuples(st.just("where"), inner, inner, inner),
    )


_PLAIN = st.one_of(
    st.tuples(_COMPARISONS, NUMBERS, st.one_of(NUMBERS, _CONSTANTS)),
    st.tuples(_COMPARISONS, st.tuples(st.just("-"), st.just("q"), st.just("kv")), _CONSTANTS),
    st.tuples(st.just("load"), _FLAGS, NUMBERS),
)
TREES = st.recursive(_PLAIN, _truths, max_leaves=4)


class Mask:
    """A mask_mod from a tree; it runs on proxies and on tensors."""

    __name__ = "random_mask"

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self.tables: dict[tuple[Any, ...], torch.Tensor] = {}

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self._run(self.tree, {"b": b, "h": h, "q": q_idx, "kv": kv_idx})

    def __repr__(self) -> str:
        return f"Mask({self.tree!r})"

    def dense(self, batch: int, heads: int, q_len: int, kv_len: int) -> torch.Tensor:
        """The mask on all positions, bool [B, H, Q, KV], by torch alone."""
        b, h, q, kv = (torch.arange(n) for n in (batch, heads, q_len, kv_len))
        found = self(b[:, None, None, None], h[:, None, None], q[:, None], kv)
        return found.expand(batch, heads, q_len, kv_len)

    def _run(self, tree: Any, at: dict[str, Any]) -> Any:
        if isinstance(tree, int):
            return tree
        if isinstance(tree, str):
            return at[tree]
        name, *operands = tree
        if name.startswith("load"):
            key = (type(operands[0][0]), *operands[0])  # False equals 0
            table = self.tables.setdefault(key, torch.tensor(operands[0]))
            index = self._run(operands[1], at) % (len(table) * (2 if "negative" in name else 1))
            return table[index - len(table) if "negative" in name else index]
        x, *rest = (self._run(o, at) for o in operands)
        return _OPERATIONS[name](x, *rest)


def _limit(function: Any) -> Any:
    def limited(x: Any, y: Any) -> Any:
        return function(x, torch.full_like(x, y) if isinstance(y, int) else y)

    return limited


_OPERATIONS = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "//": lambda x, y: x // y,
    "%": lambda x, y: x % y,
    "positive": lambda x: x.abs() + 1,
    "min": _limit(torch.minimum),
    "max": _limit(torch.maximum),
    "abs": lambda x: x.abs(),
    "negate": lambda x: -x,
    "invert": lambda x: ~x,
    "sign": torch.sign,
    "&": lambda x, y: x & y,
    "|": lambda x, y: x | y,
    "^": lambda x, y: x ^ y,
    "not": lambda x: ~x,
    "where": torch.where,
    "<": lambda x, y: x < y,
    "<=": lambda x, y: x <= y,
    ">": lambda x, y: x > y,
    ">=": lambda x, y: x >= y,
    "==": lambda x, y: x == y,
    "!=": lambda x, y: x != y,
}
MASKS = TREES.map(Mask)
