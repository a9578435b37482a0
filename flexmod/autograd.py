"""Gradients of an attention call: the engines' backward behind torch's autograd."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flexmod.kernels import choose, reference
from flexmod.kernels.problem import Inputs, Problem, Result, Saved
from flexmod.program import Program
from flexmod.program.gradient import differentiate
from flexmod.program.specialize import specialize
from flexmod.program.transforms import has_tangent, is_wrapped

log = logging.getLogger("flexmod")


def attend(problem: Problem, inputs: Inputs, score: Program | None, wanted: str | None) -> Result:
    """Run a call so that it can be differentiated where something asks for it.

    `score` is the unspecialized score program. Transforms that no fused backward serves
    (torch.func, forward mode, double backward) go through the differentiable reference.
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
        return reference.forward(problem, inputs)
    wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if not wants_grad:
        return choose.forward(problem, inputs, choice)
    if choice.name == "reference":
        return reference.forward(problem, inputs)
    slots = frozenset(n for n, c in enumerate(captured) if c.requires_grad)
    problem = with_gradient(problem, score, slots)
    return Result(*_Attention.apply(problem, choice, *tensors))


class _Attention(torch.autograd.Function):
    """(query, key, value, [sink], captured tensors ...) -> (out, lse, max_scores)."""

    @staticmethod
    def forward(
        ctx: Any, problem: Problem, choice: choose.Choice, *tensors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = Inputs(*tensors[:3])
        result = choose.forward(problem, inputs, choice)
        ctx.problem, ctx.choice = problem, choice
        ctx.save_for_backward(*tensors, result.out, result.lse)
        ctx.mark_non_differentiable(result.max_scores)
        ctx.set_materialize_grads(False)
        return result

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, _: Any) -> tuple[Any, ...]:
        kind = ctx.problem.device.type
        if torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return _Attention.backward(ctx, d_out, d_lse, _)
        *tensors, out, lse = ctx.saved_tensors
        problem: Problem = ctx.problem
        needed = ctx.needs_input_grad[2:]
        if d_out is None and d_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        if torch.is_grad_enabled():
            log.info("a double backward is asked for: using the reference engine")
            return None, None, *_twice(problem, tensors, needed, d_out, d_lse)
        found = gradients(problem, ctx.choice, tensors, out, lse, d_out, d_lse)
        kept = [g if need else None for g, need in zip(found, needed, strict=True)]
        return None, None, *kept


def with_gradient(problem: Problem, score: Program | None, slots: frozenset[int]) -> Problem:
    """The problem with the derivative of its score, for captured tensors of these slots."""
    if score is None:
        return problem
    gradient = differentiate(score, slots)
    narrow = specialize(gradient.program, problem.extents)
    return replace(problem, gradient=replace(gradient, program=narrow))


def gradients(
    problem: Problem,
    choice: choose.Choice,
    tensors: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
) -> list[Tensor | None]:
    """Of query, key, value, [sink] and captured `tensors`, in their dtypes."""
    d_out = torch.zeros_like(out) if d_out is None else d_out.to(out.dtype)
    if d_lse is not None:  # nothing depends on a row that saw nothing
        d_lse = torch.where(lse == -torch.inf, 0.0, d_lse)
    inputs = Inputs(*tensors[:3])
    grads = choose.backward(problem, inputs, Saved(out, lse, d_out, d_lse), choice)
    found: list[Tensor | None] = [g.to(x.dtype) for g, x in zip(grads[:3], inputs, strict=True)]
    if problem.sink is not None:
        weight = torch.exp(tensors[3].to(lse.dtype).view(-1, 1) - lse)
        d_sink = torch.where(lse == -torch.inf, 0.0, -weight * grads.delta)
        found.append(d_sink.sum((0, 2)).to(tensors[3].dtype))
    captured = problem.score.captures if problem.score else ()
    return found + [grads.captures.get(slot) for slot in range(len(captured))]


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
