"""Train and sample block-diffusion language models. The public face: `load`, `Sampler`, `__version__`.

Importing this package imports nothing heavy; torch comes with the first use of a public name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blockdiff.checkpoint import load
    from blockdiff.sampling.sampler import Sampler

__all__ = ["Sampler", "__version__", "load"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "load":
        from blockdiff.checkpoint import load

        return load
    if name == "Sampler":
        from blockdiff.sampling.sampler import Sampler

        return Sampler
    raise AttributeError(f"module 'blockdiff' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
