"""`torch.ops.flexmod.attention`: what else watches operations sees one, and keeps what it asks."""

from __future__ import annotations

import functools
import io
import tempfile

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import flexmod
from flexmod import library, masks, mods
from flexmod.kernels import choose

HEADS, LENGTH = 2, 24  # of `qkv`


def learn(*shape):
    return torch.randn(*shape).requires_grad_()


@pytest.fixture
def forwards(monkeypatch):
    """A list that grows by one for each forward pass of an engine."""
    seen, plain = [], choose.forward
    monkeypatch.setattr(choose, "forward", lambda *a: seen.append(1) or plain(*a))
    return seen


def test_a_dispatch_mode_sees_one_operation_each_way(qkv, watching):
    with watching() as watch:
        flexmod.flex_attention(*qkv, mods.softcap(3.0), masks.causal()).sum().backward()
    seen = [func.overloadpacket for func, _ in watch.calls if func.namespace == "flexmod"]
    assert seen == [torch.ops.flexmod.attention, torch.ops.flexmod.attention_backward]


def test_cuda_graphs_hold_what_does_not_read_values_on_the_host(qkv, watching):
    """A map that was made before, or no mask; not a mask to be decided, nor numbers in tensors."""
    made = flexmod.create_block_mask(masks.causal(), None, None, LENGTH, LENGTH)
    number = torch.tensor(2.0)
    forms = {}
    for name, arguments in {
        "no mask": {},
        "a map": {"block_mask": made, "score_mod": mods.alibi(torch.rand(HEADS))},
        "a mask": {"block_mask": masks.causal()},
        "dropout": {"dropout_p": 0.5},
        "a number": {"score_mod": lambda s, b, h, i, j: s * number},
    }.items():
        with watching() as watch:
            flexmod.flex_attention(*qkv, **arguments).sum().backward()
        ops = [func for func, _ in watch.calls if func.namespace == "flexmod"]
        forms[name] = [torch.Tag.cudagraph_unsafe in op.tags for op in ops]
    assert forms == {
        "no mask": [False, False], "a map": [False, True], "a mask": [True, True],
        "dropout": [True, True], "a number": [True, True],
    }  # fmt: skip


def test_a_cuda_graph_may_read_copies_of_what_a_mask_captures(qkv, monkeypatch, watching):
    ids = torch.zeros(LENGTH, dtype=torch.long)
    block_mask = flexmod.create_block_mask(masks.document(ids), None, None, LENGTH, LENGTH)
    with watching() as watch:
        expected = flexmod.flex_attention(*qkv, block_mask=block_mask)
        expected.sum().backward()
    (forward, arguments), (backward, given) = (
        c for c in watch.calls if c[0].namespace == "flexmod"
    )
    copies = [x.clone().add_(0) for x in arguments[5]]
    other = lambda taken, at: [*taken[:at], copies, *taken[at + 1 :]]
    with torch.no_grad():
        with pytest.raises(flexmod.errors.BlockMaskError, match="changed in place"):
            forward(*other(arguments, 5))
        backward(*other(given, 10))  # autograd has looked whether they are what the forward saw
        monkeypatch.setattr(library, "_is_captured", lambda x: True)
        assert torch.equal(forward(*other(arguments, 5))[0], expected)


def test_torchs_own_checks_of_an_operation(qkv, watching):
    slopes, sink = torch.rand(HEADS), torch.rand(HEADS)
    block_mask = flexmod.create_block_mask(masks.causal(), None, None, LENGTH, LENGTH)
    with watching() as watch:
        flexmod.flex_attention(
            *(x.detach() for x in qkv), mods.alibi(slopes), block_mask, sink=sink, dropout_p=0.2
        )
    args = next(list(a) for func, a in watch.calls if func is torch.ops.flexmod.attention.host)
    args[:4] = [x.detach().requires_grad_() for x in args[:4]]
    args[4] = [x.detach().requires_grad_() for x in args[4]]
    report = torch.library.opcheck(torch.ops.flexmod.attention.host, tuple(args))
    assert set(report.values()) == {"SUCCESS"} and len(report) == 4


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("saved", [True, False])
def test_selective_checkpointing(qkv, differentiated, forwards, compiled, saved):
    def policy(context, op, *args, **kwargs):
        attention = getattr(op, "overloadpacket", None) is torch.ops.flexmod.attention
        keep = attention and saved
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.MUST_RECOMPUTE

    def body(q, k, v, slopes):
        return flexmod.flex_attention(q.sin(), k, v, mods.alibi(slopes), masks.causal()).cos()

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    call = lambda *given: checkpoint(body, *given, use_reentrant=False, context_fn=contexts)
    given = [*qkv, learn(HEADS)]
    results, grads = differentiated(body, given, given)
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    forwards.clear()
    again, their_grads = differentiated(call, given, given)
    for got, expected in zip(again + their_grads, results + grads, strict=True):
        torch.testing.assert_close(got, expected)
    assert len(forwards) == (1 if saved else 2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_plain_checkpointing_with_dropout(qkv, reentrant):
    body = lambda q, k, v: flexmod.flex_attention(q, k, v, mods.softcap(3.0), dropout_p=0.5)
    grads = []
    for call in (body, lambda *given: checkpoint(body, *given, use_reentrant=reentrant)):
        torch.manual_seed(5)
        leaves = [x.detach().requires_grad_() for x in qkv]
        call(*leaves).square().sum().backward()
        grads.append([x.grad for x in leaves])
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected)


class Net(torch.nn.Module):
    """A learned bias, and documents: the map given, or made inside for the length at hand."""

    def __init__(self, block_mask=None):
        super().__init__()
        self.project = torch.nn.Linear(8, 24)
        self.slopes = torch.nn.Parameter(torch.rand(HEADS))
        self.register_buffer("ids", torch.arange(LENGTH) // 10)
        self.block_mask = block_mask

    def forward(self, x):
        query, key, value = self.project(x)[:, None].expand(-1, HEADS, -1, -1).chunk(3, -1)
        length, block_mask = x.shape[1], self.block_mask
        if block_mask is None:
            block_mask = flexmod.create_block_mask(
                lambda b, h, i, j: (i >= j) & (self.ids[i] == self.ids[j]),
                None, None, length, length, BLOCK_SIZE=16,
            )  # fmt: skip
        mod = lambda score, b, h, i, j: score - self.slopes[h] * (i - j) * 0.5
        return flexmod.flex_attention(query, key, value, mod, block_mask)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_export_saved_and_loaded(where, strict):
    outside = flexmod.create_block_mask(masks.sliding_window(9), None, None, LENGTH, LENGTH)
    net = Net(outside if where == "outside" else None)
    axes = {0: torch.export.Dim("batch", min=2, max=9)}
    shapes = [(3, LENGTH, 8), (5, LENGTH, 8)]
    if where == "inside":  # a map is made for one length
        axes[1] = torch.export.Dim("length", min=2, max=LENGTH)
        shapes.append((4, 15, 8))
    exported = torch.export.export(
        net, (torch.randn(shapes[0]),), dynamic_shapes={"x": axes}, strict=strict
    )
    targets = [getattr(n.target, "overloadpacket", None) for n in exported.graph.nodes]
    assert targets.count(torch.ops.flexmod.attention) == 1
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for shape in shapes:
        x = torch.randn(shape)
        torch.testing.assert_close(loaded(x), net(x))


def test_tensors_without_values(qkv):
    from torch._subclasses.fake_tensor import FakeTensorMode

    on_meta = [x.detach().to("meta") for x in qkv]
    out, lse = flexmod.flex_attention(*on_meta, mods.softcap(3.0), masks.causal(), return_lse=True)
    assert (out.device.type, out.shape, lse.shape) == ("meta", qkv[0].shape, (1, HEADS, LENGTH))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in qkv]
        out = flexmod.flex_attention(*fakes, mods.alibi(HEADS), masks.causal())
    assert out.shape == qkv[0].shape


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_wrapped_for_data_parallel_training():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    x = torch.randn(3, LENGTH, 8)
    net = Net()
    net(x).square().sum().backward()
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        try:
            sharded = Net()
            sharded.load_state_dict(net.state_dict())
            fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
            parallel = Net()
            parallel.load_state_dict(net.state_dict())
            for wrapped in (DistributedDataParallel(parallel), sharded):
                for call in (wrapped, torch.compile(wrapped, backend="aot_eager")):
                    wrapped.zero_grad()
                    call(x).square().sum().backward()
                    for got, expected in zip(wrapped.parameters(), net.parameters(), strict=True):
                        grad = got.grad.to_local() if wrapped is sharded else got.grad
                        torch.testing.assert_close(grad, expected.grad)
        finally:
            torch.distributed.destroy_process_group()
