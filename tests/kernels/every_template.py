"""Runs every kernel template on small inputs of awkward lengths, forward and backward, and compares
the results with float64 on the CPU.

A script, for tools that watch a whole process: `scripts/sanitize` runs it. On a GPU nearly all
kernels that it launches are ours; without one the fa2 templates run in Triton's interpreter.

    python tests/kernels/every_template.py                  all that this machine can run
    python tests/kernels/every_template.py hopper softcap   cases with all of these words
    python tests/kernels/every_template.py --share 0/4      every fourth case
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flexmod
from flexmod import masks, mods
from flexmod.errors import BackendError
from flexmod.testing import naive_same_dtype

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton is imported by the first call

BATCH, HEADS, KV_HEADS = 2, 4, 2
LENGTHS = (333, 517) if HAS_CUDA else (20, 37)  # queries and keys: no multiples of a tile
EDGES = (0, LENGTHS[1] // 3, LENGTHS[1] // 2, LENGTHS[1])  # of documents
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}


class Mod(NamedTuple):
    """score: of tables of these shapes. mask: of a device. options: more for the call."""

    score: Callable[..., Any] | None = None
    mask: Callable[[torch.device], Any] | None = lambda device: masks.causal()
    shapes: tuple[tuple[int, ...], ...] = ()
    learns: bool = False
    options: dict[str, Any] = {}


class Lane(NamedTuple):
    engine: str
    dtype: torch.dtype
    head_dim: int


class Case(NamedTuple):
    name: str
    lane: Lane
    mod: Mod


def _documents(device: torch.device) -> Any:
    ids = torch.bucketize(torch.arange(max(LENGTHS)), torch.tensor(EDGES[1:]), right=True)
    return masks.and_masks(masks.causal(), masks.document(ids.to(device)))


_FAR = sum(LENGTHS)
MODS = {
    "plain": Mod(mask=None),
    "causal": Mod(),
    "window": Mod(mask=lambda device: masks.sliding_window(LENGTHS[0] // 3)),
    "documents": Mod(mask=_documents),
    "blind rows": Mod(mask=lambda device: lambda b, h, i, j: (i >= 17) & (j < 9)),
    "alibi": Mod(mods.alibi, shapes=((HEADS,),)),
    "softcap": Mod(lambda: mods.softcap(5.0)),
    "relative bias": Mod(mods.relative_bias, shapes=((HEADS, 15),)),
    "sink": Mod(options={"sink": HEADS}),
    "dropout": Mod(options={"dropout_p": 0.3, "dropout_seed": 5}),
    "deterministic": Mod(
        lambda t: lambda s, b, h, i, j: s + t[j - i + _FAR], shapes=((2 * _FAR,),), learns=True,
        options={"deterministic": True},
    ),
    "learned number": Mod(lambda t: lambda s, b, h, i, j: s * t, shapes=((),), learns=True),
    "learned scale": Mod(mods.head_scale, shapes=((HEADS,),), learns=True),
    "learned row": Mod(
        lambda t: lambda s, b, h, i, j: s + t[h, i], shapes=((HEADS, LENGTHS[0]),), learns=True
    ),
    "learned column": Mod(
        lambda t: lambda s, b, h, i, j: s * t[j], None, shapes=((LENGTHS[1],),), learns=True
    ),
    "learned diagonal": Mod(mods.relative_bias, shapes=((HEADS, 15),), learns=True),
    "learned elements": Mod(
        lambda t: lambda s, b, h, i, j: s + t[i * j % 7], shapes=((7,),), learns=True
    ),
}  # fmt: skip
GPU_LANES = (
    Lane("hopper", torch.bfloat16, 64),
    Lane("hopper", torch.bfloat16, 128),
    Lane("hopper", torch.float16, 40),
    Lane("hopper", torch.bfloat16, 192),
    Lane("hopper", torch.bfloat16, 256),
    Lane("fa2", torch.bfloat16, 192),
    Lane("fa2", torch.bfloat16, 64),
    Lane("fa2", torch.float32, 48),
)
LANES = GPU_LANES if HAS_CUDA else (Lane("fa2", torch.float32, 16),)
CASES = [
    Case(f"{lane.engine} {str(lane.dtype)[6:]} D{lane.head_dim} {name}", lane, mod)
    for name, mod in MODS.items()
    for lane in LANES
]


def relative_errors(case: Case) -> tuple[list[float], list[float]]:
    """Of out, lse and every gradient: ||x - exact|| / ||exact||, and NaN where blind rows differ;
    and how large they may be. Gradients of what is learned are sums in which much cancels: of them
    the naive form in the same dtype may be as far off, and is the measure then.

    Raises:
        BackendError: the engine does not serve the case.
    """
    given = _tensors(case)
    device = torch.device("cuda" if HAS_CUDA else "cpu")
    # One after the other: the reference works on the CPU, and what is watched is the engine.
    found = _run(case, [x.to(device) for x in given], case.lane.engine)
    exact = _run(case, [x.double() for x in given], "reference")
    errors = [_distance(mine, its) for mine, its in zip(found, exact, strict=True)]
    bounds = [TOLERANCE[case.lane.dtype]] * len(errors)
    if case.mod.learns and not case.mod.options:
        theirs = [_distance(x, its) for x, its in zip(_naive(case, given), exact[5:], strict=True)]
        bounds[5:] = [max(bounds[0], 2 * error) for error in theirs]
    return errors, bounds


def _naive(case: Case, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Gradients of what is learned, by autograd of the naive form in the dtype of the case."""
    query, key, value, d_out, d_lse, *tables = (x.detach() for x in tensors)
    score, mask = case.mod.score, case.mod.mask
    assert score is not None
    leaves = [x.requires_grad_() for x in tables]
    masked = mask(query.device) if mask else None
    out, lse, _ = naive_same_dtype(query, key, value, score(*leaves), masked)
    seen = lse.where(torch.isfinite(lse), 0.0)
    return torch.autograd.grad([out, seen], leaves, [d_out, d_lse.to(seen.dtype)])


def _tensors(case: Case) -> list[Tensor]:
    """query, key, value, gradients of out and lse, and tables: on the CPU, the same every time."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator)
    (q_len, kv_len), dim, dtype = LENGTHS, case.lane.head_dim, case.lane.dtype
    query = draw(BATCH, q_len, HEADS, dim).to(dtype).transpose(1, 2)
    key, value = (draw(BATCH, KV_HEADS, kv_len, dim).to(dtype) for _ in "kv")
    d_out, d_lse = draw(BATCH, HEADS, q_len, dim).to(dtype), draw(BATCH, HEADS, q_len)
    tables = [draw(*shape) for shape in case.mod.shapes]
    sink = [draw(n) for n in [case.mod.options.get("sink")] if n]
    return [query, key, value, d_out, d_lse, *tables, *sink]


def _run(case: Case, tensors: Sequence[Tensor], backend: str) -> list[Tensor]:
    query, key, value, d_out, d_lse, *more = (x.detach() for x in tensors)
    mod, options = case.mod, dict(case.mod.options)
    tables, sink = more[: len(mod.shapes)], more[len(mod.shapes) :]
    learned = [*(tables if mod.learns else []), *sink]
    leaves = [x.requires_grad_() for x in (query, key, value, *learned)]
    if sink:
        options["sink"] = sink[0]
    out, lse = flexmod.flex_attention(
        query, key, value,
        mod.score(*tables) if mod.score else None,
        mod.mask(query.device) if mod.mask else None,
        enable_gqa=True, return_lse=True, backend=backend, **options,
    )  # fmt: skip
    seen = lse.where(torch.isfinite(lse), 0.0)
    gradients = torch.autograd.grad([out, seen], leaves, [d_out, d_lse.to(seen.dtype)])
    return [out.detach(), lse.detach(), *gradients]


def _distance(found: Tensor, exact: Tensor) -> float:
    found = found.double().cpu()
    finite = torch.isfinite(exact)
    if not torch.equal(found[~finite], exact[~finite]):
        return float("nan")
    return float((found - exact)[finite].norm() / exact[finite].norm().clamp_min(1e-30))


def chosen(words: Sequence[str], share: str = "0/1") -> list[Case]:
    first, step = (int(part) for part in share.split("/"))
    return [c for c in CASES if all(word in c.name.split() for word in words)][first::step]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("words", nargs="*", help="of the names of cases")
    parser.add_argument("--share", default="0/1", metavar="I/N", help="every N-th case, from I on")
    given = parser.parse_args(arguments)
    results = [_report(case) for case in chosen(given.words, given.share)]
    ok, refused, wrong = (results.count(name) for name in ("ok", "refused", "wrong"))
    print(f"{ok} ok, {refused} refused, {wrong} wrong")
    return 1 if wrong or not chosen(given.words) else 0


def _report(case: Case) -> str:
    try:
        errors, bounds = relative_errors(case)
    except BackendError as error:
        if "cannot serve this call" not in str(error):
            raise
        print(f"refused  {case.name}: {error}", flush=True)
        return "refused"
    is_right = all(error < bound for error, bound in zip(errors, bounds, strict=True))
    result = "ok" if is_right else "wrong"
    print(f"{result:<7}  {case.name}: {' '.join(f'{e:.0e}' for e in errors)}", flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
