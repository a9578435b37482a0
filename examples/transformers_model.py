"""A language model of Hugging Face transformers on flexmod: the same numbers, one import more.

Run: python examples/transformers_model.py
"""

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from flexmod.integrations import transformers

transformers.register()

# A tiny random model with what is hard for other attentions: soft-capped scores, and a sliding
# window in every second layer. For a trained one: from_pretrained(..., attn_implementation=...).
config = Gemma2Config(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16,
    num_attention_heads=4, num_key_value_heads=2, sliding_window=16, query_pre_attn_scalar=16,
    attn_logit_softcapping=5.0,
)  # fmt: skip
torch.manual_seed(0)
model = Gemma2ForCausalLM(config).eval()

tokens = torch.randint(3, 128, (2, 48))
mask = torch.ones_like(tokens)
mask[1, :20] = 0  # the second prompt is shorter: padded on the left

logits, texts = {}, {}
for name in ("eager", "flexmod"):
    model.set_attn_implementation(name)
    with torch.no_grad():
        logits[name] = model(tokens, attention_mask=mask).logits[mask.bool()]
    texts[name] = model.generate(tokens, attention_mask=mask, max_new_tokens=8, do_sample=False)

print(f"largest difference of logits: {(logits['flexmod'] - logits['eager']).abs().max():.1e}")
print("the same tokens:", torch.equal(texts["flexmod"], texts["eager"]))

# Two documents in one row: positions that start again keep them apart, in training too.
packed = torch.cat([torch.arange(30), torch.arange(18)])[None]
optimizer = torch.optim.AdamW(model.train().parameters(), 1e-2)
losses = []
for _ in range(8):
    loss = model(tokens[:1], position_ids=packed, labels=tokens[:1], use_cache=False).loss
    losses.append(loss.item())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss of two packed documents: {losses[0]:.2f} -> {losses[-1]:.2f}")
