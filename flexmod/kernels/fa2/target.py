"""What the fa2 kernels can run on."""

from __future__ import annotations

import os
from functools import cache

import torch

from flexmod.kernels.tuning import Target

INTERPRETER = Target("interpreter", 1 << 30)


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def target(device: torch.device) -> Target | str:
    """The architecture of a device and its shared memory, or why it cannot be used."""
    try:
        import triton  # noqa: F401  (only whether it is there)
    except ImportError:
        return "Triton is not installed"
    if interpreted():
        return INTERPRETER
    if device.type != "cuda":
        return "it needs a GPU (on CPU: set TRITON_INTERPRET=1 before Triton is imported)"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Target(properties.gcnArchName.split(":")[0], 64 << 10)
    if properties.major < 8:
        found = f"{properties.major}.{properties.minor}"
        return f"it needs compute capability 8.0, this GPU has {found}"
    arch = f"sm_{properties.major}{properties.minor}"
    limit = getattr(properties, "shared_memory_per_block_optin", 48 << 10)
    return Target(arch, limit)
