"""MiniMax M3: a causal mixture of experts with block-sparse attention."""

from blockdiff.models.family import Capabilities, Family
from blockdiff.models.minimax_m3 import config, images
from blockdiff.models.minimax_m3.model import (
    Block,
    MiniMaxM3,
    MiniMaxM3Attention,
    MiniMaxM3Indexer,
    MiniMaxM3MLP,
    MiniMaxM3RMSNorm,
)
from blockdiff.models.minimax_m3.names import NAMES, TEXT_NAMES
from blockdiff.models.names import Names


def _family(model_type: str, architecture: str, names: Names) -> Family:
    return Family(
        model_type=model_type,
        architecture=architecture,
        model_class=MiniMaxM3,
        names=names,
        parts={
            "images": ("image_side.*",),
            "layer_scalars": ("layers.*_scalar",),
            "router": ("layers.*.router.*",),
            "experts": ("layers.*.experts.*",),
            "self_conditioning": ("self_conditioning.*",),
            "indexer": ("layers.*.indexer.*",),
            "norms": ("*norm.weight",),
            "attention": ("layers.*.attention.*",),
            "mlp": ("layers.*.mlp.*", "layers.*.shared.*"),
            "head": ("vocabulary.head",),
            "embedding": ("vocabulary.*",),
        },
        fp8_parts=("attention", "mlp", "experts"),
        adapted_parts=("attention", "mlp", "experts", "images"),
        sharding_units=("image_side", "layers.{}.experts", "layers.{}", "vocabulary"),
        capabilities=Capabilities(
            predictions=("posterior", "leave_one_out"),
            corruptions=("uniform", "mask"),
            meshes=("replicate", "shard", "experts", "tensor"),
        ),
        read=config.read,
        check=config.check,
        outline=config.outline,
        with_tokens=config.with_tokens,
        image_side=images.image_side,
        image_tokens=images.image_tokens,
        image_processor=images.image_processor,
        with_canvases=config.with_canvases,
        tensor_parts={
            "layers.*.attention": "attention",
            "layers.*.mlp": "mlp",
            "layers.*.shared": "mlp",
            "layers.*.experts": "experts",
            "self_conditioning": "mlp",
            "vocabulary": "vocabulary",
        },
        selecting_parts=("indexer",),
    )


FAMILIES = (
    _family("minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration", NAMES),
    _family(config.TEXT, "MiniMaxM3VLForCausalLM", TEXT_NAMES),
)

__all__ = [
    "FAMILIES",
    "Block",
    "MiniMaxM3",
    "MiniMaxM3Attention",
    "MiniMaxM3Indexer",
    "MiniMaxM3MLP",
    "MiniMaxM3RMSNorm",
]
