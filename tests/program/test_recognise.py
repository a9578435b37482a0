"""A mod is traced again unless everything that it can read is what it was."""

from __future__ import annotations

import functools
import math
import random
import types

import pytest
import torch

import flexmod
from flexmod import cache, masks, mods
from flexmod.program import recognise


@pytest.fixture(autouse=True)
def _nothing_known():
    recognise.forget()


def traces(mod, **arguments):
    """The program of a mod, and whether it was traced for it."""
    before = cache.stats().traces
    program = flexmod.trace(mod, **arguments)
    return program, cache.stats().traces - before == 1


def is_known(mod, **arguments):
    return not traces(mod, **arguments)[1]


TABLE = torch.arange(12.0).view(2, 6)
LIBRARY = {
    "alibi": lambda: mods.alibi(2),
    "bias": lambda: mods.bias(torch.zeros(2, 1, 1)),
    "relative_bias": lambda: mods.relative_bias(torch.zeros(2, 5)),
    "composed": lambda: flexmod.compose(mods.softcap(3.0), mods.alibi(2)),
    "distance_penalty": lambda: mods.distance_penalty("log"),
    "head_scale": lambda: mods.head_scale(torch.ones(2)),
    "causal": lambda: masks.causal(),
    "combined": lambda: masks.and_masks(masks.causal(), masks.sliding_window(3)),
    "document": lambda: masks.document(torch.zeros(2, 8, dtype=torch.long)),
    "shift": lambda: masks.shift(masks.causal(), 3),
    "partial": lambda: functools.partial(_scaled, factor=2.0),
    "helper": lambda: lambda s, b, h, q, k: s + _half(q - k) * math.pi,
}


def _scaled(score, b, h, q_idx, kv_idx, *, factor):
    return score * factor


def _half(x):
    return torch.nn.functional.relu(x * 0.5)


@pytest.mark.parametrize("name", LIBRARY)
def test_the_same_mod_is_traced_once(name):
    mod = LIBRARY[name]()
    first, traced = traces(mod)
    again, repeated = traces(mod)
    assert traced and not repeated
    assert str(again) == str(first) and again.identity == first.identity
    assert all(a is b for a, b in zip(again.captures, first.captures, strict=True))
    assert is_known(LIBRARY[name]())  # another function of the same code, numbers and shapes


def test_a_table_of_the_same_shape_takes_the_place_of_the_first():
    def made(table):
        return lambda s, b, h, q, k: s + table[h, k]

    flexmod.trace(made(TABLE))
    other = TABLE + 1
    program, traced = traces(made(other))
    assert not traced and program.captures[0] is other


def _made(number=2.0, table=TABLE, steps=(1, 2), helper=torch.exp, default=1):
    def mod(score, b, h, q_idx, kv_idx, power=default):
        for step in steps:
            score = score * step
        return helper(score * number) ** power + table[h, kv_idx]

    return mod


CHANGES = {
    "number": {"number": 3.0},
    "type of a number": {"number": 2},
    "sign of zero": {"number": -0.0},
    "dtype": {"table": TABLE.double()},
    "shape": {"table": TABLE[:, :5]},
    "strides": {"table": TABLE.t().contiguous().t()},
    "gradient": {"table": TABLE.clone().requires_grad_()},
    "class": {"table": torch.nn.Parameter(TABLE.clone(), requires_grad=False)},
    "list": {"steps": [1, 2]},
    "entry": {"steps": (1, 3)},
    "helper": {"helper": torch.sin},
    "own helper": {"helper": lambda x: x + 1},
    "default": {"default": 2},
}


@pytest.mark.parametrize("name", CHANGES)
def test_any_other_ingredient_is_traced(name):
    zero = {"number": 0.0} if name == "sign of zero" else {}
    flexmod.trace(_made(**zero))
    assert is_known(_made(**zero))
    assert not is_known(_made(**CHANGES[name]))


def test_the_type_of_the_score_and_the_default_dtype_count():
    mod = _made()
    flexmod.trace(mod)
    assert not is_known(mod, score_dtype=torch.float64)
    assert not is_known(mod, device="meta")
    torch.set_default_dtype(torch.float64)
    try:
        assert not is_known(mod)
    finally:
        torch.set_default_dtype(torch.float32)
    assert is_known(mod)


def test_tensors_that_become_one_are_noticed():
    def made(x, y):
        return lambda s, b, h, q, k: s + x[k] - y[q]

    first, second = torch.zeros(4), torch.ones(4)
    assert len(flexmod.trace(made(first, second)).captures) == 2
    program, traced = traces(made(first, first))
    assert traced and len(program.captures) == 1
    program, traced = traces(made(first, second))
    assert not traced and program.captures[1] is second
    view = first.view(4)  # another tensor that shows the same memory
    assert len(flexmod.trace(made(first, view)).captures) == 1


def test_closures_and_defaults_are_read_each_time():
    number = 2.0

    def mod(score, b, h, q_idx, kv_idx, factor=1.0):
        return score * number * factor

    assert flexmod.trace(mod).numbers == (2.0, 1.0)
    number = 5.0
    assert flexmod.trace(mod).numbers == (5.0, 1.0)
    mod.__defaults__ = (7.0,)
    assert flexmod.trace(mod).numbers == (5.0, 7.0)
    mod.__code__ = _other.__code__.replace(co_freevars=("number",))
    assert flexmod.trace(mod).instructions[-1].op == "add"


def _other(score, b, h, q_idx, kv_idx, factor=1.0):
    return score + factor


def test_globals_and_modules_are_read_each_time(monkeypatch):
    names = {"torch": torch, "rate": 2.0, "helper": _half, "other": types.ModuleType("other")}
    names["other"].tanh = torch.tanh
    text = "def mod(s, b, h, q, k):\n    return helper(other.tanh(s * rate)) + torch.exp(s)\n"
    exec(text, names)
    operations = lambda: [line.op for line in flexmod.trace(names["mod"]).instructions]
    assert operations() and is_known(names["mod"])
    names["rate"] = 3.0
    assert 3.0 in flexmod.trace(names["mod"]).numbers
    names["other"].tanh = torch.sin
    assert "sin" in operations() and "tanh" not in operations()
    monkeypatch.setattr(torch, "exp", torch.cos)
    assert "cos" in operations() and is_known(names["mod"])
    names["helper"] = lambda x: x.abs()
    assert "abs" in operations()


class Holder:
    """Anything may happen to its attributes."""

    rate = 2.0

    def method(self, score, b, h, q_idx, kv_idx):
        return score * self.rate

    def __call__(self, score, b, h, q_idx, kv_idx):
        return score * self.rate


class Module(torch.nn.Module):
    rate = 2.0

    def forward(self, score, b, h, q_idx, kv_idx):
        return score * self.rate


HOLDER, COUNT, SCALAR = Holder(), [0], torch.tensor(2.0)


def _counts(score, b, h, q_idx, kv_idx):
    COUNT[0] += 1
    return score


def _imports(score, b, h, q_idx, kv_idx):
    import math

    return score * math.pi


UNKNOWN = {
    "object": HOLDER,
    "bound method": HOLDER.method,
    "module": Module(),
    "attribute": lambda s, b, h, q, k: s * HOLDER.rate,
    "side effect": _counts,
    "import": _imports,
    "random": lambda s, b, h, q, k: s * random.random(),
    "state of torch": lambda s, b, h, q, k: s * (2 if torch.is_grad_enabled() else 3),
    "0-dim tensor": lambda s, b, h, q, k: s * SCALAR,
    "value of a tensor": lambda s, b, h, q, k: s * float(TABLE[0, 1]),
    "decision by a tensor": lambda s, b, h, q, k: s * 2 if TABLE.sum() > 0 else s,
    "list of a tensor": lambda s, b, h, q, k: s * max(TABLE[0].max(), 0),
    "entries of a tensor": lambda s, b, h, q, k: s + torch.dot(TABLE[0, :2], TABLE[1, :2] * s),
    "made in the mod": lambda s, b, h, q, k: s + (TABLE * 2)[h, k],
    "part of a tensor": lambda s, b, h, q, k: s + TABLE[1][k],
    "constant tensor": lambda s, b, h, q, k: s + torch.tensor(3.0),
    "long list": (lambda many: lambda s, b, h, q, k: s * many[3])([1.0] * 1000),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_followed_is_traced_each_time(name):
    flexmod.trace(UNKNOWN[name])
    assert not is_known(UNKNOWN[name])


def test_a_mod_that_depends_on_values_follows_them():
    table = torch.tensor([1.0, 2.0])
    mod = lambda s, b, h, q, k: s * table.max().item()
    assert flexmod.trace(mod).numbers == (2.0,)
    table[0] = 9.0
    assert flexmod.trace(mod).numbers == (9.0,)


def test_a_trace_keeps_no_tensor_alive():
    import gc
    import weakref

    table = torch.zeros(3)
    held = weakref.ref(table)
    mod = (lambda t: lambda s, b, h, q, k: s + t[k])(table)
    flexmod.trace(mod), flexmod.trace(mod)
    del mod, table
    gc.collect()
    assert held() is None


def test_transforms_are_traced():
    mod = _made()
    flexmod.trace(mod)

    def inside(x):
        assert not is_known(mod)
        return x

    torch.vmap(inside)(torch.zeros(2))
    assert is_known(mod)


def test_errors_are_raised_each_time():
    def mod(score, b, h, q_idx, kv_idx):
        return score if score > 0 else -score

    for _ in range(2):
        with pytest.raises(flexmod.errors.TraceError, match="truth value"):
            flexmod.trace(mod)
    with pytest.raises(flexmod.errors.TraceError, match=r"5 positional|expected mask"):
        flexmod.trace(_made(), "mask")
