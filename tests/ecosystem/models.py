"""Tiny random models of transformers, one a family, each with two attention implementations."""

from __future__ import annotations

import torch
import transformers

WINDOW = 6  # shorter than the sequences of the tests
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
# family -> (prefix of its classes, arguments of its own)
FAMILIES = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "qwen3": ("Qwen3", {}),
    "gemma2": (
        "Gemma2",
        {**MIXED, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": ("Gemma3", {**MIXED, "query_pre_attn_scalar": 8}),
    "gpt_oss": ("GptOss", {**MIXED, "num_local_experts": 2, "num_experts_per_tok": 1}),
}
TOKENS = 97


def pair(family: str, names: tuple[str, str]) -> list[torch.nn.Module]:
    """A model of a family in evaluation mode, twice, with the same weights."""
    prefix, own = FAMILIES[family]
    config_class = "Gemma3TextConfig" if family == "gemma3" else f"{prefix}Config"
    models = []
    for name in names:
        config = getattr(transformers, config_class)(
            vocab_size=TOKENS,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=128,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **own,
        )
        config._attn_implementation = name
        models.append(getattr(transformers, f"{prefix}ForCausalLM")(config).eval())
    with torch.no_grad():
        for parameter in models[0].parameters():
            if parameter.ndim > 1 or parameter.numel() == 4:  # matrices, and sinks
                parameter.normal_(0, 0.2)
    models[1].load_state_dict(models[0].state_dict())
    return models


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, TOKENS, shape)


def padded(side: str | None, length: int) -> torch.Tensor:
    """attention_mask [2, length], the second row padded by 5."""
    mask = torch.ones(2, length, dtype=torch.long)
    if side is not None:
        mask[1, slice(5) if side == "left" else slice(-5, None)] = 0
    return mask
