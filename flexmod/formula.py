"""A program as a formula that people read: sympy, as plain text.

A formula is for reading only. Roundings and casts between widths are left out, numbers show six
digits, and nothing is simplified beyond what sympy does by itself when it builds an expression.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from flexmod.program import Program
from flexmod.program.ir import Instruction, Load, interpret

LONGEST = 200  # operations; a longer formula helps nobody


def formula(program: Program) -> str:
    """The result of a program as one line of text.

    Captured tensors are `capture0`, `capture1`, ... as in the program's own text. An operation
    that sympy has no word for is written as a function of its name. A formula of more than
    LONGEST operations is not written out: shared values would be repeated at each use.

    Example:
        >>> import flexmod
        >>> print(formula(flexmod.trace(flexmod.mods.softcap(20.0))))
        20*tanh(score/20)
        >>> print(formula(flexmod.trace(flexmod.masks.sliding_window(4))))
        (kv_idx >= q_idx - 3) & (kv_idx <= q_idx)
    """
    length = _written_length(program)
    if length > LONGEST:
        return f"(a formula of {length} operations: see the program)"
    return _printer().doprint(expression(program))


def expression(program: Program) -> Any:
    """The result of a program as a sympy expression: boolean for a mask, real for a score."""
    import sympy

    rules = _rules()

    def leaf(_: int, line: Instruction, args: tuple[Any, ...]) -> Any:
        match line.attr:
            case Load(slot=slot):
                name, kind = f"capture{slot}", _assumptions(line.dtype)
                base = sympy.IndexedBase(name, **kind)
                read = base[args] if args else sympy.Symbol(name, **kind)
                return sympy.Ne(read, 0) if line.dtype == torch.bool else read
            case int(slot) if line.op == "number":
                return _number(program.numbers[slot])
        whole = line.attr != "score"
        return sympy.Symbol(str(line.attr), real=True, integer=whole, nonnegative=whole or None)

    def apply(line: Instruction, args: tuple[Any, ...]) -> Any:
        source = program.instructions[line.args[0]].dtype
        truth = _truth_tested(line, args)
        if truth is not None:
            return truth
        if line.op in ("cast", "round_to"):
            return _cast(args[0], source, line.dtype)
        truths = source == torch.bool
        rule = rules.get(f"{line.op}_bool" if truths else line.op) or rules.get(line.op)
        try:
            return rule(*args) if rule else _named(line, args)
        except (TypeError, ValueError, AttributeError):  # sympy takes no such operands there
            return _named(line, args)

    return interpret(program, leaf, apply)[program.outputs[0]]


def _assumptions(dtype: torch.dtype) -> dict[str, bool]:
    """What sympy may believe of a value: it refuses to compare what may be complex."""
    return {"real": True} if dtype.is_floating_point else {"integer": True}


def _number(value: float) -> Any:
    import sympy

    if isinstance(value, float) and not value.is_integer() and math.isfinite(value):
        return sympy.Float(value, 6)
    return sympy.sympify(int(value) if isinstance(value, float) and math.isfinite(value) else value)


def _written_length(program: Program) -> int:
    """Operations of the formula once every shared value is repeated."""
    return interpret(
        program,
        lambda _, line, args: sum(args),
        lambda line, args: 1 + sum(args),
    )[program.outputs[0]]


def _named(line: Instruction, args: tuple[Any, ...]) -> Any:
    """An operation as a function of its own name."""
    import sympy

    value = sympy.Function(line.op, **_assumptions(line.dtype))(*args)
    return sympy.Ne(value, 0) if line.dtype == torch.bool else value


def _cast(x: Any, source: torch.dtype, wanted: torch.dtype) -> Any:
    """Only casts that change the kind of a value are written."""
    import sympy

    if wanted == torch.bool:
        return x if source == torch.bool else sympy.Ne(x, 0)
    if source == torch.bool:
        return sympy.Function("number", integer=True)(x)
    if source.is_floating_point and not wanted.is_floating_point:
        return sympy.Function("trunc", integer=True)(x)
    return x


def _truth_tested(line: Instruction, args: tuple[Any, ...]) -> Any:
    """The condition c of number(c) != 0, which is how a mask reads a table of truth values."""
    from sympy.core.function import AppliedUndef

    is_test = line.op == "ne" and isinstance(args[0], AppliedUndef) and args[1] == 0
    return args[0].args[0] if is_test and args[0].func.__name__ == "number" else None


def _rules() -> dict[str, Callable[..., Any]]:
    """Operation -> sympy. `<name>_bool` is the form for operands that are truth values."""
    import sympy as s

    return {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "truediv": lambda a, b: a / b,
        "floordiv": lambda a, b: s.floor(a / b),
        "floordiv_natural": lambda a, b: s.floor(a / b),
        "mod": s.Mod,
        "mod_natural": s.Mod,
        "neg": lambda a: -a,
        "abs": s.Abs,
        "sign": s.sign,
        "pow": lambda a, b: a**b,
        "minimum": lambda a, b: s.Min(a, b, evaluate=False),
        "maximum": lambda a, b: s.Max(a, b, evaluate=False),
        "amin": lambda a, b: s.Min(a, b, evaluate=False),
        "amax": lambda a, b: s.Max(a, b, evaluate=False),
        "eq": s.Eq,
        "eq_bool": s.Equivalent,
        "ne": s.Ne,
        "ne_bool": s.Xor,
        "lt": s.Lt,
        "le": s.Le,
        "gt": s.Gt,
        "ge": s.Ge,
        "and_bool": s.And,
        "or_bool": s.Or,
        "xor_bool": s.Xor,
        "not_bool": s.Not,
        "not": lambda a: s.Eq(a, 0),
        "exp": s.exp,
        "exp2": lambda a: s.Integer(2) ** a,
        "expm1": lambda a: s.exp(a) - 1,
        "log": s.log,
        "log1p": lambda a: s.log(1 + a),
        "log2": lambda a: s.log(a, 2),
        "sqrt": s.sqrt,
        "rsqrt": lambda a: 1 / s.sqrt(a),
        "tanh": s.tanh,
        "sigmoid": lambda a: 1 / (1 + s.exp(-a)),
        "sin": s.sin,
        "cos": s.cos,
        "erf": s.erf,
        "floor": s.floor,
        "ceil": s.ceiling,
    }


def _printer() -> Any:
    """Plain text with Python's own signs, so that a mask reads as its author wrote it."""
    from sympy import Symbol
    from sympy.printing.str import StrPrinter

    class Printer(StrPrinter):
        def _print_Relational(self, expr: Any) -> str:
            return f"{self._print(expr.lhs)} {expr.rel_op} {self._print(expr.rhs)}"

        def _joined(self, sign: str, expr: Any) -> str:
            parts = sorted(expr.args, key=lambda part: part.sort_key())
            return sign.join(
                self._print(p) if isinstance(p, Symbol) else f"({self._print(p)})" for p in parts
            )

        def _print_And(self, expr: Any) -> str:
            return self._joined(" & ", expr)

        def _print_Or(self, expr: Any) -> str:
            return self._joined(" | ", expr)

        def _print_Xor(self, expr: Any) -> str:
            return self._joined(" ^ ", expr)

    return Printer({"full_prec": False})
