"""What the bench tests share: tiny runs on the CPU, and tiny cases."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest
import torch

from flexmod.__main__ import main
from flexmod.bench import command
from flexmod.bench.case import Case, make_case

TINY = ("--device=cpu", "--tokens=128", "--width=64", "--rounds=2", "--head-dim=64")


@pytest.fixture
def bench() -> Callable[..., int]:
    """`bench(*arguments)`: a run of 128 tokens and two rounds; its exit code."""
    return lambda *arguments: main(["bench", *TINY, *arguments])


@pytest.fixture
def parse() -> Callable[..., argparse.Namespace]:
    """`parse(*arguments)`: the options, and nothing is run."""

    def options(*given: str) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        return parser.parse_args(given)

    return options


@pytest.fixture
def small_case() -> Callable[..., Case]:
    """`small_case(row, direction="forward")`: two heads of 16 in float32."""
    sizes = {"tokens": 128, "width": 32, "device": torch.device("cpu"), "dtype": torch.float32}
    return lambda row, direction="forward": make_case(row, direction, 16, **sizes)
