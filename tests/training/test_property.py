"""Random mods from a small grammar, random masks and shapes: all gradients equal the oracle's.

The oracle runs the mod as written, under vmap in float64; it shares no code with the tracer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from flexmod import masks

LENGTH = 12  # the longest sequence; tables are as long
SHAPES = {  # learned tables of a mod, by the name that its text uses
    "scalar": (),
    "head": (4,),
    "plane": (2, 4),
    "row": (LENGTH,),
    "column": (LENGTH,),
    "diagonal": (2 * LENGTH - 1,),
    "both": (LENGTH, LENGTH),
}
LEAVES = st.sampled_from([
    "s", "s", "0.7", "-1.25", "2", "(i - j)", "(h + 1)", "(b - 1)", "i / 8", "j / 8",
    "scalar", "head[h]", "plane[b, h]", "row[i]", "column[j]", "row[-1 - i]", "both[i, j]",
    f"diagonal[j - i + {LENGTH - 1}]", "column[picked[j]]", "head[(i + j) % 4]", "row[3]",
])  # fmt: skip
UNARY = ["tanh", "sigmoid", "sin", "cos", "erf", "abs", "neg", "square"]
BOUNDED = ["exp", "exp2", "expm1"]  # of a tanh, so that nothing grows without end
POSITIVE = ["sqrt", "log", "log1p", "rsqrt", "log2"]  # of a square plus a number


def grown(inner):
    return st.one_of(
        st.tuples(st.sampled_from(UNARY), inner).map(lambda p: f"torch.{p[0]}(i * 0.0 + {p[1]})"),
        st.tuples(st.sampled_from(BOUNDED), inner).map(
            lambda p: f"torch.{p[0]}(torch.tanh(i * 0.0 + {p[1]}))"
        ),
        st.tuples(st.sampled_from(POSITIVE), inner).map(
            lambda p: f"torch.{p[0]}(torch.tanh(i * 0.0 + {p[1]}) ** 2 + 0.5)"
        ),
        st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda p: f"({p[0]} {p[1]} {p[2]})"),
        st.tuples(inner, inner).map(lambda p: f"({p[0]} / (torch.tanh(i * 0.0 + {p[1]}) + 2.0))"),
        st.tuples(st.sampled_from(["minimum", "maximum"]), inner, inner).map(
            lambda p: f"torch.{p[0]}(s * 0.5 + {p[1]}, s * i * 0.0 + {p[2]})"
        ),
        st.tuples(st.sampled_from(["i > j", "h % 2 == 0", "s > 0.1", "(i - j) % 3 == 1"]),
                  inner, inner).map(
            lambda p: f"torch.where({p[0]}, s * i * 0.0 + {p[1]}, s * i * 0.0 + {p[2]})"
        ),
    )  # fmt: skip


EXPRESSIONS = st.recursive(LEAVES, grown, max_leaves=6)
MASKS = st.sampled_from([
    "None", "masks.causal()", "masks.sliding_window(3)", "lambda b, h, i, j: (i + j) % 3 != 0",
    "lambda b, h, i, j: (i < 4) & (j < 5)", "lambda b, h, i, j: (i >= j) | (h == 1)",
    "masks.padding(torch.tensor([5, 2]))",
    "masks.and_masks(masks.causal(), masks.document(masks.document_ids([5, 3, 4])))",
])  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A call as text and numbers, so that a failing example reads well."""

    mod: str
    mask: str
    heads: int
    kv_heads: int
    batch: int
    kv_batch: int
    q_len: int
    kv_len: int
    dims: tuple[int, int]
    scale: float | None

    @property
    def learned(self) -> list[str]:
        return [name for name in SHAPES if name in self.mod]

    def make(self, *tables: torch.Tensor):
        """The score_mod on these tables: kept near the score, and of a bounded slope."""
        names = dict(zip(self.learned, tables, strict=True))
        scope = {"torch": torch, "picked": torch.arange(LENGTH) // 3, **names}
        return eval(f"lambda s, b, h, i, j: s * 0.5 + torch.tanh(i * 0.0 + {self.mod})", scope)


CALLS = st.builds(
    Call,
    mod=EXPRESSIONS,
    mask=MASKS,
    heads=st.just(4),
    kv_heads=st.sampled_from([1, 2, 4]),
    batch=st.just(2),
    kv_batch=st.sampled_from([1, 2]),
    q_len=st.integers(1, LENGTH),
    kv_len=st.integers(1, LENGTH),
    dims=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    scale=st.sampled_from([None, 0.3, 1.5]),
)


def compare(lane, check_gradients, call, **arguments):
    torch.manual_seed(0)
    query, key, value = (
        lane.randn(call.batch, call.heads, call.q_len, call.dims[0]),
        lane.randn(call.kv_batch, call.kv_heads, call.kv_len, call.dims[0]),
        lane.randn(call.kv_batch, call.kv_heads, call.kv_len, call.dims[1]),
    )
    learned = [lane.randn(*SHAPES[name]) for name in call.learned]
    mask = eval(call.mask, {"masks": masks, "torch": torch})
    check_gradients(
        lane, [query, key, value, *learned], call.make, mask, scale=call.scale, **arguments
    )


QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
several = settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=QUIET, database=None
)
# A failing example is not made smaller: each takes seconds.
few = settings(several, max_examples=8, phases=[Phase.generate])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@several
@given(call=CALLS)
def test_random_mods_on_cpu(lanes, check_gradients, dtype, call):
    compare(lanes("cpu", dtype), check_gradients, call)


@settings(several, max_examples=40)
@given(call=CALLS)
def test_random_mods_on_the_reference(lanes, check_gradients, call):
    compare(lanes("reference", torch.float64), check_gradients, call)


@few
@given(call=CALLS)
def test_random_mods_on_triton(lanes, check_gradients, call):
    tiles = {"BLOCK_M": 16, "BLOCK_N": 16}
    # The interpreter's time goes by programs.
    call = replace(call, heads=2, kv_heads=min(call.kv_heads, 2), batch=1, kv_batch=1)
    compare(lanes("fa2", torch.float32), check_gradients, call, kernel_options=tiles)
