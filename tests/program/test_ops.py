"""Every operation, in each of torch's spellings, means what torch means by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flexmod.program.bounds import bounds
from flexmod.program.evaluate import evaluate
from flexmod.program.intervals import Interval
from flexmod.program.ops import CONVERSIONS, TABLE
from flexmod.program.proxy import FUNCTIONS
from flexmod.program.specialize import specialize

# Of more than one entry, so covered by test_trace.py.
_VECTORS = """sum prod any all unsqueeze mean amax amin dot inner vdot matmul __matmul__ __rmatmul__
take gather index_select embedding""".split()
_ALIASES = ["log_sigmoid", "__rdiv__"]  # what torch calls F.logsigmoid and 1 / x inside
_SAME = "contiguous cpu cuda view_as squeeze reshape view".split()
# Made by `specialize`, or of whole vectors.
_UNSPELLED = ("amax", "amin", "floordiv_natural", "mod_natural")


def spellings(name: str) -> list[Callable[..., Any]]:
    """The function of torch and the method, as far as there are any."""
    if name.startswith("__"):
        return [lambda x, *rest, **options: getattr(x, name)(*rest, **options)]
    place, _, base = name.rpartition(".")
    if place:
        home = torch.nn.functional if place == "F" else torch.special
        return [getattr(home, base)]
    found = [getattr(torch, name)] if hasattr(torch, name) else []
    if hasattr(torch.Tensor, name):
        found.append(lambda x, *rest, **options: getattr(x, name)(*rest, **options))
    return found


def usable(case, function, arguments):
    """Whether torch itself takes this call; then its answer."""
    try:
        return function(*arguments, **case.options)
    except (TypeError, RuntimeError, AttributeError):
        return None


def tolerance(dtype):
    return {"rtol": 4e-6 if dtype == torch.float32 else 1e-13, "atol": 0.0}


def compare(actual, expected, arguments):
    assert actual.dtype == expected.dtype
    if not expected.is_floating_point():
        assert torch.equal(actual.expand(expected.shape), expected)
        return
    # Near a zero crossing a sum of parts can only be as exact as its parts.
    tensors = [a.double() for a in arguments if isinstance(a, torch.Tensor)]
    scale = torch.stack([a.abs().nan_to_num(0, 0, 0) for a in tensors]).amax(0).clamp(max=1.0)
    eps = torch.finfo(expected.dtype).eps
    exact = torch.isclose(
        actual.expand(expected.shape), expected, equal_nan=True, **tolerance(expected.dtype)
    )
    near = (actual.double() - expected.double()).abs() <= 8 * eps * scale
    wrong = ~(exact | near)
    if wrong.any():
        at = int(wrong.nonzero()[0])
        given = [a[at].item() if isinstance(a, torch.Tensor) else a for a in arguments]
        got, want = actual.expand(expected.shape)[at], expected[at]
        pytest.fail(f"{given} -> {got.item()!r}, torch {want.item()!r}; {int(wrong.sum())} differ")


def test_values_and_dtypes_are_torchs(real_case, real, operands_of, recorded):
    arguments = operands_of(real_case, real)
    tried = 0
    for spelling in spellings(real_case.name):
        expected = usable(real_case, spelling, arguments)
        if expected is None:
            continue
        tried += 1
        program = recorded(lambda *a, f=spelling: f(*a, **real_case.options), *arguments)
        extents = {"q_idx": len(expected)}
        index = {"q_idx": torch.arange(len(expected))}
        compare(evaluate(program, index).values[0], expected, arguments)
        narrow = evaluate(specialize(program, extents), index).values[0]
        compare(narrow.to(expected.dtype), expected, arguments)
    assert tried, "torch takes none of the spellings: the table is wrong"


def test_bounds_hold(real_case, real, operands_of, recorded):
    """The value of any operands inside their intervals lies inside the result's interval."""
    arguments = operands_of(real_case, real)
    spelling = next(
        f for f in spellings(real_case.name) if usable(real_case, f, arguments) is not None
    )
    run = lambda *a: spelling(*a, **real_case.options)
    program = recorded(run, *arguments)
    others = [a[torch.randperm(len(a))] if isinstance(a, torch.Tensor) else a for a in arguments]
    ends: dict[int, Interval] = {}
    inside: list[list[Any]] = [[] for _ in range(4)]
    for letter, first, second in zip(real_case.operands, arguments, others, strict=True):
        if not isinstance(first, torch.Tensor):
            for sample in inside:
                sample.append(first)
            continue
        low, high, samples = between(first, second)
        if letter == "j":  # an interval around 0 may hold anything but 0
            samples = [torch.where(x == 0, torch.where(high > 0, 1, -1), x) for x in samples]
        slots = (n for n, c in enumerate(program.captures) if c.data_ptr() == first.data_ptr())
        ends |= {slot: Interval(low, high) for slot in slots}
        for sample, value in zip(inside, samples, strict=True):
            sample.append(value)
    result = bounds(program, {}, lambda line, _: ends[line.attr.slot])[program.outputs[0]]
    for sample in inside:
        value = run(*sample)
        value = value.double() if value.is_floating_point() else value.long()
        low, high = (e.expand(value.shape) for e in result)
        held = (low <= value) & (value <= high) | torch.isnan(low) | torch.isnan(high)
        if not held.all():
            at = int((~held).nonzero()[0])
            given = [x[at].item() if isinstance(x, torch.Tensor) else x for x in sample]
            ends_at = [(e.lo[at].item(), e.hi[at].item()) for e in ends.values()]
            pytest.fail(f"{given} in {ends_at} -> {value[at]}, not in {low[at]}, {high[at]}")


def between(first, second):
    """Ends of intervals, and four samples of each: the ends and two values between them."""
    if first.dtype == torch.bool:
        low, high = first & second, first | second
        return low.long(), high.long(), [low, high, high, low]
    both = first.isnan() | second.isnan() if first.is_floating_point() else first != first
    low, high = torch.minimum(first, second), torch.maximum(first, second)
    if not first.is_floating_point():
        part = (torch.rand(len(low)) * (high - low + 1)).long()
        return low, high, [low, high, low + part, torch.minimum(low + part // 2, high)]
    # A value that may be anything has NaN ends, as `settle` makes them.
    lost = both | (low.abs() > 3e38) | (high.abs() > 3e38)
    middle = low * 0.25 + high * 0.75
    samples = [low, high, torch.where(lost, first, middle), torch.where(lost, second, low)]
    nan = torch.full_like(low, float("nan"))
    return torch.where(lost, nan, low).double(), torch.where(lost, nan, high).double(), samples


def test_bounds_of_single_integers_are_exact(integer_case, operands_of, recorded):
    arguments = operands_of(integer_case, torch.float32)
    spelling = spellings(integer_case.name)[0]
    expected = spelling(*arguments, **integer_case.options)
    program = recorded(lambda *a: spelling(*a, **integer_case.options), *arguments)
    ends = [Interval(c.long(), c.long()) for c in program.captures]
    result = bounds(program, {}, lambda line, _: ends[line.attr.slot])[program.outputs[0]]
    assert torch.equal(result.lo.expand(expected.shape), expected.long())
    assert torch.equal(result.hi.expand(expected.shape), expected.long())


DTYPES = {
    "float": torch.float32, "double": torch.float64, "int": torch.int32, "long": torch.int64,
    "short": torch.int16, "char": torch.int8, "byte": torch.uint8, "bool": torch.bool,
    "half": torch.float16, "bfloat16": torch.bfloat16,
}  # fmt: skip
CASTS = {
    "method": lambda x, name, dtype: getattr(x, name)(),
    "to": lambda x, name, dtype: x.to(dtype),
    "to by name": lambda x, name, dtype: x.to(dtype=dtype),
    "type": lambda x, name, dtype: x.type(dtype),
    "type_as": lambda x, name, dtype: x.type_as(torch.zeros(3, dtype=dtype)),
    "to other": lambda x, name, dtype: x.to(torch.zeros(3, dtype=dtype)),
    "to a device": lambda x, name, dtype: x.to("cpu").to("cpu", dtype),
}


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("spelling", CASTS)
@pytest.mark.parametrize("letter", "wut")
def test_casts(name, spelling, letter, operands_of, op_cases, recorded):
    dtype = DTYPES[name]
    source = operands_of(type(op_cases[0])(name, letter), torch.float32)[0]
    if letter == "w" and dtype == torch.uint8:
        source = source.abs()
    cast = lambda x: CASTS[spelling](x, name, dtype)
    program = recorded(cast, source)
    value = evaluate(program, {"q_idx": torch.arange(len(source))}).values[0]
    half = dtype in (torch.float16, torch.bfloat16)
    assert value.dtype == (torch.float32 if half else dtype)  # half values are kept in float32
    assert torch.equal(value, cast(source).to(value.dtype))


def test_every_row_and_every_name_is_covered(op_cases, operands_of, recorded):
    names = {case.name.rpartition(".")[2] for case in op_cases}
    casts = [*DTYPES, "to", "type", "type_as"]
    constants = "new_full full_like new_zeros zeros_like new_ones ones_like new_tensor".split()
    known = {*names, *_VECTORS, *_SAME, *_ALIASES, *casts, *constants}
    assert sorted(set(FUNCTIONS) - known) == []
    used = set()
    for case in op_cases:
        arguments = operands_of(case, torch.float32)
        for spelling in spellings(case.name):
            if usable(case, spelling, arguments) is not None:
                program = recorded(lambda *a, f=spelling, c=case: f(*a, **c.options), *arguments)
                used |= {line.op for line in program.instructions}
    assert sorted(set(TABLE) - used) == sorted(_UNSPELLED)
    assert not set(CONVERSIONS) & set(TABLE)
