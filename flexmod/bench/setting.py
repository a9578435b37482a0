"""What a run of the benchmarks is asked to do."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass, field
from datetime import date

import torch

from flexmod import __version__
from flexmod.bench.peers import Candidate
from flexmod.bench.timing import Budget
from flexmod.progress import Progress

_PACKAGES = {
    "triton": "triton", "flash_attn_4": "flash-attn-4", "flashinfer": "flashinfer-python",
    "xformers": "xformers",
}  # fmt: skip


@dataclass
class Setting:
    """Sizes, candidates and limits. `absent`: peers that cannot run here, and why. `left` collects
    what there was no time for."""

    device: torch.device
    dtype: torch.dtype
    tokens: int  # batch x seqlen
    width: int  # heads x head_dim
    rounds: int  # 0: every candidate is called once, which builds its kernels
    rows: str
    head_dims: list[int]
    candidates: list[Candidate]
    budget: Budget
    absent: dict[str, str] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    left: list[str] = field(default_factory=list)


def environment(device: torch.device) -> dict[str, str]:
    """What a result depends on beside the code."""
    found = {
        "device": device_name(device),
        "flexmod": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }
    if device.type == "cuda" and torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    if device.type == "cpu":
        found["threads"] = str(torch.get_num_threads())
    for name, package in _PACKAGES.items():
        try:
            found[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def slug(device: torch.device) -> str:
    """Of a device, for names of files: "h200", "cpu"."""
    if device.type != "cuda":
        return device.type
    words = device_name(device).lower().split()
    return "_".join(word for word in words if word not in ("nvidia", "amd", "instinct"))
