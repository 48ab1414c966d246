"""DiffusionGemma: Google's block-diffusion model over Gemma 4's mixture-of-experts stack."""

from blockdiff.models.diffusion_gemma.family import DiffusionGemmaFamily
from blockdiff.models.diffusion_gemma.model import DiffusionGemma

FAMILIES = (DiffusionGemmaFamily,)

__all__ = ["FAMILIES", "DiffusionGemma", "DiffusionGemmaFamily"]
