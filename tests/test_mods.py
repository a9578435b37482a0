from __future__ import annotations

import math

import pytest
import torch

from flexmod import mods
from flexmod.errors import ArgumentError

B, H, Q, KV = 2, 3, 5, 7


def rand(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


SCORE = 3 * rand(B, H, Q, KV)


def apply(mod, score=SCORE):
    """The mod at every position of score [B, H, Q, KV], under one vmap an index."""
    for axis in (3, 2, 1, 0):
        mod = torch.vmap(mod, in_dims=(0, *(0 if n == axis else None for n in range(4))))
    return mod(score, *(torch.arange(extent) for extent in score.shape))


def by_hand(formula, score=SCORE):
    """The same from a formula of Python numbers."""
    result = torch.empty_like(score)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in score.shape)).tolist():
        result[tuple(place)] = formula(score[tuple(place)].item(), *place)
    return result


def entry(table, *index):
    return table[index].item()


SLOPES = rand(H).abs()
RELATIVE, RELATIVE_SHARED, RELATIVE_WIDE = rand(H, 5), rand(5), rand(H, 13)
BUCKETS = rand(8, H)
FULL, ROWS, HEADS, KEYS, ONE = rand(B, H, Q, KV), rand(Q, 1), rand(H, 1, 1), rand(KV), rand(1, 1)
BATCH_KEYS = rand(B, 1, 1, KV)
SWIN = rand(5 * 3, H)
IMAGE = rand(B, H, 6, 6)


def clipped(offset, reach):
    return min(max(offset, -reach), reach) + reach


def t5_bucket(offset, num_buckets, bidirectional, max_distance):
    """In integers: d is past the k-th edge if (d/exact)**n >= (max_distance/exact)**k."""
    side = num_buckets // 2 if bidirectional else num_buckets
    distance = abs(offset) if bidirectional else max(-offset, 0)
    exact, first = side // 2, side if bidirectional and offset > 0 else 0
    if distance < exact:
        return first + distance
    n = side - exact
    past = [k for k in range(n) if distance**n * exact**k >= max_distance**k * exact**n]
    return first + exact + max(past)


def swin_entry(i, j, h):
    """A 3 x 2 window, its tokens written out."""
    at = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    down, right = at[i][0] - at[j][0], at[i][1] - at[j][1]
    return entry(SWIN.reshape(5, 3, H), down + 2, right + 1, h)


CASES = {
    "identity": (mods.identity, lambda s, b, h, i, j: s),
    "softcap": (mods.softcap(2), lambda s, b, h, i, j: 2 * math.tanh(s / 2)),
    "temperature": (mods.temperature(2.5), lambda s, b, h, i, j: s / 2.5),
    "temperature of heads": (mods.temperature(SLOPES),
                             lambda s, b, h, i, j: s / entry(SLOPES, h)),
    "head_scale": (mods.head_scale(SLOPES), lambda s, b, h, i, j: s * entry(SLOPES, h)),
    "head_scale list": (mods.head_scale([1.0, 0.5, -2.0]),
                        lambda s, b, h, i, j: s * (1.0, 0.5, -2.0)[h]),
    "head_bias": (mods.head_bias(SLOPES), lambda s, b, h, i, j: s + entry(SLOPES, h)),
    "head_bias number": (mods.head_bias(-1), lambda s, b, h, i, j: s - 1),
    "log_length": (mods.log_length(0.5), lambda s, b, h, i, j: s * 0.5 * math.log(i + 1)),
    "log_length of heads": (mods.log_length(SLOPES),
                            lambda s, b, h, i, j: s * entry(SLOPES, h) * math.log(i + 1)),
    "position_scale": (mods.position_scale(3),
                       lambda s, b, h, i, j: s * (1 if i < 3 else math.log(i + 1) / math.log(3))),
    "alibi": (mods.alibi(SLOPES), lambda s, b, h, i, j: s + entry(SLOPES, h) * (j - i)),
    "alibi heads": (mods.alibi(3),
                    lambda s, b, h, i, j: s + (1 / 16, 1 / 256, 1 / 4)[h] * (j - i)),
    "alibi symmetric": (mods.alibi([0.5, 0.25, 1.0], symmetric=True),
                        lambda s, b, h, i, j: s - (0.5, 0.25, 1.0)[h] * abs(i - j)),
    "linear": (mods.distance_penalty("linear", 0.3),
               lambda s, b, h, i, j: s - 0.3 * abs(i - j)),
    "log": (mods.distance_penalty("log", SLOPES, 2.0),
            lambda s, b, h, i, j: s - entry(SLOPES, h) * math.log(1 + 2 * abs(i - j))),
    "power": (mods.distance_penalty("power", 0.5, SLOPES),
              lambda s, b, h, i, j: s - 0.5 * abs(i - j) ** entry(SLOPES, h)),
    "gaussian": (mods.gaussian_window(2), lambda s, b, h, i, j: s - (i - j) ** 2 / 8),
    "gaussian of heads": (mods.gaussian_window(torch.tensor([1.0, 2.0, 4.0])),
                          lambda s, b, h, i, j: s - (i - j) ** 2 / (2, 8, 32)[h]),
    "relative": (mods.relative_bias(RELATIVE),
                 lambda s, b, h, i, j: s + entry(RELATIVE, h, clipped(j - i, 2))),
    "relative shared": (mods.relative_bias(RELATIVE_SHARED),
                        lambda s, b, h, i, j: s + entry(RELATIVE_SHARED, clipped(j - i, 2))),
    "relative unclamped": (mods.relative_bias(RELATIVE_WIDE, clamp=False),
                           lambda s, b, h, i, j: s + entry(RELATIVE_WIDE, h, j - i + 6)),
    "t5": (mods.t5_bias(BUCKETS, max_distance=5),
           lambda s, b, h, i, j: s + entry(BUCKETS, t5_bucket(j - i, 8, True, 5), h)),
    "t5 decoder": (mods.t5_bias(BUCKETS, bidirectional=False),
                   lambda s, b, h, i, j: s + entry(BUCKETS, t5_bucket(j - i, 8, False, 128), h)),
    "bias": (mods.bias(FULL), lambda s, b, h, i, j: s + entry(FULL, b, h, i, j)),
    "bias of rows": (mods.bias(ROWS), lambda s, b, h, i, j: s + entry(ROWS, i, 0)),
    "bias of heads": (mods.bias(HEADS), lambda s, b, h, i, j: s + entry(HEADS, h, 0, 0)),
    "bias of keys": (mods.bias(KEYS), lambda s, b, h, i, j: s + entry(KEYS, j)),
    "bias of batch": (mods.bias(BATCH_KEYS),
                      lambda s, b, h, i, j: s + entry(BATCH_KEYS, b, 0, 0, j)),
    "bias view": (mods.bias(rand(KV, Q).T),
                  lambda s, b, h, i, j: s + entry(rand(KV, Q), j, i)),
    "bias of one": (mods.bias(ONE), lambda s, b, h, i, j: s + ONE.item()),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_mod_equals_its_formula(case):
    mod, formula = CASES[case]
    torch.testing.assert_close(apply(mod), by_hand(formula), rtol=1e-6, atol=1e-6)


def test_swin_bias_on_a_window_of_three_rows_of_two():
    expected = by_hand(lambda s, b, h, i, j: s + swin_entry(i, j, h), IMAGE)
    result = apply(mods.swin_2d_bias(3, 2, SWIN), IMAGE)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


def test_every_mod_has_a_case():
    made = {mod.__name__ for mod, _ in CASES.values()} | {"swin_2d_bias"}
    assert set(mods.__all__) - {"alibi_slopes", "t5_buckets"} == made


def test_softcap_bounds_the_score():
    capped = mods.softcap(20.0)(torch.tensor(100.0, dtype=torch.float64), 0, 0, 0, 0)
    assert abs(capped.item() - 19.998184) < 1e-6


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [
        (1, [8]),
        (2, [4, 8]),
        (4, [2, 4, 6, 8]),
        (6, [2, 4, 6, 8, 1, 3]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
    ],
)
def test_alibi_slopes(heads, exponents):
    slopes = mods.alibi_slopes(heads)
    assert slopes.dtype == torch.float32
    torch.testing.assert_close(slopes, torch.tensor([2.0**-e for e in exponents]))


@pytest.mark.parametrize(
    ("num_buckets", "bidirectional", "max_distance"),
    [(32, True, 128), (32, False, 128), (8, True, 20), (6, True, 9), (5, False, 7), (4, True, 2)],
)
def test_t5_buckets_equal_integer_arithmetic(num_buckets, bidirectional, max_distance):
    reach = range(-max_distance, max_distance + 1)
    buckets = mods.t5_buckets(num_buckets, bidirectional, max_distance)
    expected = [t5_bucket(d, num_buckets, bidirectional, max_distance) for d in reach]
    assert buckets.tolist() == expected
    assert set(expected) <= set(range(num_buckets))


def test_t5_buckets_of_the_published_setting():
    first_distances = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
    buckets = mods.t5_buckets(32)
    past, future = buckets[:129].flip(0).tolist(), buckets[128:].tolist()
    assert [past.index(bucket) for bucket in range(16)] == first_distances
    assert [future.index(bucket) for bucket in range(17, 32)] == first_distances[1:]


LEARNED = {
    "alibi": (mods.alibi, (H,)),
    "alibi symmetric": (lambda t: mods.alibi(t, symmetric=True), (H,)),
    "head_scale": (mods.head_scale, (H,)),
    "head_scale scalar": (mods.head_scale, ()),
    "head_bias": (mods.head_bias, (H,)),
    "temperature": (mods.temperature, (H,)),
    "log_length": (mods.log_length, (H,)),
    "gaussian_window": (mods.gaussian_window, (H,)),
    "log penalty": (lambda t: mods.distance_penalty("log", t, t), (H,)),
    "power penalty": (lambda t: mods.distance_penalty("power", t, t), (H,)),
    "relative_bias": (mods.relative_bias, (H, 5)),
    "t5_bias": (lambda t: mods.t5_bias(t, max_distance=5), (8, H)),
    "bias": (mods.bias, (H, 1, KV)),
}


@pytest.mark.parametrize("case", LEARNED)
def test_gradients_reach_what_is_learned(case):
    make, shape = LEARNED[case]
    learned = (rand(*shape).abs() + 0.5).requires_grad_()
    score = SCORE[:1, :, :3, :4].clone().requires_grad_()

    def rows(table, given):
        return apply(make(table), given).sum(-1)

    assert torch.autograd.gradcheck(rows, (learned, score))


def test_half_precision_tables_do_not_lower_the_score():
    result = apply(mods.relative_bias(RELATIVE.half()), SCORE.float())
    assert result.dtype == torch.float32


def test_a_device_moves_what_is_made():
    assert mods.alibi_slopes(4, device="meta").device.type == "meta"
    captured = mods.alibi(4, device="meta").__closure__
    tensors = [c.cell_contents for c in captured if isinstance(c.cell_contents, torch.Tensor)]
    assert [t.device.type for t in tensors] == ["meta"]


ERRORS = [
    (lambda: mods.softcap(0), "cap must be a number > 0, got 0"),
    (lambda: mods.softcap(math.inf), "cap must be a finite number, got inf"),
    (lambda: mods.softcap("20"), "cap must be a finite number, got '20'"),
    (lambda: mods.temperature(-1.0), "value must be a number > 0, got -1.0"),
    (
        lambda: mods.head_scale(torch.ones(2, 2)),
        "scale must be a floating-point tensor [] or [H], got float32 of shape [2, 2]",
    ),
    (
        lambda: mods.head_bias(torch.arange(3)),
        "bias must be a floating-point tensor [] or [H], got int64 of shape [3]",
    ),
    (lambda: mods.log_length(None), "scale must be a finite number, got None"),
    (lambda: mods.position_scale(1), "train_length must be an integer >= 2, got 1"),
    (lambda: mods.alibi(0), "heads must be an integer >= 1, got 0"),
    (
        lambda: mods.alibi(torch.ones(())),
        "slopes must be a floating-point tensor [H], got float32 of shape []",
    ),
    (lambda: mods.distance_penalty("cubic"), "kind must be one of linear, log, power, got 'cubic'"),
    (lambda: mods.distance_penalty("log", -1), "scale must be a number > 0, got -1"),
    (lambda: mods.gaussian_window(0.0), "sigma must be a number > 0, got 0.0"),
    (
        lambda: mods.relative_bias(torch.zeros(3, 4)),
        "table must have an odd last axis 2R-1, got [3, 4]",
    ),
    (
        lambda: mods.relative_bias([["a"]]),
        "table must be a floating-point tensor [2R-1] or [H, 2R-1], got list",
    ),
    (
        lambda: mods.t5_bias(torch.zeros(32)),
        "table must be a floating-point tensor [num_buckets, H], got float32 of shape [32]",
    ),
    (lambda: mods.t5_buckets(7), "num_buckets must be even if bidirectional, got 7"),
    (lambda: mods.t5_buckets(32, True, 8), "max_distance must be an integer >= 9, got 8"),
    (
        lambda: mods.bias(torch.zeros(1, 1, 1, 1, 1)),
        "table must be a floating-point tensor [KV] or [Q, KV] or [H, Q, KV] or [B, H, Q, KV], "
        "got float32 of shape [1, 1, 1, 1, 1]",
    ),
    (
        lambda: mods.swin_2d_bias(8, 8, torch.zeros(64, 4)),
        "table must have 225 rows, got [64, 4]",
    ),
]


@pytest.mark.parametrize(("call", "message"), ERRORS, ids=[text[:40] for _, text in ERRORS])
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert str(caught.value) == message
