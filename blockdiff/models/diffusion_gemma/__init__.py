"""DiffusionGemma: Google's block-diffusion model over Gemma 4's mixture-of-experts stack."""

from blockdiff.models.diffusion_gemma import config, images
from blockdiff.models.diffusion_gemma.model import DiffusionGemma
from blockdiff.models.diffusion_gemma.names import NAMES
from blockdiff.models.family import Capabilities, Family

FAMILY = Family(
    model_type="diffusion_gemma",
    architecture="DiffusionGemmaForBlockDiffusion",
    model_class=DiffusionGemma,
    names=NAMES,
    parts={
        "images": ("image_side.*",),
        "layer_scalars": ("layers.*_scalar",),
        "router": ("layers.*.router.*",),
        "experts": ("layers.*.experts.*",),
        "self_conditioning": ("self_conditioning.*",),
        "norms": ("*norm.weight",),
        "attention": ("layers.*.attention.*",),
        "mlp": ("layers.*.mlp.*",),
        "embedding": ("vocabulary.*",),
    },
    adapted_parts=("attention", "mlp", "experts", "self_conditioning", "images"),
    fp8_parts=("attention", "mlp", "experts"),
    tensor_parts={
        "layers.*.attention": "attention",
        "layers.*.mlp": "mlp",
        "self_conditioning": "mlp",
        "layers.*.experts": "experts",
        "vocabulary": "vocabulary",
    },
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
)

__all__ = ["FAMILY", "DiffusionGemma"]
