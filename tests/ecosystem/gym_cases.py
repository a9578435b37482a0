"""Every public function of attention-gym's `masks` and `mods`: a call of it, or why there is none.

CASES: name -> a function of the device that returns a `Case`. HELPERS: name -> what it is instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from attn_gym import masks, mods
from attn_gym.masks import causal, document_mask, vsa


@dataclass(frozen=True)
class Case:
    """A call: lengths (B, H, Q, KV), and what is given to it.

    score: makes the score_mod from the tensors in `learned`, whose gradients are compared too.
    block_mask: torch's own, for functions that make one; `mask` is then the same, token by token.
    """

    shape: tuple[int, int, int, int]
    mask: Callable[..., Any] | None = None
    score: Callable[..., Any] | None = None
    learned: tuple[torch.Tensor, ...] = ()
    block_mask: Any = None


CASES: dict[str, Callable[[torch.device], Case]] = {}
MAKES_TABLES = "makes tables, before attention, for "
REARRANGES = "rearranges or mixes tensors before or after attention"
HELPERS = {
    "build_tree_ancestor_matrix": MAKES_TABLES + "`generate_jetspec_tree_causal_mask_mod`",
    "compute_vsa_coarse_attention": "an attention of its own over tiles, in torch operations",
    "compute_vsa_tile_scores": MAKES_TABLES + "`generate_vsa_mask_mod`",
    "compute_vsa_topk_indices": MAKES_TABLES + "`generate_vsa_mask_mod`",
    "create_vsa_tile_metadata": MAKES_TABLES + "`create_vsa_block_mask`",
    "deinterleave_bits_32": "a step of `generate_morton_natten`",
    "force_self_into_topk": "a step of `compute_vsa_topk_indices`",
    "generate_random_lengths": MAKES_TABLES + "`generate_doc_mask_mod`",
    "interleave_bits_32": "the inverse of a step of `generate_morton_natten`",
    "length_to_offsets": MAKES_TABLES + "`generate_doc_mask_mod`",
    "lift_vsa_tile_output": REARRANGES,
    "morton_decode": "a step of `generate_morton_natten`",
    "morton_encode": "the inverse of a step of `generate_morton_natten`",
    "pool_to_vsa_tiles": REARRANGES,
    "shortest_path_distances": MAKES_TABLES + "`generate_graphormer_spatial_bias`",
    "shortest_path_edge_types": MAKES_TABLES + "`generate_graphormer_edge_bias`",
    "tile_vsa_sequence": REARRANGES,
    "undo_softmax": "applied to out and lse, which it gets from flexmod unchanged",
    "untile_vsa_sequence": REARRANGES,
    "validate_vsa_block_mask_inputs": "checks arguments",
    "vsa_additive_combine": REARRANGES,
    "vsa_gated_mix": REARRANGES,
    "vsa_topk_from_sparsity": "counts tiles",
    "VSACoarseResult": "a record",
    "VSATileMetadata": "a record",
}


def case(function: Callable[[torch.device], Case]) -> Callable[[torch.device], Case]:
    CASES[function.__name__] = function
    return function


def square(length: int, batch: int = 1, heads: int = 2) -> tuple[int, int, int, int]:
    return batch, heads, length, length


# masks, in the order of the package's own list


@case
def batchify_mask_mod(device):
    return Case(square(100), masks.batchify_mask_mod(masks.causal_mask, 24))


@case
def generate_block_diffusion_mask(device):
    return Case(square(120), masks.generate_block_diffusion_mask(60, 16))


@case
def causal_mask(device):
    return Case((1, 2, 90, 130), masks.causal_mask)


@case
def create_causal_block_mask_fast(device):
    made = causal.create_causal_block_mask_fast(None, None, 100, 100, device, 32)
    return Case(square(100), masks.causal_mask, block_mask=made)


@case
def generate_dilated_sliding_window(device):
    return Case(square(100), masks.generate_dilated_sliding_window(30, 3))


def offsets(device):
    return document_mask.length_to_offsets([7, 33, 1, 40, 19], device)


@case
def generate_doc_mask_mod(device):
    return Case(square(100), masks.generate_doc_mask_mod(masks.causal_mask, offsets(device)))


@case
def generate_packed_causal_doc_mask_mod(device):
    return Case(square(100), masks.generate_packed_causal_doc_mask_mod(offsets(device)))


@case
def generate_vision_cross_attention_mask_mod(device):
    intervals = torch.tensor([[0, 40], [10, 40], [40, 90]], device=device)
    return Case((1, 2, 90, 75), masks.generate_vision_cross_attention_mask_mod(intervals, 25))


@case
def generate_global_sliding_window(device):
    chosen = torch.zeros(100, dtype=torch.bool, device=device)
    chosen[[0, 50]] = True
    return Case(square(100), masks.generate_global_sliding_window(9, chosen))


@case
def generate_jetspec_training_mask_mod(device):
    return Case((1, 2, 48, 88), masks.generate_jetspec_training_mask_mod(40, 8))


@case
def generate_jetspec_tree_causal_mask_mod(device):
    related = masks.build_tree_ancestor_matrix([-1, 0, 0, 1, 1, 2, 5], device)
    return Case((1, 2, 7, 57), masks.generate_jetspec_tree_causal_mask_mod(50, related))


@case
def generate_morton_natten(device):
    return Case(square(64), masks.generate_morton_natten(8, 8, 3, 5))


@case
def generate_natten(device):
    return Case(square(96), masks.generate_natten(12, 8, 5, 3))


@case
def generate_tiled_natten(device):
    return Case(square(96), masks.generate_tiled_natten(12, 8, 5, 3, 4, 2))


@case
def generate_prefix_lm_mask(device):
    return Case(square(100), masks.generate_prefix_lm_mask(30))


@case
def generate_shared_prefix_mask_mod(device):
    prefixes = torch.tensor([0, 0, 0, 3, 3], device=device)
    return Case(square(100), masks.generate_shared_prefix_mask_mod(offsets(device), prefixes))


@case
def generate_sliding_window(device):
    return Case(square(100), masks.generate_sliding_window(20))


@case
def generate_sta_mask_mod_2d(device):
    return Case(square(106), masks.generate_sta_mask_mod_2d((8, 12), (4, 6), (2, 3), 7))


@case
def generate_sta_mask_mod_3d(device):
    made = masks.generate_sta_mask_mod_3d((4, 4, 6), (2, 4, 3), (2, 2, 3), 4)
    return Case(square(104), made)


@case
def generate_spatial_head_mask_mod(device):
    made = masks.generate_spatial_head_mask_mod(5, 6, 16, 1, attn_sink=True, round_width=4)
    return Case(square(101), made)


@case
def generate_temporal_head_mask_mod(device):
    return Case(square(101), masks.generate_temporal_head_mask_mod(5, 6, 16, 2))


def chosen_tiles(device):
    """Tiles of 8 tokens of 2 batches and heads that each of 6 tiles has chosen: [2, 2, 6, 3]."""
    query, key = torch.randn(2, 2, 2, 48, 8, device=device).unbind()
    return masks.compute_vsa_topk_indices(query, key, 8, 3)


@case
def generate_vsa_mask_mod(device):
    sizes = torch.tensor([8, 8, 5, 8, 8, 2], device=device)
    return Case(square(48, 2), masks.generate_vsa_mask_mod(chosen_tiles(device), 8, sizes))


@case
def generate_vsa_padding_mask_mod(device):
    sizes = torch.tensor([8, 8, 5, 8, 8, 2], device=device)
    return Case(square(48), vsa.generate_vsa_padding_mask_mod(sizes, 8))


@case
def create_vsa_block_mask(device):
    sizes = torch.tensor([8, 8, 5, 8, 8, 2], device=device)
    tiles = chosen_tiles(device)
    made = masks.create_vsa_block_mask(tiles, 8, 6, sizes)
    return Case(square(48, 2), masks.generate_vsa_mask_mod(tiles, 8, sizes), block_mask=made)


@case
def create_vsa_flash_block_mask(device):
    sizes = torch.tensor([8, 8, 5, 8, 8, 2], device=device)
    tiles = chosen_tiles(device)
    made = masks.create_vsa_flash_block_mask(tiles, 8, 6, 4, sizes)
    return Case(square(48, 2), masks.generate_vsa_mask_mod(tiles, 8, sizes), block_mask=made)


# mods


@case
def generate_activation_score_mod(device):
    return Case(square(70), score=mods.generate_activation_score_mod)


@case
def generate_alibi_bias(device):
    return Case(square(70), masks.causal_mask, lambda: mods.generate_alibi_bias(2))


def paths(device):
    """Two random graphs of 50 nodes, bool [2, 50, 50]."""
    return (torch.rand(2, 50, 50) < 0.05).to(device)


@case
def generate_graphormer_spatial_bias(device):
    distances = mods.shortest_path_distances(paths(device), 4)
    return Case(
        square(50, 2),
        score=lambda table: mods.generate_graphormer_spatial_bias(table, distances),
        learned=(torch.randn(2, 6, device=device),),
    )


@case
def generate_graphormer_edge_bias(device):
    graph = paths(device)
    kinds = torch.randint(5, graph.shape).to(device)
    types, lengths = mods.shortest_path_edge_types(graph, kinds, 3)
    return Case(
        square(50, 2),
        score=lambda table: mods.generate_graphormer_edge_bias(table, types, lengths),
        learned=(torch.randn(2, 3, 5, device=device),),
    )


@case
def generate_mla_rope_score_mod(device):
    rope = torch.randn(1, 2, 40, 8, device=device), torch.randn(1, 1, 40, 8, device=device)
    return Case(
        square(40),
        masks.causal_mask,
        lambda query, key: mods.generate_mla_rope_score_mod(query, key, 2, 0.3),
        learned=rope,
    )


@case
def generate_sandwich_bias(device):
    made = mods.generate_sandwich_bias(2, 70, 16, device)
    return Case(square(70), masks.causal_mask, lambda: made)


@case
def generate_tanh_softcap(device):
    exact, fast = mods.generate_tanh_softcap(2), mods.generate_tanh_softcap(3, approx=True)
    both = lambda score, *at: fast(exact(score, *at), *at)
    return Case(square(70), masks.causal_mask, lambda: both)
