"""A mod as data: straight-line scalar instructions, each computed once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import Parameter, Signature
from typing import Any, NamedTuple, TypeVar

import torch

INDICES = ("b", "h", "q_idx", "kv_idx")
ARGUMENTS = {
    "score": ("score", *INDICES),
    "mask": INDICES,
    "gradient": ("grad", "score", *INDICES),
}
LEAVES = ("input", "number", "load")

Value = TypeVar("Value")
_interned: dict[Hashable, int] = {}


class Instruction(NamedTuple):
    """One scalar operation. A tuple, as it is made and hashed on every trace.

    `op` is a row of `program.ops.TABLE` or a leaf: `input` (attr: its name), `number` (attr: its
    slot in `Program.numbers`), `load` (attr: `Load`; args: one index an axis).
    """

    op: str
    args: tuple[int, ...]  # positions of earlier instructions
    dtype: torch.dtype
    attr: Any = None


class Load(NamedTuple):
    """Which captured tensor a load reads, and what is known of each index: see `specialize`."""

    slot: int
    modes: tuple[str, ...]  # an axis each: "proven", "wrap" (may be negative) or "check"


@dataclass(frozen=True, eq=False)
class Program:
    """A traced mod. Its results are `outputs`: of a mod, the last instruction alone.

    `structure` is all that a kernel's text may depend on; the values in `numbers` and `captures`
    are run-time arguments, so changing them never makes a new kernel.
    """

    kind: str  # "score", "mask" or "gradient"
    name: str
    instructions: tuple[Instruction, ...]
    outputs: tuple[int, ...]
    numbers: tuple[float | int, ...] = ()
    captures: tuple[torch.Tensor, ...] = ()
    sites: Mapping[int, object] = field(default_factory=dict)  # position of a load -> user's line

    @cached_property
    def reads(self) -> frozenset[str]:
        """The variables (score, b, h, q_idx, kv_idx) that the results depend on."""
        return frozenset(i.attr for i in self.instructions if i.op == "input")

    @cached_property
    def structure(self) -> Hashable:
        kinds = tuple((tensor.dtype, tensor.ndim) for tensor in self.captures)
        return (self.kind, self.instructions, self.outputs, kinds)

    @cached_property
    def key(self) -> int:
        """A small number for `structure`, the same for equal ones: hashing it once is enough."""
        return _interned.setdefault(self.structure, len(_interned))

    def with_captures(self, captures: tuple[torch.Tensor, ...]) -> Program:
        """The same program of other tensors of the same dtypes and ranks."""
        found: Program = object.__new__(Program)
        # With what is worked out of the structure, which stays the same.
        found.__dict__.update(self.__dict__, identity=self.identity, key=self.key, reads=self.reads)
        found.__dict__["captures"] = captures
        return found

    @cached_property
    def identity(self) -> tuple[int, str]:
        """Structure and numbers: equal ones compute the same from equal captures."""
        return self.key, repr(self.numbers)  # the text tells 1 from 1.0, and 0.0 from -0.0

    @property
    def dtype(self) -> torch.dtype:
        return self.instructions[self.outputs[0]].dtype

    def __call__(self, *arguments: Any) -> Any:
        """The mod, on tensors or inside of another mod: `block_mask.mask_mod(b, h, q, kv)`."""
        from flexmod.program.inline import call

        return call(self, *arguments)

    @property
    def __signature__(self) -> Signature:
        return Signature([Parameter(n, Parameter.POSITIONAL_ONLY) for n in ARGUMENTS[self.kind]])

    def __str__(self) -> str:
        arguments = [name for name in ARGUMENTS[self.kind] if name in self.reads]
        head = f"{self.kind}_mod {self.name}({', '.join(arguments)})"
        lines = [f"  %{n} = {self._describe(i)}" for n, i in enumerate(self.instructions)]
        types = [str(i.dtype).removeprefix("torch.") for i in self.instructions]
        body = [f"{line:<43} {dtype}" for line, dtype in zip(lines, types, strict=True)]
        results = ", ".join(f"%{n}" for n in self.outputs)
        return "\n".join([head, *body, f"  return {results}"])

    def _describe(self, instruction: Instruction) -> str:
        match instruction.op:
            case "input":
                text = str(instruction.attr)
            case "number":
                text = repr(self.numbers[instruction.attr])
            case "load":
                slot = instruction.attr.slot
                indices = ", ".join(f"%{a}" for a in instruction.args)
                text = f"capture{slot}{list(self.captures[slot].shape)}[{indices}]"
            case op:
                text = " ".join([op, *(f"%{a}" for a in instruction.args)])
        return text


def interpret(
    program: Program,
    leaf: Callable[[int, Instruction, tuple[Any, ...]], Value],
    apply: Callable[[Instruction, tuple[Value, ...]], Value],
) -> list[Value]:
    """Run a program with another meaning of its leaves and operations; the value of every line.

    Evaluation, bounds and kernel text are this loop.
    """
    values: list[Value] = []
    for position, instruction in enumerate(program.instructions):
        args = tuple(values[a] for a in instruction.args)
        if instruction.op in LEAVES:
            values.append(leaf(position, instruction, args))
        else:
            values.append(apply(instruction, args))
    return values


def rebuilt(
    program: Program,
    lines: Sequence[Instruction],
    outputs: Sequence[int],
) -> tuple[Program, dict[int, int]]:
    """The program of other lines, as far as its outputs need them, and where each of them went."""
    needed = set(outputs)
    for position in range(len(lines) - 1, -1, -1):
        if position in needed:
            needed.update(lines[position].args)
    order = {old: new for new, old in enumerate(sorted(needed))}
    kept = (lines[old] for old in order)
    made = replace(
        program,
        instructions=tuple(i._replace(args=tuple(order[a] for a in i.args)) for i in kept),
        outputs=tuple(order[n] for n in outputs),
        sites={},
    )
    return made, order
