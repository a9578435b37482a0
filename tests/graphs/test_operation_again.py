"""A call as one operation, again: what its shape decides is kept, and nothing else is.

On the fa2 engine, in Triton's interpreter, as the cpu engine keeps nothing.
"""

from __future__ import annotations

import pytest
import torch

import flexmod
from flexmod import library, masks, memo

pytest.importorskip("triton")

LENGTH = 24
CAUSAL = flexmod.create_block_mask(masks.causal(), None, None, LENGTH, LENGTH, device="cpu")


@pytest.fixture
def made(monkeypatch):
    """A list that grows by one for each forward or backward that is worked out."""
    memo.forget()
    seen, plain = [], library.Prepared
    monkeypatch.setattr(library, "Prepared", lambda *a: seen.append(a) or plain(*a))
    return seen


def number(value, learns=False):
    return torch.tensor(value, requires_grad=learns)


def table(seed, learns=True):
    drawn = torch.randn(2 * LENGTH, generator=torch.Generator().manual_seed(seed))
    return drawn.requires_grad_(learns)


def bias(t):
    return lambda score, b, h, i, j: score + t[i - j + LENGTH]


def times(t):
    return lambda score, b, h, i, j: score * t


def documents(count):
    mask_mod = masks.document(torch.arange(LENGTH) * count // LENGTH)
    return flexmod.create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device="cpu")


def results(given, wanted, **options):
    out = flexmod.flex_attention(*given, **options)
    return [out, *torch.autograd.grad(out.square().sum(), wanted)]


# Name -> calls (score mod and its tensor, mask, options), and how many passes are worked out.
SEQUENCES = {
    "other values": ([(bias, table(n), CAUSAL, {}) for n in range(3)], 2),
    "learned or not": ([(bias, table(0, n % 2 == 0), CAUSAL, {}) for n in range(4)], 4),
    "numbers": ([(times, number(n), None, {}) for n in (2.0, 3.0, 2.0)], 4),
    "learned numbers": ([(times, number(n, True), None, {}) for n in (2.0, 3.0)], 3),
    "other maps": ([(bias, table(0), documents(n), {}) for n in (2, 5)], 2),
    "seeds": (
        [(bias, table(0), None, {"dropout_p": 0.4, "dropout_seed": n}) for n in (1, 2, 1)], 2
    ),
    "sinks": ([(bias, table(0), CAUSAL, {"sink": torch.full([2], n)}) for n in (0.5, -1.0)], 2),
    "scales": ([(bias, table(0), CAUSAL, {"scale": n}) for n in (0.5, 0.3)], 4),
}  # fmt: skip


@pytest.mark.parametrize("name", SEQUENCES)
def test_again(name, made, watching):
    calls, count = SEQUENCES[name]
    for seed, (make, captured, mask, options) in enumerate(calls):
        torch.manual_seed(seed)
        leaves = [torch.randn(1, 2, LENGTH, 16).requires_grad_() for _ in range(3)]
        wanted = [*leaves, *([captured] if captured.requires_grad else [])]

        given = (*leaves, make(captured), mask)
        with watching():
            found = results(given, wanted, backend="fa2", **options)
        exact = results(given, wanted, backend="cpu", **options)
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
    assert len(made) == count
