"""One place for what every test needs: the interpreter, a private cache, seeds, the engines."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores; before torch is imported
    os.environ["OMP_NUM_THREADS"] = "1"
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Triton decides when it is imported, so this line has to run before anything imports it.
    os.environ["TRITON_INTERPRET"] = "1"

_CACHE_DIR = tempfile.mkdtemp(prefix="flexmod-tests-")
os.environ["FLEXMOD_CACHE_DIR"] = _CACHE_DIR

ENGINES = ("reference", "cpu", "fa2")
_NUMBERS = (
    ("reference", torch.float64),
    ("reference", torch.float32),
    ("cpu", torch.float64),
    ("cpu", torch.float32),
    ("fa2", torch.float32),
)
_HALVES = tuple((engine, dtype) for engine in ENGINES for dtype in (torch.bfloat16, torch.float16))


@dataclass(frozen=True)
class Lane:
    """An engine with the dtype and the device that a test uses it on."""

    backend: str
    dtype: torch.dtype
    device: torch.device

    def randn(self, *shape: int) -> torch.Tensor:
        # Drawn in float64 on the CPU, so that all lanes see the same numbers.
        return torch.randn(shape, dtype=torch.float64).to(self.device, self.dtype)

    def qkv(
        self, q_shape: tuple[int, ...], kv_shape: tuple[int, ...] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        kv_shape = kv_shape or q_shape
        return self.randn(*q_shape), self.randn(*kv_shape), self.randn(*kv_shape)

    def tensor(self, data: object, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype, device=self.device)

    def floats(self, data: object) -> torch.Tensor:
        # Captured floats: the working precision of the lane, fp32 for half inputs.
        work = torch.float64 if self.dtype == torch.float64 else torch.float32
        return self.tensor(data, work)


def _lane(engine: str, dtype: torch.dtype) -> Lane:
    on_gpu = HAS_CUDA and engine == "fa2"
    return Lane(engine, dtype, torch.device("cuda" if on_gpu else "cpu"))


def _label(pair: tuple[str, torch.dtype]) -> str:
    return f"{pair[0]}-{str(pair[1]).removeprefix('torch.')}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--refresh-golden", action="store_true", help="write tests/golden anew from this checkout"
    )


@pytest.fixture(params=_NUMBERS, ids=_label)
def lane(request: pytest.FixtureRequest) -> Lane:
    """Every engine in the dtypes whose tolerance is a number."""
    return _lane(*request.param)


@pytest.fixture(params=_HALVES, ids=_label)
def half_lane(request: pytest.FixtureRequest) -> Lane:
    """Every engine in bfloat16 and float16."""
    return _lane(*request.param)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Lane:
    """Every engine once, in float32, for tests of behaviour."""
    return _lane(request.param, torch.float32)


@pytest.fixture
def lanes() -> Callable[[str, torch.dtype], Lane]:
    """`lanes(engine, dtype)`: one lane, for tests with parameters of their own."""
    return _lane


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1234)


def pytest_unconfigure() -> None:
    shutil.rmtree(_CACHE_DIR, ignore_errors=True)


@pytest.fixture
def check_gradients() -> Callable[..., dict[str, torch.Tensor]]:
    """Out, lse and every gradient of a call equal those of the naive form by torch's autograd."""
    return _check_gradients


# Relative to the largest entry of what is expected.
_GRADIENT_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


def _check_gradients(
    lane: Lane,
    tensors: Sequence[torch.Tensor],
    make: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    *,
    block_mask: Any = None,
    with_lse: bool = True,
    **arguments: Any,
) -> dict[str, torch.Tensor]:
    """`tensors`: query, key, value, and what `make(*learned)` makes a score_mod of.

    `block_mask` stands in for `mask_mod` where it is given. Returns the gradients by position.
    """
    import flexmod
    from flexmod.testing import naive

    tensors = [x.detach() for x in tensors]
    exact = [x.double().requires_grad_() for x in tensors]
    score_mod = make(*exact[3:]) if make else None
    scale = arguments.get("scale")
    expected = naive(*exact[:3], score_mod, mask_mod, scale)[:2]
    leaves = [x.clone().requires_grad_() for x in tensors]
    actual = flexmod.flex_attention(
        *leaves[:3],
        make(*leaves[3:]) if make else None,
        mask_mod if block_mask is None else block_mask,
        enable_gqa=tensors[0].shape[1] != tensors[1].shape[1],
        return_lse=True,
        backend=lane.backend,
        **arguments,
    )
    generator = torch.Generator().manual_seed(7)
    seeds = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in expected]
    if not with_lse:
        seeds[1] = torch.zeros_like(seeds[1])
    seeds[1] = seeds[1].where(torch.isfinite(expected[1].cpu()), 0.0)
    found = [
        torch.autograd.grad(
            results,
            inputs,
            [s.to(r.device, r.dtype) for s, r in zip(seeds, results, strict=True)],
            allow_unused=True,
            materialize_grads=True,
        )
        for results, inputs in ((actual, leaves), (expected, exact))
    ]
    names = ["query", "key", "value", *(f"learned {n}" for n in range(len(tensors) - 3))]
    pairs = {"out": (actual[0], expected[0]), "lse": (actual[1], expected[1])}
    for name, got, wanted in zip(names, *found, strict=True):
        assert got.dtype == tensors[names.index(name)].dtype
        pairs[f"gradient of {name}"] = got, wanted
    for name, (got, wanted) in pairs.items():
        _assert_near(name, got, wanted, _GRADIENT_TOLERANCE[lane.dtype])
    return dict(zip(names, found[0], strict=True))


def _assert_near(name: str, got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    got, wanted = got.detach().double().cpu(), wanted.detach().double().cpu()
    assert got.shape == wanted.shape, name
    finite = torch.isfinite(wanted)
    assert torch.equal(got[~finite], wanted[~finite]), name
    if not finite.any():
        return
    error = (got - wanted)[finite].abs().max()
    largest = max(float(wanted[finite].abs().max()), 0.1)
    assert error <= tolerance * largest, f"{name}: error {error:.2e}, largest {largest:.2e}"
