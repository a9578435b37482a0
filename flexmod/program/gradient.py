"""The derivative of a score_mod, as another program."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from flexmod.program import vjp
from flexmod.program.ir import Load, Program
from flexmod.program.ops import TABLE
from flexmod.program.proxy import Proxy, record
from flexmod.program.record import Recorder


@dataclass(frozen=True)
class LoadGradient:
    """What one load of a captured tensor receives: positions in `Gradient.program.outputs`."""

    slot: int  # of the captured tensor, in the score program
    value: int
    indices: tuple[int, ...]  # one an axis


@dataclass(frozen=True)
class Gradient:
    """Outputs of `program`, a function of (grad, score, b, h, q_idx, kv_idx).

    score: output that holds the derivative with respect to the score; None: it is 0.
    loads: one for each load from a captured tensor that needs a gradient.
    slots: what `program` captures, as slots of the score program.
    """

    program: Program
    score: int | None
    loads: tuple[LoadGradient, ...]
    slots: tuple[int, ...] = ()

    @property
    def is_identity(self) -> bool:
        """Whether the score's gradient is that of the modified score, unchanged."""
        if self.score is None:
            return False
        line = self.program.instructions[self.program.outputs[self.score]]
        return line.op == "input" and line.attr == "grad"


def differentiate(program: Program, slots: frozenset[int], with_score: bool = False) -> Gradient:
    """Trace the derivative rules backwards over a score program, and keep what is needed.

    Args:
        program: an unspecialized score program.
        slots: captured tensors that need a gradient.
        with_score: the last output is to be what the program itself yields.
    """
    recorder = Recorder(torch.device("cpu"), program.dtype)
    grad = recorder.emit("input", (), program.dtype, "grad")
    lines = _replay(program, recorder)
    received: dict[int, Proxy] = {len(lines) - 1: grad}
    found: list[tuple[int, Proxy, tuple[Proxy, ...]]] = []
    of_score: Proxy | None = None
    for position in range(len(lines) - 1, -1, -1):
        line = program.instructions[position]
        if position not in received or not line.dtype.is_floating_point:
            continue
        gradient = received[position]
        if line.op == "input":
            of_score = gradient
        elif line.op == "load":
            load: Load = line.attr
            if load.slot in slots:
                found.append((load.slot, gradient, tuple(lines[a] for a in line.args)))
        elif line.op != "number":
            _propagate(program, position, gradient, lines, received)
    return _collect(recorder, program, of_score, found, lines[-1:] if with_score else [])


def _replay(program: Program, recorder: Recorder) -> list[Proxy]:
    """The program again, on a new recorder; number slots and captures keep their order."""
    lines: list[Proxy] = []
    for line in program.instructions:
        if line.op == "number":
            lines.append(recorder.number(program.numbers[line.attr], line.dtype))
            continue
        attr = line.attr
        if isinstance(attr, Load):
            attr = Load(recorder.slot(program.captures[attr.slot]), attr.modes)
        args = tuple(lines[a].position for a in line.args)
        lines.append(recorder.emit(line.op, args, line.dtype, attr))
    return lines


def _propagate(
    program: Program, position: int, grad: Proxy, lines: list[Proxy], received: dict[int, Proxy]
) -> None:
    """Send the gradient of one line on to its operands."""
    line = program.instructions[position]
    sources = list(line.args)
    operands = [lines[a] for a in sources]
    if line.op in ("cast", "round_to"):
        source = operands[0]
        gradients = (
            (source.recorder.cast(grad, source.dtype),) if source.is_floating_point() else ()
        )
    elif line.op in ("amax", "amin"):
        sources = _entries(program, position)
        gradients = vjp.shared(grad, lines[position], *(lines[n] for n in sources))
    elif TABLE[line.op].vjp is None:
        return
    else:
        gradients = TABLE[line.op].vjp(grad, lines[position], *operands)  # type: ignore[misc]
    for argument, gradient in zip(sources, gradients, strict=False):
        if gradient is not None and program.instructions[argument].dtype.is_floating_point:
            earlier = received.get(argument)
            received[argument] = gradient if earlier is None else record("add", earlier, gradient)


def _entries(program: Program, position: int) -> list[int]:
    """Lines of all entries of the vector that an `amax` or `amin` ends."""
    found = []
    line = program.instructions[position]
    while line.attr > 2:
        found.append(line.args[1])
        line = program.instructions[line.args[0]]
    return [*line.args, *reversed(found)]


def _collect(
    recorder: Recorder,
    program: Program,
    of_score: Proxy | None,
    found: list[tuple[int, Proxy, tuple[Proxy, ...]]],
    others: list[Proxy],
) -> Gradient:
    outputs: list[Proxy] = [] if of_score is None else [of_score]
    loads = []
    for slot, value, indices in found:
        start = len(outputs)
        outputs += [value, *indices]
        loads.append(LoadGradient(slot, start, tuple(range(start + 1, len(outputs)))))
    if not outputs:  # nothing depends on anything: keep a program with one line
        outputs = [recorder.emit("input", (), program.dtype, "grad")]
    outputs += others
    recorded = recorder.program("gradient", program.name, *outputs)
    places = {id(tensor): slot for slot, tensor in enumerate(program.captures)}
    slots = tuple(places[id(tensor)] for tensor in recorded.captures)
    score = None if of_score is None else 0
    return Gradient(replace(recorded, sites={}), score, tuple(loads), slots)
