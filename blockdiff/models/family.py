"""The contract of a model family: all that the rest of the code asks of one beside its model; nothing else names it.

A family is what a module of this package has as its `FAMILY`, or one of its `FAMILIES`; `family_of` finds it by the
model type of a config.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn

from blockdiff import models
from blockdiff.errors import CheckpointError
from blockdiff.models.image_side import ImageSide
from blockdiff.models.names import Names

if TYPE_CHECKING:
    from blockdiff.models.model import BlockDiffusionModel


@dataclass(frozen=True)
class Outline:
    """The content of a config, in words that all families share.

    bos, eos, pad: ids of special tokens as the config has them; experts, experts_per_token: 0 without;
    cached_per_token: numbers that a prefix holds of one token; positions: how many tokens a row may have; lines: the
    shape of the model for a person to read; denoises: whether there are canvases (canvas_length is 1 where not);
    is_drafter: whether it drafts for another model, and is nothing without it; mask: the mask token of a drafter's
    blocks (None: it has none).
    """

    vocab_size: int
    canvas_length: int
    bos: int | None
    eos: int | list[int] | None
    pad: int | None
    initializer_range: float
    experts: int
    experts_per_token: int
    cached_per_token: int
    positions: int
    lines: tuple[str, ...]
    denoises: bool = True
    is_drafter: bool = False
    mask: int | None = None


@dataclass(frozen=True)
class Capabilities:
    """The objectives and meshes that a family's models can be trained with.

    `Family.require` refuses everything else. Adapters and fp8 go by the parts that can have them.
    """

    predictions: tuple[str, ...]
    corruptions: tuple[str, ...]
    meshes: tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """One model family.

    model_type: what its config.json calls it; architecture: the class that loads its checkpoints, in transformers or,
    of a drafter, in what serves it. hub_type: the model type in its config.json where that is another family's, too,
    and the architecture there tells them apart (None: model_type). is_written: whether checkpoints are written, too.
    parts: the name of a part -> patterns (`*`, `?`) of our parameters' names; a parameter belongs to the first part
    that matches. Sizes, freezing and adapters go by parts. adapted_parts: those whose linear layers and experts can
    have adapters; selecting_parts: those that choose what is computed with and that no loss reaches, so that they stand
    still; fp8_parts: those whose linear layers and experts can have their weights in fp8 (none: it has no fp8).
    sharding_units: names of modules (`{}` is the layer number)
    whose weights are gathered together when they are sharded, inner ones first. tensor_parts: patterns of the names of
    modules -> how tensor parallelism splits them: "attention", "mlp", "experts" or "vocabulary"; empty: it cannot.

    The functions take the family's own config. `read(values)` makes it from the content of a config.json and checks it;
    `check(config)` raises CheckpointError for what it says and the model does not do; `outline(config)` is what
    others read of it; `with_tokens(config, vocab_size, special)` is the config with another vocabulary (special:
    bos_token_id, eos_token_id, pad_token_id); `image_side(config)` makes what turns images into embeddings, without
    weights that are read, and `image_tokens(config)` says which tokens stand before an image, for each of its parts and
    after it, by id or as they are spelt (None of both: it takes no images); `image_processor(values)` is the content of
    a preprocessor_config.json for a processor that needs no torchvision, where the family's own does;
    `with_canvases(config, canvas_length)` is the config of a causal model as a denoiser (None: its models denoise);
    `for_target(config, layers, block, mask, scale, softcap)` is that of a drafter for a model of a config, whose
    vocabulary has this scale and softcap (None: the family has no drafters).
    """

    model_type: str
    architecture: str
    model_class: type[BlockDiffusionModel]
    names: Names
    parts: Mapping[str, tuple[str, ...]]
    adapted_parts: tuple[str, ...]
    sharding_units: tuple[str, ...]
    capabilities: Capabilities
    read: Callable[[Mapping[str, Any]], Any]
    check: Callable[[Any], None]
    outline: Callable[[Any], Outline]
    with_tokens: Callable[[Any, int, Mapping[str, int | None]], Any]
    image_side: Callable[[Any], ImageSide | None] = lambda config: None
    image_tokens: Callable[[Any], tuple[int | str, int, int | str] | None] = lambda config: None
    image_processor: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda values: values
    with_canvases: Callable[[Any, int], Any] | None = None
    for_target: Callable[..., Any] | None = None
    tensor_parts: Mapping[str, str] = field(default_factory=dict)
    selecting_parts: tuple[str, ...] = ()
    fp8_parts: tuple[str, ...] = ()
    hub_type: str | None = None
    is_written: bool = True

    def part_of(self, name: str) -> str:
        """The part that one of our parameters or buffers belongs to, by its name; "other" for what none has."""
        parts = self.parts.items()
        return next((part for part, ours in parts if any(fnmatchcase(name, pattern) for pattern in ours)), "other")

    def require_written(self) -> None:
        """Raises CheckpointError where checkpoints of the family are read and not written."""
        if not self.is_written:
            raise CheckpointError(f"a model of {self.architecture} is read and run, and not written; copy its files")

    def units(self, model: nn.Module) -> list[nn.Module]:
        """The modules of a model to shard one by one, inner ones before those that hold them, the model last."""
        named = dict(model.named_modules())
        patterns = [re.compile(re.escape(unit).replace(r"\{\}", r"\d+")) for unit in self.sharding_units]
        return [*(named[name] for pattern in patterns for name in named if pattern.fullmatch(name)), model]

    def require(self, **asked: str) -> None:
        """Raises CheckpointError for the first choice, by the capability's name, that the family does not support."""
        for capability, choice in asked.items():
            supported = getattr(self.capabilities, capability)
            if choice not in supported:
                there = ", ".join(supported) or "none"
                raise CheckpointError(f"{self.model_type} does not support {choice} ({capability}: {there})")


@functools.cache
def families() -> dict[str, Family]:
    """Every family by its model type: the FAMILY, or the FAMILIES, of each module of this package that has any."""
    names = [each.name for each in pkgutil.iter_modules(models.__path__, "blockdiff.models.")]
    modules = [importlib.import_module(name) for name in names]
    found = [
        family
        for module in modules
        for family in (getattr(module, "FAMILIES", ()) or ([module.FAMILY] if hasattr(module, "FAMILY") else ()))
    ]
    return {family.model_type: family for family in found}


def family_of(config: Any) -> Family:
    """The family of a config, or of a model type; CheckpointError where there is none."""
    model_type = config if isinstance(config, str) or config is None else config.model_type
    if model_type not in families():
        known = ", ".join(repr(name) for name in families())
        raise CheckpointError(f"model_type is {model_type!r}; blockdiff reads {known}")
    return families()[model_type]


def family_of_file(values: Mapping[str, Any]) -> Family:
    """The family of the content of a config.json; CheckpointError where there is none."""
    model_type, named = values.get("model_type"), values.get("architectures") or ()
    if (of_speculators := values.get("speculators_model_type")) is not None:  # whose files have no other
        model_type = f"speculators_{of_speculators}"
    shared = (each for each in families().values() if each.hub_type is not None and each.hub_type == model_type)
    return next((each for each in shared if each.architecture in named), None) or family_of(model_type)
