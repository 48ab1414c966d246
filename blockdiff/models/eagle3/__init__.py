"""EAGLE3: heads of one layer that draft token by token from what some of a target's layers say of the text."""

from blockdiff.models.eagle3.family import Eagle3Family, SpeculatorsFamily
from blockdiff.models.eagle3.model import Eagle3

FAMILIES = (Eagle3Family, SpeculatorsFamily)

__all__ = ["FAMILIES", "Eagle3"]
