"""Whom flexmod is measured beside. To add a peer, add a row to PEERS: a small module with `serves`
and `make`, or one of those here with other arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from flexmod.bench.case import Call, Case
from flexmod.bench.peers import flash_cute, flash_infer, flex, ours, sdpa, x_formers
from flexmod.bench.rows import Row


@dataclass(frozen=True)
class Candidate:
    """flexmod or a peer.

    absent: why it cannot run on a device at all, or None. serves: whether it offers a row, forward
    or backward. make: raises whatever it raises; the row then shows the reason.
    """

    name: str
    absent: Callable[[torch.device], str | None]
    serves: Callable[[Row, str], bool]
    make: Callable[[Case], Call]

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("flexmod")


PEERS = (
    *(Candidate(f"SDPA {name}", partial(sdpa.absent, name), partial(sdpa.serves, name),
                partial(sdpa.make, name)) for name in sdpa.BACKENDS),
    Candidate("torch flex", flex.absent, flex.serves, partial(flex.make, None)),
    Candidate("flex FLASH", flex.flash_absent, flex.serves, partial(flex.make, "FLASH")),
    Candidate("flash-attn 4", flash_cute.absent, flash_cute.serves, flash_cute.make),
    Candidate("FlashInfer", flash_infer.absent, flash_infer.serves, flash_infer.make),
    Candidate("xFormers", x_formers.absent, x_formers.serves, x_formers.make),
)  # fmt: skip


def candidates(engines: list[str], wanted: str) -> list[Candidate]:
    """flexmod, once an engine that is forced or once as it chooses; then the peers whose names
    contain one of the comma-separated parts ("": all, "none": none)."""
    parts = [part.strip().lower() for part in wanted.split(",") if part.strip()]
    chosen = [p for p in PEERS if not parts or any(part in p.name.lower() for part in parts)]
    own = [
        Candidate(
            f"flexmod {engine}" if engine else "flexmod",
            lambda device: None,
            lambda row, direction: True,
            partial(ours.make, engine or None),
        )
        for engine in engines or [""]
    ]
    return own + ([] if parts == ["none"] else chosen)
