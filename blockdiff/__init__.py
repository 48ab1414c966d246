"""Train and sample block-diffusion language models. The public face: `load`, `save`, `init`, `train`, `Sampler`, ...

Importing this package imports nothing heavy; torch comes with the first use of a public name.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blockdiff.checkpoint import export, init, load, save, with_image_side
    from blockdiff.models.adapters import merge
    from blockdiff.sampling import Engine, Request, Sampler
    from blockdiff.training.callbacks import Callback
    from blockdiff.training.recipe import Recipe
    from blockdiff.training.run import Run
    from blockdiff.training.train import train
    from blockdiff.training.trainer import Trainer

__version__ = "0.1.0"
if not (Path(__file__).parent / "cli").is_dir():
    # In a checkout, installed or not, cli/ and recipes/ are next to this package; otherwise they are in it.
    __path__.append(str(Path(__file__).resolve().parents[1]))
# Where each public name is defined; it is imported when it is first used.
_HOME = {
    "Callback": "blockdiff.training.callbacks",
    "Engine": "blockdiff.sampling",
    "Recipe": "blockdiff.training.recipe",
    "Request": "blockdiff.sampling",
    "Run": "blockdiff.training.run",
    "Sampler": "blockdiff.sampling",
    "Trainer": "blockdiff.training.trainer",
    "export": "blockdiff.checkpoint",
    "init": "blockdiff.checkpoint",
    "load": "blockdiff.checkpoint",
    "merge": "blockdiff.models.adapters",
    "save": "blockdiff.checkpoint",
    "train": "blockdiff.training.train",
    "with_image_side": "blockdiff.checkpoint",
}
__all__ = [
    "Callback",
    "Engine",
    "Recipe",
    "Request",
    "Run",
    "Sampler",
    "Trainer",
    "__version__",
    "export",
    "init",
    "load",
    "merge",
    "save",
    "train",
    "with_image_side",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'blockdiff' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
