"""A program as the text of a Triton function, and the arguments that go with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from flexmod.program import diagonals
from flexmod.program.conditions import KEYS, NEAR, Conditions
from flexmod.program.dependence import ALONG
from flexmod.program.ir import ARGUMENTS, Instruction, Load, Program, interpret
from flexmod.program.ops import TABLE
from flexmod.program.parts import COLUMNS, ROWS, split
from flexmod.program.scale import SCALE, of_products

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
_SUMS = ("input", "number", "load", "add", "sub", "neg")
_OF_TILE = (ROWS, COLUMNS, "corner")  # more arguments of a mod in a Gluon kernel,
_OF_SCORES = (*_OF_TILE, SCALE)  # and of one that is given products
_OF_DIAGONALS = ("b", "h", "corner", "q_idx", "kv_idx")
_ABSENT = {"score": "score", "mask": "True", "gradient": "(grad,)"}


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


class _Style(NamedTuple):
    """How the functions of a program are spelled."""

    prefix: str  # of the names of parameters
    fast: bool
    columns: str  # the index along the columns of a Gluon kernel's tiles; "" in a plain one
    scalar: str  # a number of a type
    conditions: Conditions | None = None


def emit(program: Program, prefix: str, fast: bool = False, columns: str = "") -> Function:
    """The Triton function of a specialized program.

    Args:
        program: see `specialize`.
        prefix: put before parameter names, so that two functions can share a kernel.
        fast: use the cheaper spelling of an operation where its row has one.
        columns: for a Gluon kernel, the index along the columns of its tiles. There are two more
            functions then, KIND_rows and KIND_columns: their results are arguments of KIND_mod, as
            is the corner of the tile (see `diagonals`). A score is given as a product, and
            its scale beside it (see `scale`).
    """
    # In Gluon a number cannot be made without a layout, only cast.
    scalar = "tl.cast({}, {})" if columns else "tl.full((), {}, {})"
    style = _Style(prefix, fast, columns, scalar)
    tensors, values = _parameters(program, prefix)
    names = [*tensors, *(name for name, _ in values)]
    if not columns:
        return Function(_mod(program, style, names), tensors, values)
    along, program = diagonals.split(of_products(program))
    parts = split(program, columns)
    row = "q_idx" if columns == "kv_idx" else "kv_idx"
    rows, of_rows = _part(parts.rows, style, "rows", row, names)
    across, of_columns = _part(parts.columns, style, "columns", columns, names)
    given = [
        *(f"{ROWS}[{n}]" for n in of_rows),
        *(f"spread({COLUMNS}[{n}], {columns})" for n in of_columns),
    ]
    functions = [rows, across, *(_along(along, style, names) if along else ())]
    pairs = _mod(parts.pairs, style, names, _of_tile(program.kind), given)
    return Function("\n\n".join([*functions, pairs]), tensors, values)


def absent(kind: str, columns: str = "") -> Function:
    """The same functions where there is no mod: of a score as it is, a mask that hides nothing."""
    own = [*ARGUMENTS[kind], *(_of_tile(kind) if columns else ())]
    text = _function(f"{kind}_mod", own, [], _ABSENT[kind])
    for part in ("rows", "columns") if columns else ():
        text = _function(f"{kind}_{part}", ["b", "h", "index"], [], "(index,)") + "\n\n" + text
    return Function(text)


def _of_tile(kind: str) -> tuple[str, ...]:
    return _OF_TILE if kind == "mask" else _OF_SCORES


def _mod(
    program: Program,
    style: _Style,
    names: list[str],
    of_tile: Sequence[str] = (),
    flags: Sequence[str] = (),
) -> str:
    """The function itself. Beside the mod's own parameters it has what is known `of_tile`, and
    `names`; `flags` say whether loads of other functions were in range."""
    if style.columns == KEYS:
        style = style._replace(conditions=Conditions(program))
    body, results, own = _body(program, style)
    if style.conditions and style.conditions.reads_near:
        body.insert(0, NEAR)
    if any(line.op == ALONG for line in program.instructions):
        given = ", ".join([*_OF_DIAGONALS, *names])
        body.insert(0, f"{ALONG} = {program.kind}_diagonals({given})")
    result = ", ".join(results)
    result = f"({result},)" if program.kind == "gradient" else result
    if program.kind == "score" and (valid := [*own, *flags]):
        body.append(f"{result} = tl.where({' & '.join(valid)}, {result}, float('nan'))")
    arguments = [*ARGUMENTS[program.kind], *of_tile, *names]
    return _function(f"{program.kind}_mod", arguments, body, result)


def _part(
    program: Program, style: _Style, name: str, index: str, names: list[str]
) -> tuple[str, list[int]]:
    """The function of rows or columns, and which of its results is a flag of its loads, if any."""
    body, results, valid = _body(program, style)
    flags = [len(results)] if valid and program.kind == "score" else []
    results += [" & ".join(valid)] if flags else []
    result = f"({', '.join(results or [index])},)"  # a tuple of nothing does not exist
    return _function(f"{program.kind}_{name}", ["b", "h", index, *names], body, result), flags


def _along(program: Program, style: _Style, names: list[str]) -> tuple[str, str]:
    """Functions of what a mod computes along diagonals: of a block, and of a tile."""
    kind, given = program.kind, "".join(f", {name}" for name in names)
    body, results, _ = _body(program, style)
    block = _function(
        f"{kind}_diagonal", ["b", "h", "q_idx", "kv_idx", *names], body, f"({', '.join(results)},)"
    )
    # Of 64 bits where only sums follow: what they add then becomes part of the addresses.
    dtype = "int64" if all(line.op in _SUMS for line in program.instructions) else "int32"
    sign = 1 if style.columns == "kv_idx" else -1
    at = f"gl.to_tensor(0), difference(corner, block, {sign}, tl.{dtype})"
    lines = [
        "found = ()",
        f"for block in gl.static_range({style.columns}.shape[1] // 8 + 1):",
        f"    found = found + ({kind}_diagonal(b, h, {at}{given}),)",
    ]
    whole = "".join(f"along_diagonals(found, {n}, q_idx, kv_idx), " for n in range(len(results)))
    arguments = [*_OF_DIAGONALS, *names]
    return block, _function(f"{kind}_diagonals", arguments, lines, f"({whole})", "gluon")


def _function(
    name: str, parameters: list[str], body: list[str], result: str, language: str = "triton"
) -> str:
    lines = [f"def {name}({', '.join(parameters)}):", *body, f"return {result}"]
    return f"@{language}.jit\n" + "\n    ".join(lines) + "\n"


def _body(program: Program, style: _Style) -> tuple[list[str], list[str], list[str]]:
    """Lines, the names of the results, and flags: whether a load was in range."""
    body: list[str] = []
    valid: list[str] = []

    def leaf(position: int, line: Instruction, args: tuple[str, ...]) -> str:
        name = f"v{position}"
        if line.op == "input":
            return str(line.attr)
        if line.op == "number":
            number = f"{style.prefix}n{line.attr}"
            truth = line.dtype == torch.bool
            body.append(
                f"{name} = {number} != 0" if truth
                else f"{name} = {style.scalar.format(number, _TYPES[line.dtype])}"
            )  # fmt: skip
        else:
            body.extend(_load(program, line, args, name, style.prefix, valid))
        return name

    def apply(line: Instruction, args: tuple[str, ...]) -> str:
        name, text = f"v{len(body)}_", None
        if style.conditions:
            args, text = style.conditions.spelled(name, line, args)
        body.append(f"{name} = {text or _spell(line, args, style)}")
        return name

    lines = interpret(program, leaf, apply)
    return body, [lines[n] for n in program.outputs], valid


def _spell(line: Instruction, args: tuple[str, ...], style: _Style) -> str:
    if line.op in (ROWS, ALONG):
        return f"{line.op}[{line.attr}]"
    if line.op == COLUMNS:
        return f"spread({COLUMNS}[{line.attr}], {style.columns})"
    if line.op == "cast" and line.dtype == torch.bool:
        return f"{args[0]} != 0"
    if line.op == "cast":
        return f"{args[0]}.to({_TYPES[line.dtype]})"
    if line.op == "round_to":
        half = "tl.float16" if line.attr == torch.float16 else "tl.bfloat16"
        return f"{args[0]}.to({half}).to(tl.float32)"
    row = TABLE[line.op]
    text = row.fast if style.fast and row.fast and line.dtype == torch.float32 else row.kernel
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
        dense = tensor.stride(axis) == 1
        address.append(index if dense else f"{index} * {base}_stride{axis}")
    read = f"tl.load({' + '.join(address)})"
    if tensor.dtype == torch.bool:
        read = f"({read} != 0)"
    elif tensor.dtype != line.dtype:
        read = f"{read}.to({_TYPES[line.dtype]})"
    return [*lines, f"{name} = {read}"]


def layout(tensor: torch.Tensor) -> tuple[bool, ...]:
    """What decides the text of a load, beside the tensor's type."""
    return (is_wide(tensor), *(stride == 1 for stride in tensor.stride()))


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
