"""DFlash: drafters, block-diffusion models of one step that read what a causal model's layers say of the context."""

from blockdiff.models.dflash.family import DFlashFamily
from blockdiff.models.dflash.model import DFlash

FAMILIES = (DFlashFamily,)

__all__ = ["FAMILIES", "DFlash", "DFlashFamily"]
