"""What the graph tests share: a function and its compiled form give the same, gradients too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Grads = Sequence[torch.Tensor]


@pytest.fixture
def qkv() -> list[torch.Tensor]:
    """query, key and value that learn: 2 heads of 24 tokens."""
    return [torch.randn(1, 2, 24, 8).requires_grad_() for _ in range(3)]


class Watch(TorchDispatchMode):
    """Calls under it are operations, and it lists them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def watching() -> type[Watch]:
    """`with watching() as watch:`, then `watch.calls`."""
    return Watch


@pytest.fixture
def agrees() -> Callable[..., int]:
    """`agrees(function, *calls)`: eager and `fullgraph=True` agree; how often it was compiled."""
    return _agrees


@pytest.fixture
def differentiated() -> Callable[..., tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """`differentiated(function, arguments, learned)`: results, and gradients of their squares."""
    return _differentiated


def _agrees(
    function: Callable[..., Any], *calls: tuple[Any, ...], learned: Grads = (),
    backend: str = "aot_eager",
) -> int:  # fmt: skip
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, fullgraph=True, backend=counter)  # a graph break raises
    for arguments in calls:
        tensors = [x for x in tree_leaves(arguments) if isinstance(x, torch.Tensor)]
        wanted = [*learned, *(x for x in tensors if x.requires_grad)]
        eager, graph = (_differentiated(f, arguments, wanted) for f in (function, compiled))
        for a, b in zip(graph[0] + graph[1], eager[0] + eager[1], strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert [x.stride() for x in graph[0]] == [x.stride() for x in eager[0]]
    return counter.frame_count


def _differentiated(
    function: Callable[..., Any], arguments: Sequence[Any], learned: Grads
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    results = tree_leaves(function(*arguments))
    smooth = [x for x in results if x.requires_grad]
    if not smooth:
        return results, []
    total = sum((x.float().square().sum() for x in smooth), torch.zeros(()))
    grads = torch.autograd.grad(total, learned, allow_unused=True, materialize_grads=True)
    return results, list(grads)
