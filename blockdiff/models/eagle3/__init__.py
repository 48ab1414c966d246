"""EAGLE3: one-layer heads that draft token by token from the outputs of some of a target's layers."""

from blockdiff.models.eagle3.family import Eagle3Family, SpeculatorsFamily
from blockdiff.models.eagle3.model import Eagle3

FAMILIES = (Eagle3Family, SpeculatorsFamily)

__all__ = ["FAMILIES", "Eagle3"]
