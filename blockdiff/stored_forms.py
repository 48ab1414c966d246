"""The words of `quantize`, which name the forms of fewer bits that weights are stored in. It imports no torch."""

from __future__ import annotations

from typing import Literal

Quantize = Literal["nvfp4", "fp8", "none"]
HELP = "nvfp4 stores experts in 4 bits and other layers in 8, fp8 all in 8, none none. Default: as stored."
# For each word except "none", from more bits to fewer: the forms of linear layers and experts (`layers/weights.py`).
QUANTIZE = {"fp8": ("fp8", "fp8"), "nvfp4": ("fp8", "nvfp4")}
