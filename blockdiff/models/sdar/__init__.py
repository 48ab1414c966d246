"""SDAR: block-diffusion models of Qwen3's layers with a block-causal prefix, dense and with experts; and OPDLM's."""

from blockdiff.models.sdar.family import A2DQwen3Family, SDARFamily, SDARMoeFamily
from blockdiff.models.sdar.model import SDAR, SDARMoe

FAMILIES = (SDARFamily, SDARMoeFamily, A2DQwen3Family)

__all__ = ["FAMILIES", "SDAR", "A2DQwen3Family", "SDARFamily", "SDARMoe", "SDARMoeFamily"]
