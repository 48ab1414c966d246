"""Checkpoints in the Hub's layout: `load`, `save`, `init` for random weights, `convert` for causal models."""

from blockdiff.checkpoint.adapters import load_adapter, read_adapter, save_adapter
from blockdiff.checkpoint.config import fitted, preset_config, presets, read_config, released_preset
from blockdiff.checkpoint.convert import add_tokens, convert, drafter_for, with_rows_for
from blockdiff.checkpoint.create import draw_weights, init
from blockdiff.checkpoint.files import Carried
from blockdiff.checkpoint.generation import Generation, SpecialTokens, default_generation, special_tokens
from blockdiff.checkpoint.images import empty_image_side, with_image_side
from blockdiff.checkpoint.merging import export
from blockdiff.checkpoint.opening import load
from blockdiff.checkpoint.read import empty, load_weights, weights_dtype
from blockdiff.checkpoint.write import save

__all__ = [
    "Carried",
    "Generation",
    "SpecialTokens",
    "add_tokens",
    "convert",
    "default_generation",
    "drafter_for",
    "draw_weights",
    "empty",
    "empty_image_side",
    "export",
    "fitted",
    "init",
    "load",
    "load_adapter",
    "load_weights",
    "preset_config",
    "presets",
    "read_adapter",
    "read_config",
    "released_preset",
    "save",
    "save_adapter",
    "special_tokens",
    "weights_dtype",
    "with_image_side",
    "with_rows_for",
]
