"""`torch.ops.flexmod.attention`: a call as one operation, for whatever watches operations.

torch.compile, torch.export, selective checkpointing and meta tensors see this operation and its
backward; ordinary eager calls go around it. Everything that is not a tensor or the scale is text,
so that a graph holds all that it needs, and two graphs with equal text do the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flexmod import autograd
from flexmod.blocks import BlockMask
from flexmod.blocks.runs import Runs
from flexmod.kernels import choose
from flexmod.kernels.problem import Inputs, Problem, Result, stride_order
from flexmod.program import Program, text
from flexmod.program.transforms import as_tensor, has_tangent, is_recorded, is_wrapped

_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? sink, Tensor[] captures, "
    "Tensor[] mask_captures, Tensor[] runs, Tensor? scale, Tensor? seed, str spec"
)
_library = torch.library.Library("flexmod", "DEF")
_library.define(f"attention({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)")
_library.define(
    "attention_backward(Tensor? d_out, Tensor? d_lse, Tensor out, Tensor lse, bool[] needed, "
    f"{_ARGUMENTS}) -> Tensor[]"
)
MakeProblem = Callable[..., Problem]


def watches(tensors: Sequence[Tensor]) -> bool:
    """Whether something must see the call as one operation of torch."""
    if any(is_wrapped(x) or has_tangent(x) for x in tensors):
        return False  # torch.func sees through the reference engine instead
    return any(is_recorded(x) for x in tensors)


def attend(
    inputs: Inputs,
    score: Program | None,
    mask: BlockMask | Program | None,
    scale: float,
    *,
    block_size: tuple[int, int],
    sink: Tensor | None,
    seed: Tensor | None,
    **settings: Any,
) -> Result:
    """The operation. A mask that is a Program is decided when it runs, in blocks of `block_size`.

    `settings` are plain values: options, dropout_p, deterministic, backend.
    """
    runs = [mask.runs.spans, mask.runs.table] if isinstance(mask, BlockMask) else []
    block = mask.block_size if isinstance(mask, BlockMask) else block_size
    masked = mask.program if isinstance(mask, BlockMask) else mask
    spec = {"score": _text(score), "mask": _text(masked), "block": block, "scale": scale}
    dynamic = None
    if isinstance(scale, torch.SymFloat):
        spec["scale"], dynamic = None, as_tensor(scale, torch.float64)
    captures, mask_captures = (list(p.captures) if p else [] for p in (score, masked))
    arguments = (*inputs, sink, captures, mask_captures, runs, dynamic, seed)
    return Result(*torch.ops.flexmod.attention(*arguments, json.dumps({**spec, **settings})))


def _text(program: Program | None) -> list[Any] | None:
    if program is None:
        return None
    sites = {position: str(site) for position, site in program.sites.items()}
    return [text.structure(program), program.name, program.numbers, sites]


@lru_cache(maxsize=512)
def _read(spec: str, captured: int, mask_captured: int) -> tuple[Program | None, ...]:
    """Score and mask of a spec, with placeholders for captured tensors; and the other settings."""
    settings = json.loads(spec)
    programs = []
    for name, count in (("score", captured), ("mask", mask_captured)):
        saved = settings.pop(name)
        if saved is not None:
            structure, label, numbers, sites = saved
            places = {int(n): site for n, site in sites.items()}
            saved = text.restored(structure, label, numbers, [torch.empty(0)] * count, places)
        programs.append(saved)
    return (*programs, settings)


def implement(make_problem: MakeProblem) -> None:
    """Register what the two operations do."""

    def prepared(
        query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, captures: list[Tensor],
        mask_captures: list[Tensor], runs: list[Tensor], scale: Tensor | None,
        seed: Tensor | None, spec: str, learned: Sequence[int] = (),
    ) -> tuple[Problem, choose.Choice, Program | None]:  # fmt: skip
        score, masked, settings = _read(spec, len(captures), len(mask_captures))
        settings = dict(settings)
        block, backend = tuple(settings.pop("block")), settings.pop("backend")
        fixed = settings.pop("scale")
        if score is not None:
            score = text.with_captures(score, captures, learned)
        if masked is not None:
            masked = text.with_captures(masked, mask_captures)
            shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
            masked = _mask(masked, shape, block, runs, query.device)
        seed_value = 0 if seed is None else int(seed) & (2**64 - 1)
        problem = make_problem(
            Inputs(query, key, value), score, masked, fixed if scale is None else float(scale),
            sink=sink, dropout_seed=seed_value, **settings,
        )  # fmt: skip
        return problem, choose.choose(problem, backend), score

    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        inputs = Inputs(*arguments[:3])
        with torch.autocast(inputs.query.device.type, enabled=False):
            problem, choice, _ = prepared(*arguments)
            out, lse, top = choose.forward(problem, inputs, choice)
        return _laid_out(out, _empty_output(inputs)), lse, top

    def backward(
        d_out: Tensor | None, d_lse: Tensor | None, out: Tensor, lse: Tensor, needed: list[bool],
        *arguments: Any,
    ) -> list[Tensor]:  # fmt: skip
        *fixed, captures = _differentiable(*arguments[:5])
        learned = [n for n, need in enumerate(needed[len(fixed) :]) if need]
        held = text.held(captures, learned)
        with torch.autocast(out.device.type, enabled=False):
            problem, choice, score = prepared(*arguments, learned=learned)
            slots = frozenset(held.index(n) for n in learned)
            problem = autograd.with_gradient(problem, score, slots)
            if choice.name == "reference":  # its backward is torch's autograd, not to be had here
                choice = choose.Choice("cpu", True)
            tensors = [*fixed, *(captures[n] for n in held)]
            found = autograd.gradients(problem, choice, tensors, out, lse, d_out, d_lse)
        wanted = [*needed[: len(fixed)], *(n in learned for n in held)]
        pairs = zip(found, tensors, wanted, strict=True)
        return [
            torch.zeros_like(x) if g is None else _laid_out(g, torch.empty_like(x))
            for g, x, want in pairs
            if want
        ]

    _library.impl("attention", forward, "CompositeExplicitAutograd")
    _library.impl("attention_backward", backward, "CompositeExplicitAutograd")


def _mask(
    program: Program,
    shape: tuple[int, int, int, int],
    block: tuple[int, int],
    runs: list[Tensor],
    device: torch.device,
) -> BlockMask:
    if not runs:
        return BlockMask.from_program(program, shape, block, device)
    return BlockMask(shape, block, program, Runs(*runs))


def _differentiable(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, captures: list[Tensor]
) -> list[Any]:
    """What may have a gradient: the tensors, and last the list of captured ones."""
    return [query, key, value, *([] if sink is None else [sink]), captures]


def _empty_output(inputs: Inputs) -> Tensor:
    """out [B, Hq, Q, Ev], laid out in the query's stride order."""
    query = inputs.query
    shape = (*query.shape[:3], inputs.value.shape[-1])
    order = stride_order(query)
    return query.new_empty([shape[axis] for axis in order]).permute(
        [order.index(axis) for axis in range(4)]
    )


def _laid_out(x: Tensor, promised: Tensor) -> Tensor:
    """x, with the strides that the fake kernels have promised."""
    return x if x.stride() == promised.stride() else promised.copy_(x)


@torch.library.register_fake("flexmod::attention")
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    rows = query.new_empty(query.shape[:3], dtype=work)
    return _empty_output(Inputs(query, key, value)), rows, torch.empty_like(rows)


@torch.library.register_fake("flexmod::attention_backward")
def _(
    d_out: Tensor | None, d_lse: Tensor | None, out: Tensor, lse: Tensor, needed: list[bool],
    *arguments: Any,
) -> list[Tensor]:  # fmt: skip
    *fixed, captures = _differentiable(*arguments[:5])
    tensors = [*fixed, *captures]
    return [torch.empty_like(x) for x, need in zip(tensors, needed, strict=True) if need]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, sink, captures, mask_captures, runs, scale, seed, ctx.spec = inputs
    ctx.sizes = [len(captures), len(mask_captures), len(runs)]
    optional = [x for x in (sink, scale, seed) if x is not None]
    ctx.given = [x is not None for x in (sink, scale, seed)]
    out, lse, top = output
    ctx.save_for_backward(query, key, value, *captures, *mask_captures, *runs, *optional, out, lse)
    ctx.mark_non_differentiable(top)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, _: Any) -> tuple[Any, ...]:
    query, key, value, *rest = ctx.saved_tensors
    captures, mask_captures, runs = (_take(rest, n) for n in ctx.sizes)
    sink, scale, seed = (_take(rest, 1)[0] if given else None for given in ctx.given)
    out, lse = rest
    wanted = ctx.needs_input_grad
    needed = [*wanted[:3], *([] if sink is None else [wanted[3]]), *wanted[4]]
    arguments = (
        query, key, value, sink, captures, mask_captures, runs, scale, seed, ctx.spec,
    )  # fmt: skip
    nothing = d_out is None and d_lse is None
    found = iter(
        [] if nothing else torch.ops.flexmod.attention_backward(
            d_out, d_lse, out, lse, needed, *arguments
        )
    )  # fmt: skip
    grads = [next(found, None) if need else None for need in needed]
    d_sink = None if sink is None else grads.pop(3)
    return (*grads[:3], d_sink, grads[3:], [None] * len(mask_captures), [None] * len(runs),
            None, None, None)  # fmt: skip


def _take(queue: list[Any], count: int) -> list[Any]:
    taken, queue[:] = queue[:count], queue[count:]
    return taken


torch.library.register_autograd("flexmod::attention", _backward, setup_context=_save)
