"""How close is close enough, stated once for every test."""

from __future__ import annotations

import torch
from torch import Tensor

FP64_TOLERANCE = 1e-10
FP32_TOLERANCE = 2e-6  # relative to max |expected|


def assert_matches(
    actual: Tensor, expected_fp64: Tensor, naive_same_dtype: Tensor | None = None
) -> None:
    """Assert that `actual` is as near to the float64 result as its dtype allows.

    float64: within 1e-10. float32: within 2e-6 of max |expected|. bfloat16, float16: the error is
    at most twice that of `naive_same_dtype`, the naive computation rounded to that dtype at each
    step, and never asked to be less than half a unit in the last place of max |expected|. NaN and
    infinities must be at the same places, with the same signs.

    Args:
        actual: any shape, a float dtype.
        expected_fp64: float64, the same shape.
        naive_same_dtype: the yardstick for half precision, the same shape; required there.

    Raises:
        AssertionError: with the largest error, where it is, and the bound.
        ValueError: a half-precision `actual` without a yardstick.

    Example:
        >>> assert_matches(torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64))
    """
    expected = expected_fp64.detach().double().cpu()
    got = actual.detach().double().cpu()
    shapes = tuple(got.shape), tuple(expected.shape)
    assert shapes[0] == shapes[1], f"shape {shapes[0]}, expected {shapes[1]}"
    finite = torch.isfinite(expected)
    _assert_same_specials(got, expected, finite)
    if not finite.any():
        return
    bound = _bound(actual.dtype, expected, finite, naive_same_dtype)
    error = torch.where(finite, (got - expected).abs(), 0.0)
    worst = float(error.max())
    if worst > bound:
        at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
        raise AssertionError(
            f"{actual.dtype}: error {worst:.3e} at {at} is above {bound:.3e}; "
            f"got {float(got[at])!r}, expected {float(expected[at])!r}; "
            f"{int((error > bound).sum())} of {error.numel()} differ"
        )


def _assert_same_specials(got: Tensor, expected: Tensor, finite: Tensor) -> None:
    alike = torch.where(finite, torch.isfinite(got), got == expected)
    alike |= torch.isnan(expected) & torch.isnan(got)
    if not alike.all():
        at = tuple(int(i) for i in (~alike).nonzero()[0])
        raise AssertionError(
            f"got {float(got[at])!r}, expected {float(expected[at])!r} at {at}; "
            f"{int((~alike).sum())} of {got.numel()} differ in being finite"
        )


def _bound(dtype: torch.dtype, expected: Tensor, finite: Tensor, yardstick: Tensor | None) -> float:
    largest = float(expected[finite].abs().max())
    if dtype == torch.float64:
        return FP64_TOLERANCE * max(1.0, largest)
    if dtype == torch.float32:
        return FP32_TOLERANCE * max(largest, torch.finfo(dtype).tiny)
    if yardstick is None:
        raise ValueError(f"assert_matches needs naive_same_dtype to judge {dtype}")
    theirs = (yardstick.detach().double().cpu() - expected)[finite].abs()
    return max(2 * float(theirs.max()), torch.finfo(dtype).eps / 2 * largest)
