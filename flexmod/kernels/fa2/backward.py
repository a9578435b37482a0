"""Backward of the fa2 engine: two kernels, then the sums of captured tensors are scattered."""

from __future__ import annotations

from torch import Tensor

from flexmod.blocks import BlockMask
from flexmod.blocks.memory import in_blocks_of
from flexmod.errors import BackendError
from flexmod.kernels import captures, tuning
from flexmod.kernels.blank import blank
from flexmod.kernels.fa2 import kernel, sums
from flexmod.kernels.fa2.forward import fitted
from flexmod.kernels.fa2.scatter import Scatter
from flexmod.kernels.fa2.target import target
from flexmod.kernels.launch import Launch
from flexmod.kernels.problem import Gradients, Inputs, Operands, Problem, Saved


def backward(problem: Problem, inputs: Inputs, saved: Saved) -> Gradients:
    found = target(problem.device)
    assert isinstance(found, tuning.Target)
    plan = sums.plan(problem)
    in_order = problem.deterministic and plan.uses_atomics
    run = Backward(problem, inputs, saved, sums.NOTHING if in_order else plan, found)
    gradients = run(problem.operands(inputs), saved)
    if in_order:
        return gradients._replace(captures=captures.in_order(problem, inputs, saved))
    return gradients


def prepare_backward(problem: Problem, inputs: Inputs, saved: Saved) -> Backward | None:
    """What runs this backward, and every other that differs in its operands alone.

    None where sums in a fixed order need torch operations over the whole problem.
    """
    found, plan = target(problem.device), sums.plan(problem)
    assert isinstance(found, tuning.Target)
    if problem.deterministic and plan.uses_atomics:
        return None
    return Backward(problem, inputs, saved, plan, found)


class Backward:
    """Both launches, for all calls of one shape. It keeps no tensor of the call it was made for.

    The first kernel, over queries, fills d_query, delta and sums; the second, over keys, reads
    delta and fills d_key, d_value and sums.
    """

    def __init__(
        self, problem: Problem, inputs: Inputs, saved: Saved, plan: sums.Plan, found: tuning.Target
    ) -> None:
        written = kernel.written_dtype(problem.dtype, found)
        shapes = [*((x.shape, written) for x in inputs), (saved.lse.shape, problem.work_dtype)]
        self.new = [blank(shape, dtype, problem.device) for shape, dtype in shapes]
        self.has_d_lse = saved.d_lse is not None
        self.slots = problem.gradient.slots if problem.gradient else ()
        self._plan, self._found = plan, found
        ready = Inputs(*map(kernel.dense, inputs))
        out, d_out = kernel.dense(saved.out), kernel.dense(saved.d_out)
        self.over_queries, self.query_blocks = self._launch(
            "backward_query", problem, ready, out, d_out
        )
        self.over_keys, self.key_blocks = self._launch("backward_key", problem, ready, out, d_out)
        size = self.over_queries.tiles
        self.buffers = plan.buffers(problem, size, -(-problem.q_len // size.q))
        self.scatter = Scatter(problem, plan, self.buffers)

    def _launch(
        self, name: str, problem: Problem, ready: Inputs, out: Tensor, d_out: Tensor
    ) -> tuple[Launch, tuple[int, int] | None]:
        """One of the two, and the size of the blocks that its map must have."""
        tiles = tuning.plan(problem, self._found, name)
        if tiles is None:
            raise BackendError(f"fa2 has no backward: {tuning.limit(problem, self._found)}")
        problem, tiles = fitted(problem, tiles)
        gradient, mask = problem.gradient, problem.mask
        fields = kernel.fields(problem, ready, [out, d_out], tiles, self._found)
        fields["HAS_D_LSE"] = self.has_d_lse
        fields["HAS_GRADIENT"] = gradient is not None
        fields["HAS_SCORE_GRADIENT"] = gradient is None or gradient.score is not None
        module = kernel.load(
            "fa2_backward.py.jinja", problem, fields, tiles, self._found, self._plan
        )
        if name == "backward_query":
            rows = mask.grid.rows if mask else 0
            programs = -(-problem.q_len // tiles.q) * problem.batch * problem.heads
        else:
            rows = mask.grid.columns if mask else 0
            programs = -(-problem.kv_len // tiles.kv) * ready.key.shape[0] * problem.kv_heads
        mods = [problem.score, problem.mask_program, gradient.program if gradient else None]
        fixed = (
            *kernel.mod_values(mods), *self._plan.sizes(problem), problem.scale,
            *kernel.dropout_values(problem), problem.heads, problem.group,
            problem.batch // ready.key.shape[0], problem.q_len, problem.kv_len,
            *kernel.strides(ready, d_out), *out.stride()[:3], *kernel.plane_strides(mask, rows),
        )  # fmt: skip
        work = tuning.work_of(problem, self._found, name)
        launch = Launch(module, name, programs, fixed, fields, tiles, problem.device, work)
        return launch, mask.block_size if mask else None

    def __call__(self, given: Operands, saved: Saved) -> Gradients:
        gradients = self.empty()
        sums = self.buffers.make()
        of_queries, of_keys = self.tensors(given, saved, gradients, sums)
        words = kernel.words(given.seed)
        self.over_queries.run(of_queries, words)
        self.over_keys.run(of_keys, words)
        return gradients._replace(captures=self.scatter(sums, self._derivatives(given)))

    def empty(self) -> Gradients:
        """Of query, key, value, and delta; not filled yet."""
        query, key, value, delta = (new() for new in self.new)
        return Gradients(query, key, value, delta, {})

    def tensors(
        self, given: Operands, saved: Saved, gradients: Gradients, sums: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What both kernels read and write, in the order of their signatures."""
        inputs = [kernel.dense(x) for x in given[:3]]
        out, d_out = kernel.dense(saved.out), kernel.dense(saved.d_out)
        lse, delta = saved.lse.contiguous(), gradients.delta
        d_lse = lse if saved.d_lse is None else saved.d_lse.contiguous()  # lse: not read
        by_query, by_key = self._maps(given.mask, lse)
        masks = given.mask.program.captures if given.mask else ()
        end = [*given.captures, *masks, *self._derivatives(given), *sums]
        return (
            [*inputs, d_out, out, gradients.query, d_lse, lse, delta, *by_query, *end],
            [*inputs, d_out, gradients.key, gradients.value, lse, delta, *by_key, *end],
        )

    def _derivatives(self, given: Operands) -> tuple[Tensor, ...]:
        """What the derivative of score_mod reads."""
        return tuple(given.captures[slot] for slot in self.slots)

    def _maps(
        self, mask: BlockMask | None, unread: Tensor
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Spans and runs of both kernels."""
        if mask is None:
            return (unread, unread), (unread, unread)
        assert self.query_blocks is not None and self.key_blocks is not None
        rows = in_blocks_of(mask, self.query_blocks).runs
        columns = in_blocks_of(mask, self.key_blocks).transposed
        return (rows.spans, rows.table), (columns.spans, columns.table)
