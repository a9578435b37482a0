"""transformers' models give the same with attn_implementation="flexmod" as with "eager"."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from flexmod import BlockMask
from flexmod.integrations import transformers as integration

transformers = pytest.importorskip(
    "transformers",
    "4.57",
    reason="transformers is not installed: pip install 'flexmod[transformers]'",
)
transformers.logging.set_verbosity_error()
integration.register()
integration.register("flexmod-fa2", backend="fa2")

MODELS = runpy.run_path(str(Path(__file__).parent / "models.py"))
FAMILIES, tokens, padded = MODELS["FAMILIES"], MODELS["tokens"], MODELS["padded"]
LENGTH, TOLERANCE = 21, 1e-5
pytestmark = pytest.mark.usefixtures("on_a_gpu")
GENERATE = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 10}


@pytest.fixture(scope="module")
def models():
    """`models(family)`: (eager, flexmod), the same weights."""
    known = {}

    def get(family, name="flexmod"):
        if (family, name) not in known:
            torch.manual_seed(0)
            known[family, name] = MODELS["pair"](family, ("eager", name))
        return known[family, name]

    return get


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits(family, side, models):
    ids, mask = tokens(2, LENGTH), padded(side, LENGTH)
    eager, ours = (m(ids, attention_mask=mask).logits for m in models(family))
    real = mask.bool()
    torch.testing.assert_close(ours[real], eager[real], rtol=0, atol=TOLERANCE)
    assert eager[real].std() > 0.1
    if side == "left":  # such rows see nothing: 0, not an average of everything
        assert torch.isfinite(ours[~real]).all()


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
@torch.no_grad()
def test_logits_of_the_kernel(family, models):
    ids, mask = tokens(2, LENGTH), padded("left", LENGTH)
    eager, ours = (m(ids, attention_mask=mask).logits for m in models(family, "flexmod-fa2"))
    real = mask.bool()
    torch.testing.assert_close(ours[real], eager[real], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generated_tokens(family, side, models):
    ids, mask = tokens(2, LENGTH), padded(side, LENGTH)
    eager, ours = (m.generate(ids, attention_mask=mask, **GENERATE) for m in models(family))
    assert torch.equal(ours, eager)


@pytest.mark.parametrize(
    "how",
    [
        {"num_beams": 3},
        {"cache_implementation": "static", "disable_compile": True},
        {"use_cache": False},
    ],
    ids=lambda how: next(iter(how)),
)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_ways_of_generating(family, how, models):
    ids, mask = tokens(2, LENGTH), padded("left", LENGTH)
    eager, ours = (m.generate(ids, attention_mask=mask, **GENERATE, **how) for m in models(family))
    assert torch.equal(ours, eager)


def gradients(model, **inputs):
    model.zero_grad()
    model(**inputs, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same_gradients(models, **inputs):
    eager, ours = (gradients(model.train(), **inputs) for model in models)
    for model in models:
        model.eval()
    for name, expected in eager.items():
        error = (ours[name] - expected).abs().max()
        assert error <= TOLERANCE * expected.abs().max(), name
        assert expected.any() or not ours[name].any(), name
    return eager


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_a_training_step(family, side, models):
    ids, mask = tokens(2, LENGTH), padded(side, LENGTH)
    # Padding is not predicted, and a row of padding predicts nothing.
    before = torch.nn.functional.pad(mask[:, :-1], (1, 0))
    labels = ids.masked_fill((mask * before) == 0, -100)
    found = assert_same_gradients(models(family), input_ids=ids, attention_mask=mask, labels=labels)
    sinks = [grad for name, grad in found.items() if "sinks" in name]
    assert len(sinks) == (2 if family == "gpt_oss" else 0) and all(s.any() for s in sinks)


POSITIONS = [[*range(8), *range(13)], [*range(3), *range(15), *range(LENGTH - 18)]]


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "gpt_oss"])
def test_packed_sequences(family, models):
    ids, positions = tokens(2, LENGTH), torch.tensor(POSITIONS)
    with torch.no_grad():
        eager, ours = (
            m(ids, position_ids=positions, use_cache=False).logits for m in models(family)
        )
        alone = models(family)[1](ids[:1, 8:]).logits
    torch.testing.assert_close(ours, eager, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(ours[:1, 8:], alone, rtol=0, atol=TOLERANCE)
    assert_same_gradients(models(family), input_ids=ids, position_ids=positions, labels=ids)


@torch.no_grad()
def test_packed_sequences_by_maps_of_ones_own(models):
    """transformers does not look for packed sequences in gpt-oss; maps say where they are."""
    model = models("gpt_oss")[1]
    ids, positions = tokens(1, LENGTH), torch.tensor(POSITIONS[:1])
    packed = BlockMask.from_documents(lengths=[8, LENGTH - 8], causal=True)
    window = BlockMask.from_window(MODELS["WINDOW"], LENGTH)
    maps = {"full_attention": packed, "sliding_attention": packed & window}
    ours = model(ids, attention_mask=maps, position_ids=positions, use_cache=False).logits
    for part in (slice(8), slice(8, None)):
        alone = model(ids[:, part]).logits
        torch.testing.assert_close(ours[:, part], alone, rtol=0, atol=TOLERANCE)
    one = models("llama")[1]
    ours = one(ids, attention_mask=packed, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(ours[:, 8:], one(ids[:, 8:]).logits, rtol=0, atol=TOLERANCE)


def test_activation_checkpointing(models):
    ours = models("gemma2")[1]
    ids = tokens(2, LENGTH)
    expected = gradients(ours.train(), input_ids=ids, labels=ids)
    ours.gradient_checkpointing_enable()
    found = gradients(ours, input_ids=ids, labels=ids)
    ours.gradient_checkpointing_disable()
    ours.eval()
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name])


def test_compiled_in_one_graph(models):
    eager, ours = models("gemma2")
    ids, mask = tokens(2, LENGTH), padded("left", LENGTH)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    inputs["labels"][1, 5] = -100
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    real = mask.bool()
    found = compiled(**inputs, use_cache=False)
    expected = eager(**inputs, use_cache=False)
    torch.testing.assert_close(found.logits[real], expected.logits[real], rtol=0, atol=TOLERANCE)
    for model, loss in ((ours, found.loss), (eager, expected.loss)):
        model.zero_grad()
        loss.backward()
    for one, other in zip(ours.parameters(), eager.parameters(), strict=True):
        assert (one.grad - other.grad).abs().max() <= TOLERANCE * other.grad.abs().max()


@torch.no_grad()
def test_own_masks_of_four_axes(models):
    eager, ours = models("llama")
    ids = tokens(2, LENGTH)
    visible = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    visible[1, :, 10:, 2:6] = False
    added = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    expected = eager(ids, attention_mask=added).logits
    for mask in (visible, added):
        found = ours(ids, attention_mask=mask).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


@torch.no_grad()
def test_one_map_a_pass_and_kind_of_layer(models, monkeypatch):
    made = []
    build = integration.create_block_mask
    monkeypatch.setattr(
        integration, "create_block_mask", lambda *a, **k: made.append(build(*a, **k)) or made[-1]
    )
    dense = []
    monkeypatch.setattr(integration, "create_mask", lambda *a, **k: dense.append(a))
    models("gemma2")[1](tokens(2, 300), attention_mask=padded("left", 300))
    assert len(made) == 2 and not dense  # a full and a sliding layer
    assert all(isinstance(mask, BlockMask) and mask.counts()[0] for mask in made)


def test_dropout_is_applied_in_training_only():
    torch.manual_seed(0)
    _, model = MODELS["pair"]("llama", ("eager", "flexmod"))
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    ids = tokens(1, LENGTH)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model(ids).logits)
        model.train()
        assert not torch.equal(model(ids).logits, model(ids).logits)


SMALL = {"vocab_size": 97, "d_model": 32, "pad_token_id": 0}
OTHERS = {  # name of the classes -> arguments of the configuration, the oldest version
    "Bart": ({**SMALL, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
              "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}, 4),
    "T5": ({**SMALL, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}, 5),
    "Bert": ({"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48,
              "num_hidden_layers": 1, "num_attention_heads": 4}, 5),
    "ViT": ({"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
             "num_attention_heads": 4, "image_size": 16, "patch_size": 4}, 4),
}  # fmt: skip


@pytest.mark.parametrize("prefix", OTHERS)
@torch.no_grad()
def test_both_directions_cross_attention_and_position_biases(prefix):
    arguments, oldest = OTHERS[prefix]
    if int(transformers.__version__.split(".")[0]) < oldest:
        pytest.skip(
            f"transformers {transformers.__version__} keeps the attention of {prefix} fixed"
        )
    inputs = {"input_ids": tokens(2, LENGTH), "attention_mask": padded("right", LENGTH)}
    if prefix in ("Bart", "T5"):
        inputs["decoder_input_ids"] = tokens(2, 9)
    if prefix == "ViT":
        inputs = {"pixel_values": torch.randn(2, 3, 16, 16)}
    results = []
    for name in ("eager", "flexmod"):
        torch.manual_seed(0)
        config = getattr(transformers, f"{prefix}Config")(**arguments)
        config._attn_implementation = name
        model = getattr(transformers, f"{prefix}Model")(config).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, 0, 0.2)
        results.append(model(**inputs)[0])
    eager, ours = (r[padded("right", LENGTH).bool()] if prefix == "Bert" else r for r in results)
    torch.testing.assert_close(ours, eager, rtol=0, atol=TOLERANCE)
