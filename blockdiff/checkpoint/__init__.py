"""Hub-layout safetensors in and out: `load`, `save`, and `init` for random weights."""

from blockdiff.checkpoint.create import init, preset_config, presets
from blockdiff.checkpoint.files import Carried
from blockdiff.checkpoint.read import load
from blockdiff.checkpoint.write import default_generation, save

__all__ = ["Carried", "default_generation", "init", "load", "preset_config", "presets", "save"]
