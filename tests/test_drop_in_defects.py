"""What torch 2.13's flex_attention gets wrong, one test or more each, here and elsewhere."""

from __future__ import annotations

import functools
import pickle
import re
from pathlib import Path

import pytest
import torch
import torch.nn.attention.flex_attention as theirs
from torch.utils._python_dispatch import TorchDispatchMode

import flexmod
from flexmod import BlockMaskError, masks
from flexmod.testing import assert_matches, naive

ROOT = Path(__file__).resolve().parent
HERE = "test_drop_in_defects.py"
# Defect -> where it is tested: file::test, each with any parameters.
TABLE = {
    "compiled on CPU: wrong for a mod that does not depend on the score or on both indices": [
        f"{HERE}::test_compiled_mods_of_few_variables",
        "cases/test_training_captures.py::test_P056_a_mod_that_does_not_use_the_score",
    ],
    "a map broadcast over a batch or head axis that its mask reads: silently wrong": [
        f"{HERE}::test_a_map_broadcast_over_an_axis_that_its_mask_reads",
        "cases/test_heads_batches.py::test_P014_a_broadcast_axis_that_is_read_is_refused",
    ],
    "KV length 0 kills the process": [
        f"{HERE}::test_no_keys_at_all_compiled",
        "cases/test_lengths.py::test_P050_nothing_there",
    ],
    "five values of scale: five compiles": [
        "cases/test_kernel_reuse.py::test_P080_five_scales_one_compile",
        "graphs/test_compile.py::test_numbers_that_change_are_met_with_their_new_value",
    ],
    "seven lengths: three compiles": [
        "graphs/test_compile.py::test_two_blocks_at_seven_lengths_compile_at_most_twice",
    ],
    "a captured float that changes fails": [
        "cases/test_captured_values.py::test_P079_a_number_that_changes",
        "graphs/test_compile.py::test_numbers_that_change_are_met_with_their_new_value",
        "graphs/test_compile.py::test_a_number_or_tensor_that_changes_in_place_is_not_stale",
    ],
    "captured tensors of one element fail": [
        f"{HERE}::test_a_captured_tensor_of_one_element",
        "graphs/test_compile.py::test_captured_tensors_learn_whatever_their_rank",
    ],
    "a learned tensor indexed twice: refused in backward": [
        f"{HERE}::test_a_learned_tensor_at_two_indices",
        "graphs/test_compile.py::test_captured_tensors_learn_whatever_their_rank",
    ],
    "backward on CPU: refused": [f"{HERE}::test_backward_on_cpu"],
    "func.grad, jvp and vmap: refused": [
        f"{HERE}::test_transforms_of_torch_func",
        "cases/test_training_transforms.py::test_P094_vmap_over_everything",
    ],
    "maps with lambdas cannot be pickled": [
        f"{HERE}::test_a_map_of_a_lambda_pickles",
        "blocks/test_round_trips.py::test_copies_and_files",
    ],
    "create_block_mask evaluates the mask on all pairs: 10 GB at 32768 x 32768": [
        f"{HERE}::test_a_long_map_needs_little_memory",
    ],
    "sparsity below 0 percent": ["cases/test_block_maps.py::test_P019_sparsity_is_a_percentage"],
    "bound methods and objects are taken for the wrong kind of mod": [
        f"{HERE}::test_bound_methods_and_objects",
        "graphs/test_compile.py::test_kinds_of_mods",
    ],
    "slices lose their mask, and keep their old lengths": [
        f"{HERE}::test_a_slice_is_right_to_use_at_once",
    ],
    "lists without a mask are ignored by the eager path": [
        f"{HERE}::test_lists_without_a_mask_are_obeyed",
        "graphs/test_compile_maps.py::test_torchs_own_map",
    ],
}


@pytest.fixture
def qkv():
    return [torch.randn(2, 2, 20, 8).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("defect", TABLE)
def test_every_defect_has_its_tests(defect):
    for place in TABLE[defect]:
        file, name = place.split("::")
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.M), place


def test_compiled_mods_of_few_variables(qkv):
    table = torch.randn(20)
    made = [
        lambda s, b, h, i, j: s * 0,
        lambda s, b, h, i, j: 0.1 * j,
        lambda s, b, h, i, j: table[j],
        lambda s, b, h, i, j: table[i] * 0.5,
    ]
    call = lambda q, k, v: [flexmod.flex_attention(q, k, v, mod) for mod in made]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(*qkv)
    for mod, out in zip(made, compiled, strict=True):
        assert_matches(out, naive(*qkv, mod)[0])


@pytest.mark.parametrize("create", [flexmod.create_block_mask, theirs.create_block_mask])
@pytest.mark.parametrize("axis", ["b", "h"])
def test_a_map_broadcast_over_an_axis_that_its_mask_reads(qkv, create, axis):
    mask = lambda b, h, i, j: j < 5 + 10 * (b if axis == "b" else h)
    with pytest.raises(BlockMaskError, match=f"reads {axis}"):
        flexmod.flex_attention(*qkv, None, create(mask, None, None, 20, 20, device="cpu"))
    made = create(mask, 2, 2, 20, 20, device="cpu")
    assert_matches(flexmod.flex_attention(*qkv, None, made), naive(*qkv, None, mask)[0])


def test_no_keys_at_all_compiled(qkv):
    query, key, value = qkv[0], qkv[1][:, :, :0], qkv[2][:, :, :0]
    call = lambda *x: flexmod.flex_attention(*x, None, masks.causal(), return_lse=True)
    out, lse = torch.compile(call, fullgraph=True, backend="aot_eager")(query, key, value)
    assert not out.any() and (lse == -torch.inf).all()
    (grad,) = torch.autograd.grad(out.sum(), query)
    assert not grad.any()


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_captured_tensor_of_one_element(qkv, check_gradients, lanes, shape):
    lane = lanes("cpu", torch.float64)
    given = [*lane.qkv((1, 2, 20, 8)), lane.randn(*shape)]
    check_gradients(lane, given, lambda t: lambda s, b, h, i, j: s * t.view(()) + t.reshape(1)[0])


def test_a_learned_tensor_at_two_indices(check_gradients, lanes):
    lane = lanes("cpu", torch.float64)
    given = [*lane.qkv((1, 2, 20, 8)), lane.randn(20)]
    check_gradients(lane, given, lambda t: lambda s, b, h, i, j: s + t[i] * t[j])


def test_backward_on_cpu(check_gradients, lanes):
    lane = lanes("cpu", torch.float64)
    check_gradients(lane, lane.qkv((1, 2, 20, 8)), None, masks.causal())


def test_transforms_of_torch_func(qkv):
    query, key, value = (x.detach() for x in qkv)
    call = lambda q: flexmod.flex_attention(q, key, value, None, masks.causal())
    tangent = torch.randn_like(query)
    _, forward = torch.func.jvp(call, (query,), (tangent,))
    backward = torch.func.grad(lambda q: (call(q) * tangent).sum())(query)
    reverse = torch.func.vjp(call, query)[1](tangent)[0]
    torch.testing.assert_close(backward, reverse)
    torch.testing.assert_close((forward * tangent).sum(), (reverse * tangent).sum())
    many = torch.stack([query, 2 * query])
    torch.testing.assert_close(torch.vmap(call)(many), torch.stack([call(q) for q in many]))


@pytest.mark.parametrize("create", [None, theirs.create_block_mask])
def test_a_map_made_inside_of_a_transform_does_not_outlive_it(lanes, create):
    """The mask is met for the first time under func.grad, whose tensors end with it."""
    lane = lanes("fa2", torch.float32)
    query, key, value = lane.qkv((1, 2, 20, 8))
    mask = lambda b, h, i, j: (i - j).abs() < 7
    given = mask if create is None else create(mask, None, None, 20, 20, device=lane.device)
    call = lambda q: flexmod.flex_attention(q, key, value, None, given, backend="fa2")
    torch.func.grad(lambda q: call(q).sum())(query)
    assert_matches(call(query), naive(query, key, value, None, mask)[0])


def test_a_map_of_a_lambda_pickles(qkv):
    window = 5
    made = flexmod.create_block_mask(lambda b, h, i, j: (i - j).abs() < window, 1, 1, 20, 20)
    again = pickle.loads(pickle.dumps(made))
    window = 19
    assert torch.equal(
        flexmod.flex_attention(*qkv, None, again), flexmod.flex_attention(*qkv, None, made)
    )


class Largest(TorchDispatchMode):
    """How many elements the largest result of any operation has."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.itemsize)
        return result


def test_a_long_map_needs_little_memory():
    length = 32768
    with Largest() as largest:
        made = flexmod.create_block_mask(masks.causal(), None, None, length, length)
    assert made.counts() == (256 * 255 // 2, 256, 256 * 255 // 2)
    assert 0 < largest.elements < 100_000  # there are 65,536 blocks, and 1,073,741,824 pairs


class Slopes:
    def __init__(self):
        self.slopes = torch.tensor([0.5, 0.25])

    def bias(self, score, b, h, q_idx, kv_idx):
        return score - self.slopes[h] * (q_idx - kv_idx)

    def mask(self, b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    __call__ = bias


def test_bound_methods_and_objects(qkv):
    slopes = Slopes()
    wanted = naive(*qkv, slopes.bias, slopes.mask)[0]
    for mod in (slopes, slopes.bias, functools.partial(slopes.bias)):
        assert_matches(flexmod.flex_attention(*qkv, mod, slopes.mask), wanted)
    assert flexmod.create_mask(slopes.mask, 1, 1, 4, 4).sum() == 10


def test_a_slice_is_right_to_use_at_once(qkv):
    query, key, value = qkv
    made = flexmod.create_block_mask(masks.causal(), None, None, 20, 20, BLOCK_SIZE=4)
    out = flexmod.flex_attention(query[:, :, 8:12], key, value, None, made[:, :, 2])
    wanted = flexmod.flex_attention(query, key, value, None, made)[:, :, 8:12]
    torch.testing.assert_close(out, wanted)


def test_the_offset_idiom_of_torchs_programs(qkv):
    """A slice whose mask and lengths are set anew, from the mask of the whole map."""
    query, key, value = qkv
    made = flexmod.create_block_mask(masks.causal(), None, None, 20, 20, BLOCK_SIZE=4)
    position = 9

    def later(b, h, q_idx, kv_idx):
        return made.mask_mod(b, h, q_idx + position, kv_idx)

    row = made[:, :, position // 4]
    row.mask_mod = later
    row.seq_lengths = (1, 20)
    out = flexmod.flex_attention(query[:, :, position : position + 1], key, value, None, row)
    wanted = flexmod.flex_attention(query, key, value, None, made)[:, :, position : position + 1]
    torch.testing.assert_close(out, wanted)
    with pytest.raises(BlockMaskError, match="shape cannot be set"):
        row.shape = (1, 1, 2, 2)


def test_lists_without_a_mask_are_obeyed(qkv):
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    columns = torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    wanted = naive(*qkv, None, lambda b, h, i, j: (i >= 10) | (j >= 10))[0]
    for kind in (flexmod.BlockMask, theirs.BlockMask):
        made = kind.from_kv_blocks(counts, columns, BLOCK_SIZE=10)
        assert_matches(flexmod.flex_attention(*qkv, None, made), wanted)
