"""Forward of the fa2 engine."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from flexmod.blocks.memory import in_blocks_of
from flexmod.errors import BackendError
from flexmod.kernels import tuning
from flexmod.kernels.blank import blank
from flexmod.kernels.fa2 import kernel
from flexmod.kernels.fa2.target import target
from flexmod.kernels.launch import Launch
from flexmod.kernels.problem import Inputs, Operands, Problem, Result, new_output


def fitted(problem: Problem, tiles: tuning.Tiles) -> tuple[Problem, tuning.Tiles]:
    """Tiles that divide the blocks of the map; the map in other blocks where they are too odd."""
    if problem.mask is None:
        return problem, tiles
    smaller = tuning.fit_blocks(tiles, problem.mask.block_size)
    if smaller is not None:
        return problem, smaller
    return replace(problem, mask=in_blocks_of(problem.mask, (tiles.q, tiles.kv))), tiles


def forward(problem: Problem, inputs: Inputs) -> Result:
    return prepare(problem, inputs)(problem.operands(inputs))


def prepare(problem: Problem, inputs: Inputs) -> Forward:
    """What runs this call, and every other that differs in its operands alone."""
    found = target(problem.device)
    assert isinstance(found, tuning.Target)
    return Forward(problem, inputs, found)


class Forward:
    """One launch, for all calls of one shape. It keeps no tensor of the call it was made for."""

    def __init__(self, problem: Problem, inputs: Inputs, found: tuning.Target) -> None:
        problem, tiles = self._plan(problem, found)
        self.block_size = problem.mask.block_size if problem.mask else None
        self.dtype, self.work_dtype = problem.dtype, problem.work_dtype
        self.wants_max_scores = problem.wants_max_scores
        self.written = kernel.written_dtype(problem.dtype, found)
        self.is_dense = all(kernel.dense(x) is x for x in inputs)
        ready = Inputs(*map(kernel.dense, inputs))
        out = kernel.dense(new_output(problem, ready.query))
        self.out_shape, self.out_strides = out.shape, out.stride()
        self.new_lse = blank(out.shape[:3], problem.work_dtype, problem.device)
        self.launch = self._launch(problem, ready, out, tiles, found)

    def _plan(self, problem: Problem, found: tuning.Target) -> tuple[Problem, tuning.Tiles]:
        tiles = tuning.plan(problem, found, "forward")
        if tiles is None:
            raise BackendError(f"fa2 cannot serve this call: {tuning.limit(problem, found)}")
        return fitted(problem, tiles)

    def _launch(
        self,
        problem: Problem,
        ready: Inputs,
        out: Tensor,
        tiles: tuning.Tiles,
        found: tuning.Target,
    ) -> Launch:
        fields = kernel.fields(problem, ready, [out], tiles, found)
        fields["HAS_SINK"] = problem.sink is not None
        fields["HAS_MAXIMA"] = problem.wants_max_scores
        module = kernel.load("fa2_forward.py.jinja", problem, fields, tiles, found)
        rows = problem.mask.grid.rows if problem.mask else 0
        fixed = (
            *kernel.mod_values([problem.score, problem.mask_program]), problem.scale,
            *kernel.dropout_values(problem), problem.heads, problem.group,
            problem.q_len, problem.kv_len, *kernel.strides(ready, out),
            *kernel.plane_strides(problem.mask, rows),
        )  # fmt: skip
        programs = -(-problem.q_len // tiles.q) * problem.batch * problem.heads
        work = tuning.work_of(problem, found, "forward")
        return Launch(module, "forward", programs, fixed, fields, tiles, problem.device, work)

    def __call__(self, given: Operands) -> Result:
        result = self.empty(given.query)
        self.launch.run(self.tensors(given, result), kernel.words(given.seed))
        if self.written != self.dtype:
            return result._replace(out=result.out.to(self.dtype))
        return result

    def empty(self, query: Tensor) -> Result:
        """What the kernel will fill, beside `query`."""
        if self.written == query.dtype:  # quicker without an argument
            out = query.new_empty_strided(self.out_shape, self.out_strides)
        else:
            out = query.new_empty_strided(self.out_shape, self.out_strides, dtype=self.written)
        return Result(out, self.new_lse(), self.new_lse() if self.wants_max_scores else None)

    def tensors(self, given: Operands, result: Result) -> list[Tensor]:
        """What the kernel reads and writes, in the order of its signature."""
        inputs = given[:3] if self.is_dense else map(kernel.dense, given[:3])
        out, lse, maxima = result
        maxima = lse if maxima is None else maxima  # not written, and in these not read:
        sink = spans = runs = lse
        captures = given.captures
        if given.sink is not None:
            sink = given.sink.to(self.work_dtype).contiguous()
        if given.mask is not None and self.block_size is not None:
            live = in_blocks_of(given.mask, self.block_size).runs
            spans, runs = live.spans, live.table
            captures += given.mask.program.captures
        return [*inputs, out, lse, maxima, spans, runs, sink, *captures]
