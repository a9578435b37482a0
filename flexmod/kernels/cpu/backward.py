"""Backward from query, key, value, out and lse: scores are computed again, run by run."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmod.kernels import captures
from flexmod.kernels.cpu import fused, walk
from flexmod.kernels.problem import Gradients, Inputs, Problem, Saved
from flexmod.program.evaluate import evaluate

_DENSE = torch.contiguous_format


def backward(problem: Problem, inputs: Inputs, saved: Saved) -> Gradients:
    """ds = p * (dp - delta), then the derivative of score_mod; one fixed order of sums.

    delta = rowsum(out * d out) - d lse. Gradients are accumulated in the working precision, those
    of key and value as [B, Hkv, E, KV]: a product that reads p as it lies is faster than one that
    reads it transposed.
    """
    work = problem.work_dtype
    inputs = Inputs(*(x.to(work) for x in inputs))
    fits = saved.d_lse is None and fused.fills_cores(problem)
    if fits and fused.serves(problem, inputs):
        return fused.backward(problem, inputs, saved)
    key, value = _finite(inputs.key), _finite(inputs.value)
    d_query = torch.zeros(inputs.query.shape, dtype=work, device=problem.device)
    d_key, d_value = (torch.zeros_like(x.mT, memory_format=_DENSE) for x in (key, value))
    delta = torch.empty(saved.lse.shape, dtype=work, device=problem.device)
    sums, products = captures.Accumulator(problem), walk.Products()
    for row in walk.walk(problem, inputs):
        step = _Row(problem, row, inputs, saved, key[row.keys], value[row.keys], products)
        step.run(d_query[row.queries], d_key[row.keys], d_value[row.keys], sums)
        delta[row.queries] = step.delta.squeeze(-1)
    d_key, d_value = d_key.mT.contiguous(), d_value.mT.contiguous()
    return Gradients(d_query, d_key, d_value, delta, sums.totals())


def _finite(x: Tensor) -> Tensor:
    """NaN and infinities as 0: a row that sees one is NaN by its own lse and delta already, and
    times the weight 0 of a row that does not they must stay without effect."""
    return x if walk.is_finite(x) else x.nan_to_num(0.0, 0.0, 0.0)


class _Row:
    """The backward of one row of query blocks; heads of a group lie side by side."""

    def __init__(
        self,
        problem: Problem,
        row: walk.Row,
        inputs: Inputs,
        saved: Saved,
        key: Tensor,
        value: Tensor,
        products: walk.Products,
    ) -> None:
        work = problem.work_dtype
        self.problem, self.row, self.key, self.value = problem, row, key, value
        self.products = products
        query = inputs.query[row.queries] * problem.scale
        self.shape = query.shape[:3]
        batch, heads, rows = self.shape
        self.grouped = (batch, key.shape[1], heads // key.shape[1] * rows)
        self.query = query.reshape(*self.grouped, -1)
        self.d_out = saved.d_out[row.queries].to(work).reshape(*self.grouped, -1)
        lse = saved.lse[row.queries].unsqueeze(-1)
        self.lse = torch.where(lse == -torch.inf, torch.inf, lse)  # a row that saw nothing: p = 0
        terms = saved.out[row.queries].to(work) * saved.d_out[row.queries].to(work)
        self.delta = terms.sum(-1, keepdim=True)
        if saved.d_lse is not None:
            self.delta -= saved.d_lse[row.queries].unsqueeze(-1)

    def run(
        self, d_query: Tensor, d_key: Tensor, d_value: Tensor, sums: captures.Accumulator
    ) -> None:
        for keys in self.row.steps:
            indices = walk.index_tensors(self.problem, self.row, keys)
            visible = walk.visible_positions(self.problem, keys, indices)
            key, value = self.key[:, :, keys.span], self.value[:, :, keys.span]
            raw = self.products("score", self.query, key.mT).view(*self.shape, -1)
            score = walk.modified(self.problem, raw, indices, visible)
            weight = walk.exponential(self.problem, score, self.lse)
            d_weight = self.products("d_weight", self.d_out, value.mT).view(*self.shape, -1)
            keep = walk.kept(self.problem, indices)
            shown = weight
            if keep is not None:
                shown, d_weight = weight * keep, d_weight * keep
            d_score = d_weight.sub_(self.delta).mul_(weight)
            grad = self._through_mod(d_score, raw, indices, weight, sums)
            part = self.products("d_value", self.d_out.mT, self._grouped(shown))
            walk.add(d_value[..., keys.span], part)
            if grad is not None:
                flat = self._grouped(grad)
                d_query += self.products("d_query", flat, key).view(*self.shape, -1)
                walk.add(d_key[..., keys.span], self.products("d_key", self.query.mT, flat))
        d_query *= self.problem.scale

    def _through_mod(
        self,
        grad: Tensor,
        score: Tensor,
        indices: dict[str, Tensor],
        weight: Tensor,
        sums: captures.Accumulator,
    ) -> Tensor | None:
        """The derivative of score_mod: to the raw score, and to captured tensors.

        What it is where the weight is 0 never counts: 0 times infinity would be NaN.
        """
        gradient = self.problem.gradient
        if gradient is None:
            return grad
        unseen = weight == 0
        inputs = {**indices, "grad": grad, "score": score}
        outputs, _ = evaluate(gradient.program, inputs)
        for load in gradient.loads:
            sums.add(load, outputs, indices, score.shape, unseen)
        if gradient.score is None:
            return None
        return outputs[gradient.score].expand(score.shape).masked_fill(unseen, 0.0)

    def _grouped(self, x: Tensor) -> Tensor:
        return x.reshape(*self.grouped, -1)
