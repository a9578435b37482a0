"""What a mod may look like, and that its program means the same."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import flexmod
from flexmod.program.evaluate import evaluate
from flexmod.program.specialize import specialize
from flexmod.testing import visible

B, H, Q, KV = 2, 3, 5, 7
AXES = ("b", "h", "q_idx", "kv_idx")
NUMBER = 3


def inputs():
    counts = dict(zip(AXES, (B, H, Q, KV), strict=True))
    found = {}
    for axis, (name, count) in enumerate(counts.items()):
        found[name] = torch.arange(count).view([-1] + [1] * (3 - axis))
    found["score"] = torch.randn(B, H, Q, KV)
    return found, counts


def check(mod):
    """A mod's program, plain and specialized, against the mod run position by position."""
    program = flexmod.trace(mod)
    given, extents = inputs()
    expected = torch.empty(B, H, Q, KV, dtype=program.dtype)
    for at in torch.cartesian_prod(*(torch.arange(n) for n in (B, H, Q, KV))):
        arguments = [given["score"][tuple(at)].clone()] if program.kind == "score" else []
        expected[tuple(at)] = mod(*arguments, *at)
    for version in (program, specialize(program, extents)):
        value, *_ = evaluate(version, given).values
        torch.testing.assert_close(value.expand(B, H, Q, KV), expected, rtol=1e-6, atol=1e-6)
    return program


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, score, b, h, q_idx, kv_idx):
        return score * self.factor

    def method(self, score, b, h, q_idx, kv_idx):
        return score * self.factor + q_idx


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.randn(H))

    def forward(self, score, b, h, q_idx, kv_idx):
        return score - self.slope[h] * (q_idx - kv_idx).abs()


def with_default(score, b, h, q_idx, kv_idx, factor=0.5):
    return score * factor


def taking_factor(factor, score, b, h, q_idx, kv_idx):
    return score * factor


def using_global(b, h, q_idx, kv_idx):
    return q_idx - kv_idx > NUMBER


CALLABLES = {
    "lambda": lambda score, b, h, q, k: score + q - k,
    "function with a default": with_default,
    "partial": functools.partial(taking_factor, 0.25),
    "partial by name": functools.partial(with_default, factor=2.0),
    "callable object": Scaled(3.0),
    "bound method": Scaled(2.0).method,
    "module": Learned(),
    "bound forward": Learned().forward,
    "global": using_global,
    "mask lambda": lambda b, h, q, k: (q >= k) & (h != 1),
    "variadic": lambda score, *indices: score + indices[3],
}


@pytest.mark.parametrize("name", sorted(set(CALLABLES) - {"variadic"}))
def test_callables(name):
    check(CALLABLES[name])


def test_a_variadic_mod_needs_its_kind():
    program = flexmod.trace(CALLABLES["variadic"], "score")
    assert program.reads == {"score", "kv_idx"}
    with pytest.raises(flexmod.TraceError, match="positional arguments"):
        flexmod.trace(CALLABLES["variadic"])


torch.manual_seed(0)
T1, T2, T3, T4 = torch.randn(7), torch.randn(7, 7), torch.randn(3, 7, 7), torch.randn(2, 3, 5, 7)
IDS, KEEP = torch.tensor([4, 0, 2, 6, 1, 3, 5]), torch.rand(7, 7) < 0.5
ONE, SCALAR, FLAG = torch.tensor([0.75]), torch.tensor(1.25), torch.tensor(True)
VECTORS, NEAR = torch.randn(7, 4), torch.randint(7, (7, 3), dtype=torch.int8)
READS = {
    "one axis": lambda s, b, h, q, k: s + T1[q],
    "two axes": lambda s, b, h, q, k: s + T2[q, k],
    "a chain": lambda s, b, h, q, k: s + T2[q][k],
    "a longer chain": lambda s, b, h, q, k: s + T3[h][q][k],
    "a mixed chain": lambda s, b, h, q, k: s + T4[b, h][q, k],
    "an int first": lambda s, b, h, q, k: s + T3[1, q, k],
    "an int in the middle": lambda s, b, h, q, k: s + T3[h, 2, k],
    "a negative int": lambda s, b, h, q, k: s + T3[-1, q, -2],
    "a negative index": lambda s, b, h, q, k: s + T1[q - 5] + T1[-k - 1],
    "ellipsis first": lambda s, b, h, q, k: s + T3[..., k][h, q],
    "ellipsis last": lambda s, b, h, q, k: s + T3[h, ...][q, k],
    "ellipsis in the middle": lambda s, b, h, q, k: s + T4[b, ..., k][h, q],
    "a slice": lambda s, b, h, q, k: s + T2[1:6][q % 5, k],
    "a slice after an index": lambda s, b, h, q, k: s + T2[q, 2:][k % 5],
    "a step": lambda s, b, h, q, k: s + T1[::2][q % 4],
    "none": lambda s, b, h, q, k: s + T1[None, q][0],
    "none after": lambda s, b, h, q, k: s + T1[q, None][0],
    "none on a matrix": lambda s, b, h, q, k: s + T2[:, None][q, 0, k],
    "an index through a table": lambda s, b, h, q, k: s + T2[IDS[q], IDS[k]],
    "a table of tables": lambda s, b, h, q, k: s + T1[IDS[IDS[q]]],
    "a transposed view": lambda s, b, h, q, k: s + T2.t()[q, k],
    "an expanded view": lambda s, b, h, q, k: s + T1[None].expand(7, 7)[q, k],
    "clamped": lambda s, b, h, q, k: s + T1[(q - k).clamp(0, 6)],
    "torch.take": lambda s, b, h, q, k: s + torch.take(T2, q * 7 + k),
    "gather": lambda s, b, h, q, k: s + torch.gather(T1, 0, q.view(1)).squeeze(),
    "index_select": lambda s, b, h, q, k: s + torch.index_select(T1, 0, q.view(1)).squeeze(),
    "index_select of a row": lambda s, b, h, q, k: s + torch.index_select(T2, 0, q.view(1))[0, k],
    "embedding": lambda s, b, h, q, k: s + nn.functional.embedding(q, VECTORS).sum(),
    "a dot": lambda s, b, h, q, k: s + torch.dot(VECTORS[q], VECTORS[k]),
    "a product and sum": lambda s, b, h, q, k: s + (VECTORS[q] * VECTORS[k]).sum(-1),
    "a matmul operator": lambda s, b, h, q, k: s + VECTORS[q] @ VECTORS[k],
    "a mean": lambda s, b, h, q, k: s + VECTORS[q].mean() - VECTORS[k].amax() + VECTORS[q].amin(),
    "a product": lambda s, b, h, q, k: s + VECTORS[q].prod(-1),
    "any of a vector": lambda b, h, q, k: (NEAR[q] == k.unsqueeze(-1)).any(dim=-1),
    "all of a vector": lambda b, h, q, k: torch.all(NEAR[q] != k[None]),
    "any of floats": lambda b, h, q, k: (VECTORS[q] * (k > 2)).any() | ((q - k) * 2).any(),
    "a count": lambda b, h, q, k: (NEAR[q] >= k[..., None]).sum(-1) >= 2,
    "a sum of small integers": lambda s, b, h, q, k: s + NEAR[q].sum() // (1 + k),
    "a product of flags": lambda s, b, h, q, k: s * (NEAR[q] > k).prod(),
    "one entry": lambda s, b, h, q, k: s + ONE,
    "one entry, indexed": lambda s, b, h, q, k: s + ONE[0],
    "a scalar tensor": lambda s, b, h, q, k: s * SCALAR,
    "a scalar index": lambda s, b, h, q, k: s + T1[torch.tensor(2)],
    "a flag": lambda s, b, h, q, k: torch.where(FLAG, s, -s),
    "a bool table": lambda s, b, h, q, k: torch.where(KEEP[q, k], s, -torch.inf),
    "int8": lambda s, b, h, q, k: s + IDS.to(torch.int8)[q],
    "a bfloat16 table": lambda s, b, h, q, k: s + T1.bfloat16()[q],
    "a float16 table": lambda s, b, h, q, k: s * T1.half()[k],
    "a float64 table": lambda s, b, h, q, k: s + T1.double()[k],
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_captured_tensors(name):
    program = check(READS[name])
    assert all(c.ndim for c in program.captures)  # scalars became run-time numbers


def inplace_alias(score, b, h, q, k):
    other = score
    score += q
    other *= 2
    return score


def inplace_methods(score, b, h, q, k):
    score = score.clone()
    score.mul_(2).add_(k)
    score -= 1
    score /= 4
    return score


def inplace_mask(score, b, h, q, k):
    far = (q - k).abs()
    far.clamp_(max=2)
    return score.masked_fill_(far == 2, 0.0)


WRITTEN = {
    "aliases": inplace_alias,
    "methods": inplace_methods,
    "masked_fill_": inplace_mask,
    "an int changed by a float": lambda s, b, h, q, k: s + (q * 1).to(torch.float32).add_(0.5),
    "zeros_like": lambda s, b, h, q, k: torch.where(q > k, s, torch.zeros_like(s)),
    "ones_like of another type": lambda s, b, h, q, k: s + torch.ones_like(q, dtype=torch.float32),
    "full_like": lambda s, b, h, q, k: torch.maximum(s, torch.full_like(s, 0.5)),
    "new_zeros": lambda s, b, h, q, k: s + s.new_zeros(()) + s.new_ones(()),
    "new_full": lambda s, b, h, q, k: torch.minimum(s, s.new_full((), 0.25)),
    "new_tensor": lambda s, b, h, q, k: s + s.new_tensor(1.5),
    "tensor": lambda s, b, h, q, k: s + torch.tensor(0.25),
    "casts": lambda s, b, h, q, k: s.double() + q.float() / (k.int() + 1) + (q > k).long(),
    "half and back": lambda s, b, h, q, k: s.half().float() + s.to(torch.bfloat16).float(),
    "int results": lambda s, b, h, q, k: q - k,
    "bool results": lambda s, b, h, q, k: q >= k,
    "constants": lambda s, b, h, q, k: 0.5,
    "an integer division": lambda s, b, h, q, k: s + (q - k) // 3 + (q - k) % 3,
    "python bools in where": lambda s, b, h, q, k: torch.where(
        torch.where(q < 3, torch.where(k < 4, True, False), False), s, 0.0
    ),
    "precedence": lambda b, h, q, k: (q >= k) & b % 2 == 0,
    "a chain of logic": lambda b, h, q, k: ~(q < k) | ((h == 1) ^ (b == 0)),
    "a constant mask": lambda b, h, q, k: True,
    "unused arguments": lambda b, h, q, k: q == q,
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_ways_of_writing(name):
    check(WRITTEN[name])


def test_equal_lines_are_recorded_once():
    program = flexmod.trace(lambda s, b, h, q, k: s + T1[q - k] * T1[q - k] + (q - k))
    operations = [line.op for line in program.instructions]
    assert operations.count("sub") == 1 and operations.count("load") == 1


def test_a_program_knows_what_it_reads():
    assert flexmod.trace(lambda b, h, q, k: q >= k).reads == {"q_idx", "kv_idx"}
    assert flexmod.trace(lambda b, h, q, k: T1[b] > h).reads == {"b", "h"}
    assert flexmod.trace(lambda s, b, h, q, k: T1[k] + 0 * q).reads == {"q_idx", "kv_idx"}
    dead = flexmod.trace(lambda s, b, h, q, k: (T1[h], s)[1])
    assert dead.reads == {"score"} and not dead.captures


def test_a_program_prints_one_instruction_a_line():
    text = str(flexmod.trace(lambda s, b, h, q, k: s + T1[q] * 0.5)).splitlines()
    assert text[0].endswith("(score, q_idx)") and text[0].startswith("score_mod")
    assert [line.split()[2] for line in text[1:-1]] == [
        "score", "q_idx", "capture0[7][%1]", "0.5", "mul", "add",
    ]  # fmt: skip
    assert text[-1] == "  return %5"


def scaled(value):
    return lambda score, b, h, q_idx, kv_idx: score * value + (q_idx > value)


@pytest.mark.parametrize("pair", [(0.5, 3.0), (2, 7), (1.0, 1.5)], ids=str)
def test_numbers_are_run_time_arguments(pair):
    first, second = (flexmod.trace(scaled(v)) for v in pair)
    assert first.structure == second.structure and hash(first.structure) == hash(second.structure)
    assert first.numbers != second.numbers
    for value in pair:
        check(scaled(value))


def test_captures_are_run_time_arguments():
    reading = lambda table: flexmod.trace(lambda s, b, h, q, k: s + table[q])
    first, second = reading(torch.randn(7)), reading(torch.randn(90))
    assert first.structure == second.structure
    assert reading(torch.arange(7)).structure != first.structure


def test_one_tensor_is_captured_once():
    program = flexmod.trace(lambda s, b, h, q, k: s + T2[q, k] + T2[k, q] + T2[q][k])
    assert len(program.captures) == 1
    views = flexmod.trace(lambda s, b, h, q, k: s + T2.t()[q, k] + T2.t()[k, q])
    assert len(views.captures) == 1


def test_the_oracle_agrees_on_a_mask():
    mask = lambda b, h, q, k: KEEP[q, k] & (IDS[q] != IDS[k])
    given, _ = inputs()
    value = evaluate(flexmod.trace(mask), given).values[0].expand(B, H, Q, KV)
    assert torch.equal(value, visible(mask, B, H, Q, KV))


@pytest.mark.parametrize("limit", [2**31 - 1, -(2**31), 2**40, -(2**40)])
def test_numbers_past_int32_and_tables_of_it(limit):
    """Up to its ends they meet as int32; beyond, .long() gives int64 arithmetic."""
    table = torch.tensor([0, 7, 2**31 - 1, -(2**31)], dtype=torch.int32)
    wide = abs(limit) > 2**31
    mask = lambda b, h, q, k: (table[q].long() - limit < k) if wide else (table[q] <= limit)
    expected = (
        (table.long()[:, None] - limit < torch.arange(4)) if wide else (table <= limit)[:, None]
    )
    assert torch.equal(flexmod.create_mask(mask, 1, 1, 4, 4, "cpu")[0, 0], expected.expand(4, 4))
    made = flexmod.create_block_mask(mask, 1, 1, 4, 4, "cpu", BLOCK_SIZE=2)
    assert torch.equal(made.dense()[0, 0], expected.expand(4, 4))
    flexmod.testing.check_block_mask(made, mask)
