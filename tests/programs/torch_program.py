"""A program written for torch's flex_attention: what its documentation shows, in one file.

The test of drop-in use runs it with the line below changed, and nothing else.
"""

import functools

import torch
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
    noop_mask,
    or_masks,
)

B, H, S, D = 2, 4, 256, 16


def noop(score, b, h, q_idx, kv_idx):
    return score


def relative_positional(score, b, h, q_idx, kv_idx):
    return score + (q_idx - kv_idx)


def tanh_softcap(soft_cap):
    def inner(score, b, h, q_idx, kv_idx):
        score = score / soft_cap
        score = torch.tanh(score)
        return score * soft_cap

    return inner


def alibi(heads):
    slopes = torch.exp2(-((torch.arange(heads) + 1) * 8.0 / heads))

    def inner(score, b, h, q_idx, kv_idx):
        return score + (kv_idx - q_idx) * slopes[h]

    return inner


def checkerboard(score, b, h, q_idx, kv_idx):
    score = torch.where(torch.abs(kv_idx - q_idx) % 2 == 1, score * 0.5, score)
    return torch.where(torch.abs(kv_idx - q_idx) % 2 == 0, score * 2.0, score)


def causal_as_score(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx >= kv_idx, score, -float("inf"))


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def sliding_window(b, h, q_idx, kv_idx, window=50):
    return q_idx - kv_idx <= window


def prefix(lengths, b, h, q_idx, kv_idx):
    return kv_idx < lengths[b]


def documents(offsets):
    ids = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets[1:] - offsets[:-1])

    def inner(b, h, q_idx, kv_idx):
        return ids[q_idx] == ids[kv_idx]

    return inner


def main():
    """Name -> (output, query, key, value, score_mod, mask_mod): for somebody to check."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(B, H, S, D) for _ in range(3))
    done = {}
    for score_mod in (noop, relative_positional, tanh_softcap(30.0), alibi(H), checkerboard,
                      causal_as_score):  # fmt: skip
        name = f"{score_mod.__name__}, {len(done)}"
        out = flex_attention(query, key, value, score_mod=score_mod)
        done[name] = out, query, key, value, score_mod, None

    lengths = torch.tensor([30, 200])
    prefix_lm = or_masks(functools.partial(prefix, lengths), causal)
    for name, mask_mod, batch in (
        ("causal", causal, None),
        ("window", and_masks(causal, sliding_window), None),
        ("prefix", prefix_lm, B),
        ("documents", and_masks(causal, documents(torch.tensor([0, 100, 130, S]))), None),
        ("nothing masked", noop_mask, None),
    ):
        block_mask = create_block_mask(mask_mod, batch, None, S, S, device="cpu")
        assert isinstance(block_mask, BlockMask) and block_mask.sparsity() >= 0
        assert str(block_mask).startswith("BlockMask(shape=")
        out = flex_attention(query, key, value, tanh_softcap(20.0), block_mask)
        done[name] = out, query, key, value, tanh_softcap(20.0), mask_mod

    dense = create_mask(prefix_lm, B, None, S, S, device="cpu")
    assert dense.shape == (B, 1, S, S) and bool(dense[1, 0, 0, 199])
    few = key[:, :2], value[:, :2]
    block_mask = create_block_mask(causal, B=None, H=None, Q_LEN=S, KV_LEN=S, device="cpu")
    out, aux = flex_attention(
        query, *few, block_mask=block_mask, enable_gqa=True, scale=0.2,
        kernel_options={"BLOCK_M": 64, "BLOCK_N": 64}, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    assert aux.lse.shape == (B, H, S) and aux.max_scores is None
    done["grouped heads"] = out, query * 0.2 * D**0.5, *few, None, causal
    return done
