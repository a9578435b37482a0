"""A program as the text of a Triton function, and the arguments that go with it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flexmod.program.columns import INPUT, flattened, is_flat
from flexmod.program.dependence import dependence
from flexmod.program.ir import ARGUMENTS, Instruction, Load, Program, interpret
from flexmod.program.ops import TABLE

_TYPES = {
    torch.bool: "tl.int1",
    torch.uint8: "tl.uint8",
    torch.int8: "tl.int8",
    torch.int16: "tl.int16",
    torch.int32: "tl.int32",
    torch.int64: "tl.int64",
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
}
_ANNOTATIONS = {torch.float32: "fp32", torch.float64: "fp64", torch.int64: "i64"}
_INT32_MAX = 2**31 - 1


class Function(NamedTuple):
    """Text of a jit function, and its parameters beside the mod's own: tensors, then values."""

    text: str
    tensors: tuple[str, ...] = ()  # names of captured tensors
    values: tuple[tuple[str, str], ...] = ()  # strides, sizes, numbers: (name, annotation or "")

    @property
    def parameters(self) -> tuple[tuple[str, str], ...]:
        return (*((name, "") for name in self.tensors), *self.values)

    @property
    def names(self) -> str:
        return ", ".join(name for name, _ in self.parameters)


def emit(program: Program, prefix: str, fast: bool = False, columns: str = "") -> Function:
    """The Triton function of a specialized program.

    Args:
        program: see `specialize`.
        prefix: put before parameter names, so that two functions can share a kernel.
        fast: use the cheaper spelling of an operation where its row has one.
        columns: for a Gluon kernel, the index along the columns of its tiles. The function then
            also takes them as a vector, see `columns.flattened`.
    """
    # In Gluon a number cannot be made without a layout, only cast.
    scalar = "tl.cast({}, {})" if columns else "tl.full((), {}, {})"
    tensors, values = _parameters(program, prefix)
    program = flattened(program, columns) if columns else program
    names = [*tensors, *(name for name, _ in values)]
    body: list[str] = []
    valid: tuple[list[str], list[str]] = [], []  # flags of loads: on the tile, on its columns
    reads = dependence(program)

    def leaf(position: int, line: Instruction, args: tuple[str, ...]) -> str:
        name = f"v{position}"
        if line.op == "input":
            return str(line.attr)
        if line.op == "number":
            number = f"{prefix}n{line.attr}"
            truth = line.dtype == torch.bool
            body.append(
                f"{name} = {number} != 0" if truth
                else f"{name} = {scalar.format(number, _TYPES[line.dtype])}"
            )  # fmt: skip
        else:
            flags = valid[is_flat(reads[position])]
            body.extend(_load(program, line, args, name, prefix, flags))
        return name

    def apply(line: Instruction, args: tuple[str, ...]) -> str:
        name = f"v{len(body)}_"
        spread = line.op == "spread"
        text = f"spread({args[0]}, {columns})" if spread else _spell(line, args, fast)
        body.append(f"{name} = {text}")
        return name

    lines = interpret(program, leaf, apply)
    result = ", ".join(lines[n] for n in program.outputs)
    result = f"({result},)" if program.kind == "gradient" else result
    on_tile, on_columns = (" & ".join(flags) for flags in valid)
    if on_columns:
        on_tile += f"{' & ' if on_tile else ''}spread({on_columns}, {columns})"
    if on_tile and program.kind == "score":
        body.append(f"{result} = tl.where({on_tile}, {result}, float('nan'))")
    signature = ", ".join([*ARGUMENTS[program.kind], *([INPUT] if columns else []), *names])
    text = [f"def {program.kind}_mod({signature}):", *body, f"return {result}"]
    return Function("@triton.jit\n" + "\n    ".join(text) + "\n", tensors, values)


def _spell(line: Instruction, args: tuple[str, ...], fast: bool) -> str:
    if line.op == "cast" and line.dtype == torch.bool:
        return f"{args[0]} != 0"
    if line.op == "cast":
        return f"{args[0]}.to({_TYPES[line.dtype]})"
    if line.op == "round_to":
        half = "tl.float16" if line.attr == torch.float16 else "tl.bfloat16"
        return f"{args[0]}.to({half}).to(tl.float32)"
    row = TABLE[line.op]
    text = row.fast if fast and row.fast and line.dtype == torch.float32 else row.kernel
    return text.format(*args)


def _load(
    program: Program,
    line: Instruction,
    args: tuple[str, ...],
    name: str,
    prefix: str,
    valid: list[str],
) -> list[str]:
    """Lines that read one element; an index that may be out of range is clamped and noted."""
    load: Load = line.attr
    tensor = program.captures[load.slot]
    base = f"{prefix}c{load.slot}"
    lines, address = [], [base]
    for axis, (index, mode) in enumerate(zip(args, load.modes, strict=True)):
        size = f"{base}_size{axis}"
        if mode != "proven":
            at = f"{name}_i{axis}"
            lines.append(f"{at} = tl.where({index} < 0, {index} + {size}, {index})")
            index = at
        if mode == "check":
            lines.append(f"{name}_ok{axis} = ({index} >= 0) & ({index} < {size})")
            lines.append(f"{index} = tl.minimum(tl.maximum({index}, 0), {size} - 1)")
            valid.append(f"{name}_ok{axis}")
        if is_wide(tensor):
            index = f"{index}.to(tl.int64)"
        address.append(f"{index} * {base}_stride{axis}")
    read = f"tl.load({' + '.join(address)})"
    if tensor.dtype == torch.bool:
        read = f"({read} != 0)"
    elif tensor.dtype != line.dtype:
        read = f"{read}.to({_TYPES[line.dtype]})"
    return [*lines, f"{name} = {read}"]


def is_wide(tensor: torch.Tensor) -> bool:
    """Whether offsets into a tensor need 64 bits."""
    extent = sum((n - 1) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return extent > _INT32_MAX


def _sized_axes(program: Program) -> dict[int, set[int]]:
    """Axes of each capture whose length the kernel needs."""
    axes: dict[int, set[int]] = {slot: set() for slot in range(len(program.captures))}
    for line in program.instructions:
        if isinstance(line.attr, Load):
            modes = enumerate(line.attr.modes)
            axes[line.attr.slot].update(a for a, mode in modes if mode != "proven")
    return axes


def _parameters(
    program: Program, prefix: str
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    values = []
    sized = _sized_axes(program)
    for slot, tensor in enumerate(program.captures):
        values += [(f"{prefix}c{slot}_stride{axis}", "") for axis in range(tensor.ndim)]
        values += [(f"{prefix}c{slot}_size{axis}", "") for axis in sorted(sized[slot])]
    for line in program.instructions:
        if line.op == "number":
            values.append((f"{prefix}n{line.attr}", _ANNOTATIONS.get(line.dtype, "i32")))
    return tuple(f"{prefix}c{slot}" for slot in range(len(program.captures))), tuple(values)


def values(program: Program) -> list[Any]:
    """Run-time values for `Function.values`, in their order; those of its tensors are captures."""
    found: list[Any] = []
    sized = _sized_axes(program)
    for slot, tensor in enumerate(program.captures):
        found += [*tensor.stride(), *(tensor.shape[axis] for axis in sorted(sized[slot]))]
    for line in program.instructions:
        if line.op == "number":
            found.append(program.numbers[line.attr])
    return found
