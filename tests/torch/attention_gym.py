"""attention-gym's masks and scores, imported unchanged, against torch's eager FlexAttention in float64, forward and backward.

    python -m tests.torch.attention_gym PATH [--kernels]

PATH is a checkout of attention-gym: nothing is fetched. Without a GPU, attention is computed by torch's operations from the
spec that a kernel would compute, and a warning about a mask or score counts as a wrong result; with --kernels by the emulated
device, which takes minutes.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention import flex_attention as theirs

from attngen.language import load_source
from attngen.source import SourceFile
from attngen.spec.suspicions import suspicions
from attngen.torch import create_block_mask, flex_attention, flex_operator
from attngen.torch.math import by_torch

BATCH, HEADS, SIZE = 2, 4, 16
Case = tuple[str, int, Any, Any, tuple[torch.Tensor, ...], Any]  # name, length, score, mask, captured, score for torch


def cases(device: str) -> Iterator[Case]:
    """Each mask and score once, or with several arguments."""
    of = importlib.import_module
    masks, causal = of("attn_gym.masks"), of("attn_gym.masks").causal_mask
    documents = of("attn_gym.masks.document_mask")
    offsets = documents.length_to_offsets([20, 30, 14], device)
    window = masks.generate_sliding_window
    listed: dict[str, tuple[int, Callable[..., Any]]] = {
        "causal": (64, causal),
        "sliding window": (64, window(9)),
        "dilated sliding window": (64, masks.generate_dilated_sliding_window(12, 3)),
        "prefix": (64, masks.generate_prefix_lm_mask(11)),
        "documents, causal": (64, masks.generate_doc_mask_mod(causal, offsets)),
        "documents, window": (64, masks.generate_doc_mask_mod(window(5), offsets)),
        "documents, prefix": (64, masks.generate_doc_mask_mod(masks.generate_prefix_lm_mask(4), offsets)),
        "neighbourhood": (64, masks.generate_natten(8, 8, 3, 3)),
        "neighbourhood in tiles": (64, masks.generate_tiled_natten(8, 8, 3, 3, 4, 4)),
        "neighbourhood in Morton order": (64, masks.generate_morton_natten(8, 8, 3, 3)),
        "sliding tiles, 2-D": (80, masks.generate_sta_mask_mod_2d((8, 8), (4, 4), (2, 2), 16)),
        "sliding tiles, 3-D": (72, masks.generate_sta_mask_mod_3d((4, 4, 4), (2, 2, 2), (2, 2, 2), 8)),
        "batches": (64, of("attn_gym.masks.batchify").batchify_mask_mod(causal, 12)),
        "video, spatial": (94, of("attn_gym.masks.svg").generate_spatial_head_mask_mod(4, 5, 18, 2, True, 4)),
        "video, temporal": (94, of("attn_gym.masks.svg").generate_temporal_head_mask_mod(4, 5, 18, 2)),
    }
    if hasattr(masks, "generate_shared_prefix_mask_mod"):
        listed |= _newer(device, offsets)
    for name, (length, mask) in listed.items():
        yield name, length, None, mask, (), None
    intervals = torch.tensor([[0, 20], [10, 50], [50, 60]], device=device)
    flamingo = of("attn_gym.masks.flamingo").generate_vision_cross_attention_mask_mod(intervals, 20)
    yield "images of a text", 60, None, flamingo, (), None
    yield "ALiBi", 64, of("attn_gym.mods.alibi").generate_alibi_bias(HEADS), causal, (), None
    for approximate in (False, True):
        capped = of("attn_gym.mods.softcapping").generate_tanh_softcap(3, approximate)
        yield f"soft-cap{', approximate' * approximate}", 64, capped, None, (), None
    rows = torch.randn(BATCH, HEADS, 64, 32, device=device, requires_grad=True)
    keys = torch.randn(BATCH, 1, 64, 32, device=device, requires_grad=True)
    latent = of("attn_gym.mods.latent_attention").generate_mla_rope_score_mod(rows, keys, HEADS, 0.3)
    if hasattr(of("attn_gym.mods"), "generate_sandwich_bias"):
        yield from _newer_scores(device)
    # torch's own derivative of an index does not take rows
    yield "latent", 64, latent, causal, (rows, keys), lambda s, b, h, q, k: s + 0.3 * (rows @ keys.mT)[b, h, q, k]


def _newer(device: str, offsets: torch.Tensor) -> dict[str, tuple[int, Callable[..., Any]]]:
    """The masks of later versions."""
    masks, tiles = importlib.import_module("attn_gym.masks"), importlib.import_module("attn_gym.masks.vsa")
    is_global = torch.arange(64, device=device) % 21 == 0
    tree = masks.build_tree_ancestor_matrix([-1, 0, 0, 1, 1, 2] + [n // 2 for n in range(6, 64)], device)
    chosen = torch.rand(BATCH, HEADS, 8, 8, device=device).argsort(-1)[..., :3].int()
    mapped = torch.rand(BATCH, HEADS, 8, 8, device=device) < 0.5
    sizes = torch.tensor([8, 8, 8, 5, 8, 8, 8, 3], device=device, dtype=torch.int32)
    return {
        "documents, packed": (64, masks.generate_packed_causal_doc_mask_mod(offsets)),
        "block diffusion": (64, masks.generate_block_diffusion_mask(32, 4)),
        "global and sliding window": (64, masks.generate_global_sliding_window(5, is_global)),
        "tree": (64, masks.generate_jetspec_tree_causal_mask_mod(0, tree)),
        "training blocks": (64, masks.generate_jetspec_training_mask_mod(16, 8)),
        "shared prefix": (64, masks.generate_shared_prefix_mask_mod(offsets, torch.tensor([0, 0, 0], device=device))),
        "video tiles, chosen": (64, masks.generate_vsa_mask_mod(chosen, 8, sizes)),
        "video tiles, by a map": (64, tiles.generate_vsa_block_map_mask_mod(mapped, 8)),
        "video tiles, padded": (64, tiles.generate_vsa_padding_mask_mod(sizes, 8)),
    }


def _newer_scores(device: str) -> Iterator[Case]:
    """The scores of later versions."""
    mods = importlib.import_module("attn_gym.mods")
    yield "activation", 64, mods.generate_activation_score_mod(), None, (), None
    yield "sandwich", 64, mods.generate_sandwich_bias(HEADS, 64, device=device), None, (), None
    linked = torch.rand(BATCH, 64, 64, device=device) < 0.05
    linked = linked | linked.mT
    table = torch.randn(HEADS, 7, device=device, requires_grad=True)
    distances = mods.shortest_path_distances(linked, 5)
    yield "graph, by distance", 64, mods.generate_graphormer_spatial_bias(table, distances), None, (table,), None
    edges = torch.randn(HEADS, 3, 4, device=device, requires_grad=True)
    paths = mods.shortest_path_edge_types(linked, torch.randint(0, 4, linked.shape, device=device), 3)
    yield "graph, by edges", 64, mods.generate_graphormer_edge_bias(edges, *paths), None, (edges,), None


def worst(case: Case, device: str) -> float:
    """The largest error of the output and of the gradients, relative to the largest element."""
    _, length, score, mask, captured, reference = case
    torch.manual_seed(length)
    q, k, v = (torch.randn(BATCH, HEADS, length, SIZE, device=device, requires_grad=True) for _ in range(3))
    blocks = None if mask is None else create_block_mask(mask, BATCH, HEADS, length, length, device)
    found = flex_attention(q, k, v, score, blocks)
    lists = theirs._create_empty_block_mask(q, k)
    if mask is not None:
        lists = theirs.create_block_mask(mask, BATCH, HEADS, length, length, device)
    exact = [t.double() for t in (q, k, v)]
    wanted = math_attention(*exact, reference or score or theirs._identity, lists.as_tuple(), 1 / math.sqrt(SIZE), {})[0]
    weights = torch.randn_like(found)
    tensors = (q, k, v, *captured)
    gradients = [torch.autograd.grad((o * weights).sum(), tensors) for o in (found, wanted)]
    pairs = [(found, wanted), *zip(*gradients, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", help="a checkout of attention-gym")
    parser.add_argument("--kernels", action="store_true", help="compute by the emulated device where there is no GPU")
    given = parser.parse_args()
    sys.path.insert(0, given.path)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    warnings.simplefilter("ignore")
    warned: set[str] = set()

    def computed(tensors: Any, key: Any, describe: Any, arguments: Any, *others: Any) -> Any:
        for one in load_source(SourceFile("<spec>", arguments[3])):
            warned.update(found.message for found in suspicions(one.spec, functions=("mask", "score")))
        return by_torch(*arguments)

    if device == "cpu" and not given.kernels:
        flex_operator._front.call = computed  # type: ignore[method-assign]
    failed, every = 0, list(cases(device))
    for case in every:
        try:
            error = worst(case, device)
            said = f"{error:.1e}" if error < 2e-5 else f"WRONG by {error:.1e}"
        except Exception as problem:  # a refusal is listed like a wrong result
            said = f"{type(problem).__name__}: {problem}"
        said = f"WARNED: {', '.join(sorted(warned))}" if warned else said
        warned.clear()
        failed += not said[0].isdigit()
        print(f"{case[0]:32} {said}", flush=True)
    print(f"{len(every) - failed} of {len(every)} agree")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
