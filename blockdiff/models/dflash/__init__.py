"""DFlash: drafters, one-step block-diffusion models that read the outputs of some of a causal model's layers."""

from blockdiff.models.dflash.family import DFlashFamily
from blockdiff.models.dflash.model import DFlash

FAMILIES = (DFlashFamily,)

__all__ = ["FAMILIES", "DFlash", "DFlashFamily"]
