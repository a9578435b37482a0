"""The suite `latency`: what a call costs on the host, in microseconds.

Steady calls are issued behind each other without waiting, on tensors so small that a GPU is never
behind. First calls include everything: tracing, rendering, compiling, launching, the result.

    python -m flexmod.bench.latency flexmod cuda    # one first call in this process, for the suite
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from flexmod.bench.attention import reason
from flexmod.bench.case import Case, make_case
from flexmod.bench.peers import Candidate, candidates, flex, ours
from flexmod.bench.rows import Row
from flexmod.bench.setting import Setting
from flexmod.bench.timing import summary, wait

SEQLEN, HEADS, HEAD_DIM = 128, 2, 64
CALLS = 200  # in a round of steady calls
ROWS = (Row("no mod", SEQLEN, "none"), Row("alibi + causal", SEQLEN, score="alibi"))
_FUNCTIONS = (torch.tanh, torch.sigmoid, torch.sin, torch.cos, torch.abs, torch.neg)


def small_case(row: Row, device: torch.device, dtype: torch.dtype) -> Case:
    sizes = {"tokens": SEQLEN, "width": HEADS * HEAD_DIM}
    return make_case(row, "forward", HEAD_DIM, device=device, dtype=dtype, **sizes)


def measure(setting: Setting) -> Iterator[dict[str, Any]]:
    """Steady calls, the first call of a new mod, and the first of a process with warm caches."""
    traced = Candidate(
        "flexmod traced", lambda d: None, lambda *_: True, partial(ours.make, None, traced=True)
    )
    chosen = [setting.candidates[0], traced, *setting.candidates[1:]]
    work: list[tuple[str, Callable[[Candidate], list[float]], list[Candidate]]] = []
    for row in ROWS:
        served = [c for c in chosen if c.serves(row, "forward")]
        work.append((f"{row.name}, a call", partial(_steady, row, setting), served))
    compiled = [c for c in setting.candidates if c.is_ours or "flex" in c.name]
    work.append(("a new mod, first call", partial(_new_mod, setting), compiled))
    work.append(("a new process, first call", partial(_new_process, setting), compiled))
    for done, (name, figures, some) in enumerate(work):
        if setting.budget.is_spent:
            setting.left += [name for name, _, _ in work[done:]]
            return
        yield _record(name, figures, some, setting, done / len(work))


def _record(
    name: str,
    figures: Callable[[Candidate], list[float]],
    some: list[Candidate],
    setting: Setting,
    done: float,
) -> dict[str, Any]:
    found: dict[str, Any] = {"row": name, "us": {}, "spread": {}, "failed": {}}
    for candidate in some:
        setting.progress.show(f"latency {name}: {candidate.name}", done)
        try:
            times = summary(figures(candidate))
        except Exception as error:
            found["failed"][candidate.name] = reason(error)
            continue
        found["us"][candidate.name] = times.median
        found["spread"][candidate.name] = times.spread
    return found


def _steady(row: Row, setting: Setting, candidate: Candidate) -> list[float]:
    attend = candidate.make(small_case(row, setting.device, setting.dtype)).attend
    found = []
    with torch.no_grad():
        for _ in range(10):
            attend()
        for _ in range(max(setting.rounds, 1)):
            wait(setting.device)
            began = time.perf_counter()
            for _ in range(CALLS):
                attend()
            found.append((time.perf_counter() - began) / CALLS * 1e6)
    return found


def _new_mod(setting: Setting, candidate: Candidate) -> list[float]:
    """Mods that no cache has met: each another chain of functions."""
    found = []
    for _ in range(3):
        flex.forget()
        chain = random.SystemRandom().choices(_FUNCTIONS, k=12)

        def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, chain: Any = chain):
            for function in chain:
                score = function(score)
            return score

        case = replace(small_case(ROWS[0], setting.device, setting.dtype), score_mod=score_mod)
        found.append(_first_call(candidate, case))
    return found


def _first_call(candidate: Candidate, case: Case) -> float:
    attend = candidate.make(case).attend
    wait(case.query.device)
    began = time.perf_counter()
    with torch.no_grad():
        attend()
    wait(case.query.device)
    return (time.perf_counter() - began) * 1e6


def _new_process(setting: Setting, candidate: Candidate) -> list[float]:
    """The second of two processes: the first has filled the caches on disk."""
    command = [sys.executable, "-m", "flexmod.bench.latency", candidate.name, str(setting.device)]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=setting.budget.left)
        if done.returncode:
            raise RuntimeError(done.stderr.strip())
    return [float(done.stdout.split()[-1])]


def main(name: str, device_name: str) -> None:
    """One first call in this process; prints its microseconds. Importing is not counted."""
    device = torch.device(device_name)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    engine = name.removeprefix("flexmod").strip()
    (candidate, *_) = [c for c in candidates([engine], "") if c.name == name]
    print(_first_call(candidate, small_case(ROWS[1], device, dtype)))


if __name__ == "__main__":
    main(*sys.argv[1:])
