"""One place for what every test needs: the interpreter, a private cache, seeds, the engines."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass

import pytest
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


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1234)


def pytest_unconfigure() -> None:
    shutil.rmtree(_CACHE_DIR, ignore_errors=True)
