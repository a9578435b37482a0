"""What the emitted Triton functions compute is what torch computes, in Triton's interpreter."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from flexmod.kernels.launch import readable
from flexmod.kernels.templates import device_functions
from flexmod.program.emit import emit, values
from flexmod.program.evaluate import evaluate
from flexmod.program.ops import TABLE
from flexmod.program.specialize import specialize

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("a GPU is there: the interpreter is off", allow_module_level=True)

_KERNEL = """import triton
import triton.language as tl


{functions}


{function}

@triton.jit
def kernel(OUT, {parameters}SIZE: tl.constexpr):
    q_idx = tl.arange(0, SIZE)
    value = score_mod(0.0, 0, 0, q_idx, 0{passed})
    tl.store(OUT + q_idx, tl.broadcast_to(value, [SIZE]).to(OUT.dtype.element_ty))
"""


def run(program, size, dtype, folder):
    """The values of a program at q_idx = 0 .. size - 1, from a kernel."""
    narrow = specialize(program, {"q_idx": size})
    function = emit(narrow, "x_")
    names = [name for name, _ in function.parameters]
    typed = [f'{name}: "{kind}", ' if kind else f"{name}, " for name, kind in function.parameters]
    text = _KERNEL.format(
        functions=device_functions(function.text),
        function=function.text,
        parameters="".join(typed),
        passed="".join(f", {name}" for name in names),
    )
    path = folder / "module.py"  # Triton reads the source of its functions
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("module_under_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    out = torch.empty(size, dtype=torch.int8 if dtype == torch.bool else dtype)
    tensors = map(readable, narrow.captures)
    module.kernel[(1,)](out, *tensors, *values(narrow), SIZE=size)
    return (out != 0) if dtype == torch.bool else out


def test_kernels_compute_what_torch_computes(real_case, real, operands_of, recorded, tmp_path):
    values = operands_of(real_case, real)
    program = recorded(function_of(real_case), *values)
    size = next(len(v) for v in values if isinstance(v, torch.Tensor))
    expected = evaluate(program, {"q_idx": torch.arange(size)}).values[0].expand(size)
    actual = run(program, size, expected.dtype, tmp_path)
    if not expected.is_floating_point():
        wrong = actual != expected
    else:
        wrong = ~close(actual, expected, [v for v in values if isinstance(v, torch.Tensor)])
        if any(line.op == "pow" for line in program.instructions):
            wrong &= ~near_power(actual, expected)
    if wrong.any():
        at = int(wrong.nonzero()[0])
        given = [v[at].item() if isinstance(v, torch.Tensor) else v for v in values]
        pytest.fail(
            f"{given} -> {actual[at].item()!r}, torch {expected[at].item()!r}; "
            f"{int(wrong.sum())} differ"
        )


def function_of(case):
    name = case.name.rpartition(".")[2]
    home = {"F": torch.nn.functional, "special": torch.special}.get(case.name.partition(".")[0])
    home = home or torch
    if not name.startswith("__") and hasattr(home, name):
        return lambda *a: getattr(home, name)(*a, **case.options)
    return lambda x, *rest: getattr(x, name)(*rest, **case.options)


def close(actual, expected, operands):
    """Within a few units in the last place, of the result or (sums cancel) of the operands."""
    eps = torch.finfo(expected.dtype).eps
    size = torch.stack([v.double().abs().nan_to_num(0, 0, 0) for v in operands]).amax(0)
    same = torch.isclose(actual, expected, rtol=16 * eps, atol=0.0, equal_nan=True)
    near = (actual.double() - expected.double()).abs() <= 16 * eps * size.clamp(max=1.0)
    tiny = expected.abs() < 2 * torch.finfo(expected.dtype).tiny  # flushed to 0
    return same | near | (tiny & (actual.abs() < 2 * torch.finfo(expected.dtype).tiny))


def near_power(actual, expected):
    """x ** y is computed as exp2(y log2(x)): the exponent's rounding counts."""
    units = 4 + expected.double().abs().log2().abs().nan_to_num(0, 0, 0)
    return (actual / expected - 1).abs() <= units * torch.finfo(expected.dtype).eps


def test_device_functions_are_all_used():
    """A function of the template that no row spells would never be looked at."""
    texts = [row.kernel for row in TABLE.values()] + [r.fast for r in TABLE.values() if r.fast]
    found = device_functions("\n".join(texts) + "dropout_keep(")
    every = device_functions("".join(f"{n}(" for n in _names()))
    assert found == every


def _names():
    import re
    from pathlib import Path

    source = Path(__file__).parents[2] / "templates/functions.py.jinja"
    return re.findall(r"^def (\w+)\(", source.read_text(), re.MULTILINE)
