"""What the tests with other packages share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def on_a_gpu() -> Iterator[None]:
    """Whatever the test makes is on a GPU, if there is one."""
    if torch.cuda.is_available():
        with torch.device("cuda"):
            yield
    else:
        yield
