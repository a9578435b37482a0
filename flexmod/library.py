"""`torch.ops.flexmod.attention`: a call as one operation, for whatever watches operations.

torch.compile, torch.export, selective checkpointing and meta tensors see this operation and its
backward; ordinary eager calls go around it. What is not a tensor is text, so a graph holds all that
it needs, and graphs with equal text do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexmod import autograd, memo, operands
from flexmod.blocks import BlockMask
from flexmod.blocks.freshness import STALE, is_fresh
from flexmod.blocks.memory import map_of
from flexmod.blocks.runs import Runs
from flexmod.bounded import Bounded
from flexmod.errors import BlockMaskError
from flexmod.kernels import choose
from flexmod.kernels.prepared import Prepared
from flexmod.kernels.problem import Inputs, Operands, Problem, Result, stride_order
from flexmod.operands import Call
from flexmod.program import text
from flexmod.program.transforms import has_tangent, is_recorded, is_wrapped

_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? sink, Tensor[] captures, "
    "Tensor[] mask_captures, Tensor[] runs, SymInt[] versions, Tensor? scale, Tensor? seed, "
    "str spec"
)
_known: Bounded[tuple[int, ...], Runs] = Bounded(64)
_library = torch.library.Library("flexmod", "DEF")
# `host`: it waits for the device or reads a number on the host, so no CUDA graph may hold it.
_FORMS = {"": (), ".host": (torch.Tag.cudagraph_unsafe,)}
for _form, _tags in _FORMS.items():
    _library.define(f"attention{_form}({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)", tags=_tags)
    _library.define(
        f"attention_backward{_form}(Tensor? d_out, Tensor? d_lse, Tensor out, Tensor lse, "
        f"bool[] needed, {_ARGUMENTS}) -> Tensor[]",
        tags=_tags,
    )


def watches(tensors: Sequence[Tensor]) -> bool:
    """Whether something must see the call as one operation of torch."""
    if not any(is_recorded(x) for x in tensors):
        return False
    # Transforms of torch.func see through the reference engine instead.
    return not any(is_wrapped(x) or has_tangent(x) for x in tensors)


def attend(*arguments: Any, **settings: Any) -> Result:
    """The operation on what `operands.written` takes."""
    call = operands.written(*arguments, **settings)
    return Result(*getattr(torch.ops.flexmod.attention, call.form)(*call))


def implement(make_problem: Callable[..., Problem]) -> None:
    """Register what the two operations do."""

    ready = partial(_ready, make_problem)

    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        call = Call(*arguments)
        with torch.autocast(call.query.device.type, enabled=False):
            prepared, given = ready(call)
            out, lse, top = prepared.forward(given)
        top = torch.zeros_like(lse) if top is None else top  # nobody reads it
        return _laid_out(out, _empty_output(call.inputs)), lse, top

    def backward(
        d_out: Tensor | None, d_lse: Tensor | None, out: Tensor, lse: Tensor, needed: list[bool],
        *arguments: Any,
    ) -> list[Tensor]:  # fmt: skip
        call = Call(*arguments)
        fixed = len(call.fixed)
        learned = [slot for slot, need in enumerate(needed[fixed:]) if need]
        held = text.held(call.captures, learned)
        tensors = [*call.fixed, *(call.captures[slot] for slot in held)]
        wanted = [*needed[:fixed], *(slot in learned for slot in held)]
        with torch.autocast(out.device.type, enabled=False):
            prepared, given = ready(call, learned)
            run = partial(prepared.backward, given)
            found = autograd.gradients(run, given, out, lse, d_out, d_lse)
        return [
            torch.zeros_like(x) if g is None else _laid_out(g, torch.empty_like(x))
            for g, x, want in zip(found, tensors, wanted, strict=True)
            if want
        ]

    for form in _FORMS:
        _library.impl(f"attention{form}", forward, "CompositeExplicitAutograd")
        _library.impl(f"attention_backward{form}", backward, "CompositeExplicitAutograd")


def _make(
    make_problem: Callable[..., Problem],
    call: Call,
    mask: BlockMask | None,
    learned: Sequence[int] | None,
) -> Prepared:
    """What runs the call: its forward, or its backward with gradients for these captures."""
    score, _, settings = operands.read(call.spec, len(call.captures), len(call.mask_captures))
    fields = {k: v for k, v in settings.items() if k not in ("block_size", "backend", "scale")}
    if score is not None:
        score = text.with_captures(score, call.captures, learned or ())
    problem = make_problem(call.inputs, score, mask, _scale(call, settings),
                           sink=call.sink, dropout_seed=_seed(call), **fields)  # fmt: skip
    choice = choose.choose(problem, settings["backend"])
    if learned is not None:
        held = text.held(call.captures, learned)
        slots = frozenset(held.index(slot) for slot in learned)
        problem = autograd.with_gradient(problem, score, slots)
        if choice.name == "reference":  # its backward is torch's autograd, not to be had here
            choice = choose.Choice("cpu", True)
    return Prepared(problem, call.inputs, choice, learned is not None)


def _ready(
    make_problem: Callable[..., Problem], call: Call, learned: Sequence[int] | None = None
) -> tuple[Prepared, Operands]:
    """What runs the call, made at the first one of its shape, and what it runs on."""
    mask = _mask(call, learned is not None)
    held = text.held(call.captures, learned or ())
    captures = tuple(call.captures[slot].detach() for slot in held)
    given = Operands(*call.inputs, call.sink, captures, mask, _seed(call))
    if _is_on_side(call.query):  # of what a recording makes nothing may outlive it
        return _make(make_problem, call, mask, learned), given
    key = _shape(call, mask, learned, held)
    found = memo.operations.get(key)
    if found is None:
        found = _make(make_problem, call, mask, learned)
        if found.is_lasting:
            memo.operations.keep(key, found)
    return found, given


def _scale(call: Call, settings: dict[str, Any]) -> float:
    return settings["scale"] if call.scale is None else float(call.scale)


def _seed(call: Call) -> int:
    return 0 if call.seed is None else int(call.seed) & (2**64 - 1)


def _shape(
    call: Call, mask: BlockMask | None, learned: Sequence[int] | None, held: list[int]
) -> Hashable:
    """All that may decide how a call runs, and nothing else: see `flexmod.memo`."""
    tensors = (*call.fixed, *call.captures, *call.mask_captures)
    numbers = [x.item() for slot, x in enumerate(call.captures) if slot not in held]
    return (
        call.spec, None if learned is None else tuple(learned), mask and mask.layout,
        None if call.scale is None else float(call.scale),
        *(memo.layout(x) for x in tensors), *(x.is_neg() for x in tensors),
        *(x.data_ptr() % 16 for x in call.inputs), *map(repr, numbers),
    )  # fmt: skip


def _mask(call: Call, is_backward: bool) -> BlockMask | None:
    _, program, settings = operands.read(call.spec, len(call.captures), len(call.mask_captures))
    if program is None:
        return None
    block_size = tuple(settings["block_size"])
    program = text.with_captures(program, call.mask_captures)
    batch, heads, q_len, _ = call.query.shape
    shape = (batch, heads, q_len, call.key.shape[2])
    if not call.runs:
        return map_of(program, shape, block_size, call.query.device)
    # A CUDA graph reads copies, whose counters tell nothing; autograd watches those of a backward.
    are_themselves = not is_backward and not _is_captured(call.query)
    if are_themselves and not is_fresh(tuple(call.versions), call.mask_captures):
        raise BlockMaskError(STALE.format(program.name))
    return BlockMask(shape, block_size, program, _runs(*call.runs))


def _is_on_side(x: Tensor) -> bool:
    """Whether the stream is one that a CUDA graph may be recorded on."""
    return x.is_cuda and bool(torch.cuda.current_stream(x.device).cuda_stream)


def _is_captured(x: Tensor) -> bool:
    """Whether what is done to x is recorded into a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _runs(spans: Tensor, table: Tensor) -> Runs:
    """The runs of a map, with what was worked out of them in earlier runs of a graph."""
    # Of a graph's own copies nothing may outlive the recording; of inference no counter tells.
    if _is_captured(spans) or spans.is_inference() or table.is_inference():
        return Runs(spans, table)
    key = (id(spans), spans._version, id(table), table._version)
    # What is kept holds the tensors, so that no others can have their ids.
    return _known.get(key) or _known.keep(key, Runs(spans, table))


def _empty_output(inputs: Inputs) -> Tensor:
    """out [B, Hq, Q, Ev], laid out in the query's stride order."""
    query = inputs.query
    shape = (*query.shape[:3], inputs.value.shape[-1])
    order = stride_order(query)
    out = query.new_empty([shape[axis] for axis in order])
    return out.permute([order.index(axis) for axis in range(4)])


def _laid_out(x: Tensor, promised: Tensor) -> Tensor:
    """x, with the strides that the fake kernels have promised."""
    return x if x.stride() == promised.stride() else promised.copy_(x)


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = Call(*arguments)
    work = torch.float64 if call.query.dtype == torch.float64 else torch.float32
    lse = call.query.new_empty(call.query.shape[:3], dtype=work)
    return _empty_output(call.inputs), lse, torch.empty_like(lse)


def _fake_backward(
    d_out: Tensor | None, d_lse: Tensor | None, out: Tensor, lse: Tensor, needed: list[bool],
    *arguments: Any,
) -> list[Tensor]:  # fmt: skip
    call = Call(*arguments)
    pairs = zip([*call.fixed, *call.captures], needed, strict=True)
    return [torch.empty_like(x) for x, need in pairs if need]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call, (out, lse, top) = Call(*inputs), output
    leaves, ctx.structure = torch.utils._pytree.tree_flatten(tuple(call[:-1]))
    ctx.plain = [None if isinstance(x, Tensor) else x for x in leaves]
    ctx.tensors, ctx.spec = [isinstance(x, Tensor) for x in leaves], call.spec
    ctx.save_for_backward(*(x for x in leaves if isinstance(x, Tensor)), out, lse)
    ctx.mark_non_differentiable(top)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, _: Any) -> tuple[Any, ...]:
    *tensors, out, lse = ctx.saved_tensors
    queue = iter(tensors)
    pairs = zip(ctx.tensors, ctx.plain, strict=True)
    leaves = [next(queue) if is_tensor else x for is_tensor, x in pairs]
    call = Call._make((*torch.utils._pytree.tree_unflatten(leaves, ctx.structure), ctx.spec))
    wanted = Call(*ctx.needs_input_grad)
    needed = [*wanted[:3], *([] if call.sink is None else [wanted.sink]), *wanted.captures]
    found: list[Tensor] = []
    if d_out is not None or d_lse is not None:
        operation = getattr(torch.ops.flexmod.attention_backward, call.backward_form)
        found = operation(d_out, d_lse, out, lse, needed, *call)
    queue = iter(found)
    grads = [next(queue, None) if need else None for need in needed]
    d_sink = None if call.sink is None else grads.pop(3)
    unseen: list[Any] = [[None] * len(x) for x in (call.mask_captures, call.runs)]
    unseen += [None if call.versions else [], None, None, None]
    return (*grads[:3], d_sink, grads[3:], *unseen)


for _form in _FORMS:
    _name = f"flexmod::attention{_form}"
    torch.library.register_fake(_name, _fake_forward)
    torch.library.register_fake(f"flexmod::attention_backward{_form}", _fake_backward)
    torch.library.register_autograd(_name, _backward, setup_context=_setup_context)
