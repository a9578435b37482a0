"""Gradients of an attention call: the engines' backward behind torch's autograd."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexmod.blocks import BlockMask
from flexmod.kernels import choose, reference
from flexmod.kernels.prepared import Prepared
from flexmod.kernels.problem import Gradients, Inputs, Operands, Problem, Result, Saved
from flexmod.program import Program
from flexmod.program.gradient import differentiate
from flexmod.program.specialize import specialize
from flexmod.program.transforms import has_tangent, is_wrapped

log = logging.getLogger("flexmod")


def attend(
    problem: Problem, inputs: Inputs, score: Program | None, wanted: str | None
) -> tuple[Result, Prepared | None]:
    """Run a call so that it can be differentiated where something asks for it.

    `score` is the unspecialized score program. Transforms that no fused backward serves
    (torch.func, forward mode, double backward) go through the differentiable reference.
    The second result is what other calls of this shape may `run` by.
    """
    if torch.is_autocast_enabled(problem.device.type):  # scores stay in the working precision
        with torch.autocast(problem.device.type, enabled=False):
            return attend(problem, inputs, score, wanted)
    choice = choose.choose(problem, wanted)
    captured = problem.score.captures if problem.score else ()
    sinks = () if problem.sink is None else (problem.sink,)
    tensors = (*inputs, *sinks, *captured)
    if any(is_wrapped(x) or has_tangent(x) for x in tensors):
        log.info("a torch.func transform or forward mode is active: using the reference engine")
        return reference.forward(problem, inputs), None
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if trains and choice.name == "reference":
        return reference.forward(problem, inputs), None
    if trains:
        slots = frozenset(n for n, c in enumerate(captured) if c.requires_grad)
        problem = with_gradient(problem, score, slots)
    prepared = Prepared(problem, inputs, choice, trains)
    return run(prepared, problem.operands(inputs)), prepared


def run(prepared: Prepared, given: Operands) -> Result:
    """A call by what was prepared for its shape."""
    if not prepared.trains:
        return prepared.forward(given)
    sinks = () if given.sink is None else (given.sink,)
    tensors = (*given[:3], *sinks, *given.captures)
    return Result(*_Attention.apply(prepared, given.mask, given.seed, *tensors))


class _Attention(torch.autograd.Function):
    """(query, key, value, [sink], captured tensors ...) -> (out, lse, max_scores)."""

    @staticmethod
    def forward(
        ctx: Any, prepared: Prepared, mask: BlockMask | None, seed: int, *tensors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        result = prepared.forward(_operands(prepared, mask, seed, tensors))
        ctx.prepared, ctx.mask, ctx.seed = prepared, mask, seed
        ctx.save_for_backward(*tensors, result.out, result.lse)
        if result.max_scores is not None:
            ctx.mark_non_differentiable(result.max_scores)
        ctx.set_materialize_grads(False)
        return result

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, _: Any) -> tuple[Any, ...]:
        prepared: Prepared = ctx.prepared
        kind = prepared.device.type
        if torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return _Attention.backward(ctx, d_out, d_lse, _)
        *tensors, out, lse = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        if d_out is None and d_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        given = _operands(prepared, ctx.mask, ctx.seed, tensors)
        if torch.is_grad_enabled():
            log.info("a double backward is asked for: using the reference engine")
            problem = prepared.problem(given)
            return None, None, None, *_twice(problem, tensors, needed, d_out, d_lse)
        found = gradients(partial(prepared.backward, given), given, out, lse, d_out, d_lse)
        kept = [g if need else None for g, need in zip(found, needed, strict=True)]
        return None, None, None, *kept


def _operands(
    prepared: Prepared, mask: BlockMask | None, seed: int, tensors: Sequence[Tensor]
) -> Operands:
    query, key, value, *rest = tensors
    sink = rest.pop(0) if prepared.has_sink else None
    return Operands(query, key, value, sink, tuple(rest), mask, seed)


def with_gradient(problem: Problem, score: Program | None, slots: frozenset[int]) -> Problem:
    """The problem with the derivative of its score, for captured tensors of these slots."""
    if score is None:
        return problem
    gradient = differentiate(score, slots)
    narrow = specialize(gradient.program, problem.extents)
    return replace(problem, gradient=replace(gradient, program=narrow))


def gradients(
    backward: Callable[[Saved], Gradients],
    given: Operands,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
) -> list[Tensor | None]:
    """Of query, key, value, [sink] and captured tensors, in their dtypes."""
    d_out = torch.zeros_like(out) if d_out is None else _cast(d_out, out)
    if d_lse is not None:  # nothing depends on a row that saw nothing
        d_lse = torch.where(lse == -torch.inf, 0.0, d_lse)
    grads = backward(Saved(out, lse, d_out, d_lse))
    found: list[Tensor | None] = [*map(_cast, grads[:3], given[:3])]
    if given.sink is not None:
        weight = torch.exp(given.sink.to(lse.dtype).view(-1, 1) - lse)
        d_sink = torch.where(lse == -torch.inf, 0.0, -weight * grads.delta)
        found.append(d_sink.sum((0, 2)).to(given.sink.dtype))
    return found + [grads.captures.get(slot) for slot in range(len(given.captures))]


def _cast(x: Tensor, like: Tensor) -> Tensor:
    """In the dtype of another; `to` alone takes microseconds even where it has nothing to do."""
    return x if x.dtype == like.dtype else x.to(like.dtype)


def _twice(
    problem: Problem,
    tensors: list[Tensor],
    needed: tuple[bool, ...],
    d_out: Tensor | None,
    d_lse: Tensor | None,
) -> list[Tensor | None]:
    """The same gradients as differentiable functions of the inputs, from the reference.

    Taken with respect to copies, as the inputs may be functions of each other.
    """
    copies = [x.view_as(x) for x in tensors]
    sinks = 0 if problem.sink is None else 1
    score = problem.score and replace(problem.score, captures=tuple(copies[3 + sinks :]))
    sink = copies[3] if sinks else None
    result = reference.forward(replace(problem, score=score, sink=sink), Inputs(*copies[:3]))
    pairs = [(x, g) for x, g in zip(result[:2], (d_out, d_lse), strict=True) if g is not None]
    wanted = [x for x, need in zip(copies, needed, strict=True) if need]
    outputs, seeds = zip(*pairs, strict=True)
    grads = iter(torch.autograd.grad(outputs, wanted, seeds, create_graph=True, allow_unused=True))
    return [next(grads) if need else None for need in needed]
