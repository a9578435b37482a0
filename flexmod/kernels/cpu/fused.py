"""Attention without a score_mod by torch's own fused kernels for the CPU, piece by piece.

They keep scores in a core's cache, which products and passes of torch operations cannot. Attention
to disjoint keys merges by lse, and the backward of a piece, given out and lse of the whole, is its
share of the gradients (FlashAttention-2, Dao 2023).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmod.kernels.cpu import walk
from flexmod.kernels.cpu.pieces import pieces
from flexmod.kernels.problem import Gradients, Inputs, Problem, Result, Saved, new_output

# Not public, as torch has no public attention that tells lse on a CPU: tiles serve without them.
_NAME = "_scaled_dot_product_flash_attention_for_cpu"
_attention: Any = getattr(torch.ops.aten, _NAME, None)
_attention_backward: Any = getattr(torch.ops.aten, f"{_NAME}_backward", None)


class Part(NamedTuple):
    """Attention to some of the keys: out [b, h, rows, E], lse [b, h, rows]; 0 and -inf of none."""

    out: Tensor
    lse: Tensor


def serves(problem: Problem, inputs: Inputs) -> bool:
    """Whether torch's kernels can do it, and mean what is meant here.

    `inputs` are in the working precision. They are looked at, as a score that is infinite or NaN
    would reach its row from under a mask.
    """
    if problem.score is not None or problem.dropout_p or problem.head_dim != problem.value_dim:
        return False
    if problem.device.type != "cpu" or None in (_attention, _attention_backward):
        return False
    query, key, value = (max(-float(low), float(high)) for low, high in map(torch.aminmax, inputs))
    bound = query * key * problem.head_dim * max(1.0, abs(problem.scale))
    return bound < torch.finfo(problem.work_dtype).max and math.isfinite(value)


def fills_cores(problem: Problem) -> bool:
    """Whether a backward has work for all: one core serves a head of a batch entry in `_folded`."""
    grid, _ = walk.grid_of(problem)
    batches = 1 if grid.batch > 1 else problem.batch
    heads = problem.heads if batches == 1 else problem.kv_heads
    return batches * (1 if grid.heads > 1 else heads) >= torch.get_num_threads()


def forward(problem: Problem, inputs: Inputs) -> Result:
    """Without max_scores, which the kernels do not tell."""
    out = new_output(problem, inputs.query).zero_()
    total = Part(out, out.new_full(out.shape[:3], -torch.inf))
    inputs = Inputs(*map(_in_rows, inputs))
    for piece in pieces(problem, inputs):
        hidden = _hidden(problem, piece)
        part, lse = _attention(*_operands(piece, inputs), attn_mask=hidden, scale=problem.scale)
        if hidden is not None:  # the kernel's lse of a row that sees nothing is 0
            lse = lse.masked_fill(hidden.amax(-1) == -torch.inf, -torch.inf)
        here = Part(*(x[piece.queries] for x in total))
        _merge(here, Part(_unfolded(part, here.out.shape), _unfolded(lse, here.lse.shape)))
    if problem.sink is not None:  # a key whose value is 0
        sink = problem.sink.to(out.dtype).view(-1, 1).expand_as(total.lse)
        _merge(total, Part(out.new_zeros(()).expand_as(out), sink))
    return Result(out.to(problem.dtype), total.lse, None)


def _merge(total: Part, part: Part) -> None:
    """Add attention to other keys."""
    weight = torch.sigmoid(part.lse - total.lse).masked_fill_(part.lse == -torch.inf, 0.0)
    total.out.lerp_(part.out, weight.unsqueeze(-1))
    total.lse.copy_(torch.logaddexp(total.lse, part.lse))


def backward(problem: Problem, inputs: Inputs, saved: Saved) -> Gradients:
    """Without a gradient of lse, which the kernels do not take."""
    inputs = Inputs(*map(_in_rows, inputs))
    out, d_out = (_in_rows(x.to(problem.work_dtype)) for x in (saved.out, saved.d_out))
    lse = saved.lse.masked_fill(saved.lse == -torch.inf, torch.inf)  # saw nothing: no weights
    grads = Inputs(*(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in inputs))
    for piece in pieces(problem, inputs):
        seed, *whole = (_folded(piece, x[piece.queries]) for x in (d_out, out, lse))
        d_query, *others = _attention_backward(
            seed, *_operands(piece, inputs), *whole, 0.0, False,
            attn_mask=_hidden(problem, piece), scale=problem.scale,
        )  # fmt: skip
        here = grads.query[piece.queries]
        here += _unfolded(d_query, here.shape)
        for target, part in zip(grads[1:], others, strict=True):
            walk.add(target[piece.keys][:, :, piece.span], part)
    return Gradients(*grads, torch.einsum("bhqe,bhqe->bhq", out, d_out), {})


def _in_rows(x: Tensor) -> Tensor:
    """Memory as the kernels read it: numbers of a row side by side, and rows do not overlap."""
    return x if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1] else x.contiguous()


def _operands(piece: walk.Row, inputs: Inputs) -> Inputs:
    query = _folded(piece, inputs.query[piece.queries])
    key, value = (x[piece.keys][:, :, piece.span] for x in inputs[1:])
    return Inputs(query, *(x.expand(len(query), -1, -1, -1) for x in (key, value)))


def _folded(piece: walk.Row, x: Tensor) -> Tensor:
    """[b, h, rows, ...] with as many heads as keys have. Heads that share keys become rows of one
    head, or batch entries if there is only one: that takes no copy and more cores."""
    if piece.is_one_batch:
        return x[0].unflatten(0, (-1, piece.group)).transpose(0, 1)
    return x.reshape(len(x), x.shape[1] // piece.group, -1, *x.shape[3:])


def _unfolded(x: Tensor, shape: torch.Size) -> Tensor:
    return (x.transpose(0, 1) if shape[0] == 1 else x).reshape(shape)


def _hidden(problem: Problem, piece: walk.Row) -> Tensor | None:
    """-inf where the mask hides and 0 elsewhere, as `_folded`; None: all is visible."""
    found = None
    for keys in piece.steps:
        visible = walk.visible_positions(problem, keys, walk.index_tensors(problem, piece, keys))
        if visible is None:
            continue
        if found is None:
            sizes = 1, 1, *(x.stop - x.start for x in (piece.rows, piece.span))
            shape = torch.broadcast_shapes(visible.shape[:-2], sizes[:2]) + sizes[2:]
            found = torch.zeros(shape, dtype=problem.work_dtype)
        first = keys.start - piece.span.start
        here = found[..., first : first + keys.stop - keys.start]
        here.masked_fill_(~visible, -torch.inf)
    if found is None or (found.shape[1] == 1 and (piece.is_one_batch or piece.group == 1)):
        return found
    return _folded(piece, found.expand(-1, max(found.shape[1], piece.group), -1, -1))
