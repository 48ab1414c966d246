"""The contract of a model family: its decisions, and the config of one of its models.

A family is a subclass of `Family` in its own module or folder of this package. Its class attributes hold for all of its
models; an instance is the config of one model, made once from the content of a config.json. The rest of the code reads
`model.config` and knows no family by name. Each module lists its classes in `FAMILIES`, where `families` finds them.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
import math
import pkgutil
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import nn

from blockdiff import models
from blockdiff.errors import CheckpointError
from blockdiff.models.config_checks import is_above_zero, refuse_first

if TYPE_CHECKING:
    from blockdiff.models.image_side import ImageSide
    from blockdiff.models.model import BlockDiffusionModel
    from blockdiff.models.names import Names


LARGEST_CANVAS = 8192  # tokens; released models have 256
NO_HEAD = "a clean token of this model sees its whole block (prefix: blocks), so nothing predicts next tokens"


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family; an instance is the config of one of its models.

    Class attributes, the same for all models of a family:
    model_type: the name of the family in a config.json; architecture: the class that loads its checkpoints, in
    transformers or, for a drafter, in the engine that serves it; is_drafter: whether its models draft for another model
    and cannot run without it; makes_drafters: whether it has `for_target`; is_written: whether checkpoints are written;
    has_self_conditioning: whether a denoiser reads the soft embedding of its last prediction; default_strategy: the
    text of the strategy that its models are sampled by (None: the released rules for a denoiser, else next tokens);
    objective: the keys of the objective of canvases, as a recipe has them, with which its denoisers are trained if they
    bring no blockdiff.json and the recipe does not set them (`trained_with` adds keys that follow from the config);
    length_key: the key of config.json with the length of a canvas, if released files without it have to be read;
    seeds_canvases: whether a sampled canvas begins with the next token of the model's head;
    noisy_adapters: names of folders in which releases have adapters of noisy tokens only;
    image_spellings: the keys of config.json with the ids of image tokens -> the tokens' spelling.
    parts: the name of a part -> patterns (`*`, `?`) of our parameters' names; a parameter belongs to the first part
    that matches. Sizes, freezing and adapters go by parts. adapted_parts: parts whose linear layers and experts can
    have adapters; selecting_parts: parts that only select the inputs of others, so no loss reaches them and they are
    frozen; quantised_parts: parts whose linear layers and experts can be stored in fewer bits.
    sharding_units: names of modules (`{}` is the layer number) whose weights are gathered together when they are
    sharded, inner ones first. tensor_parts: patterns of the names of modules -> how tensor parallelism splits them:
    "attention", "mlp", "experts" or "vocabulary"; empty: it cannot. predictions, corruptions, meshes: what the models
    can be trained with; `require` refuses everything else. prefixes: the allowed values of the field `prefix`.

    Fields of one model, with the same names and values in all families; most are named as in config.json.
    values: the whole content of config.json, including keys that nothing here reads; canvas_length: 1 for a causal
    model; denoises: whether the model has canvases; prefix: what a clean token sees, "causal" (nothing behind it) or
    "blocks" (its whole block of `canvas_length` tokens; canvases are such blocks, too); experts, experts_per_token: 0
    without experts; rope_theta: of the first kind of layers; mask: the mask token of a drafter's blocks, or of a
    denoiser's canvases if no blockdiff.json has another (None: noise is uniform); fill: the token behind the end of a
    response in its last canvas (None: the one that ends prompt and response).
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    model_class: ClassVar[type[BlockDiffusionModel]]
    names: ClassVar[Names]
    parts: ClassVar[Mapping[str, tuple[str, ...]]]
    adapted_parts: ClassVar[tuple[str, ...]] = ()
    selecting_parts: ClassVar[tuple[str, ...]] = ()
    quantised_parts: ClassVar[tuple[str, ...]] = ()
    sharding_units: ClassVar[tuple[str, ...]]
    tensor_parts: ClassVar[Mapping[str, str]] = {}
    predictions: ClassVar[tuple[str, ...]] = ()
    corruptions: ClassVar[tuple[str, ...]] = ()
    meshes: ClassVar[tuple[str, ...]] = ()
    prefixes: ClassVar[tuple[str, ...]] = ("causal",)
    is_drafter: ClassVar[bool] = False
    makes_drafters: ClassVar[bool] = False
    is_written: ClassVar[bool] = True
    has_self_conditioning: ClassVar[bool] = True
    default_strategy: ClassVar[str | None] = None
    objective: ClassVar[Mapping[str, Any]] = {}
    length_key: ClassVar[str | None] = None
    seeds_canvases: ClassVar[bool] = False
    noisy_adapters: ClassVar[tuple[str, ...]] = ()
    image_spellings: ClassVar[Mapping[str, str]] = {}

    values: Mapping[str, Any] = field(repr=False, hash=False)
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    initializer_range: float
    bos_token_id: int | None
    eos_token_id: int | list[int] | None
    pad_token_id: int | None
    canvas_length: int
    denoises: bool
    prefix: str = "causal"
    experts: int = 0
    experts_per_token: int = 0
    mask: int | None = None
    fill: int | None = None

    def __post_init__(self) -> None:
        """Raise CheckpointError if a field has a value that no model has, whichever key of config.json set it."""
        refuse_first(self._out_of_range())

    def _out_of_range(self) -> Iterator[str]:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, float) and not math.isfinite(value):
                yield f"{each.name} is {value!r}; it must be a finite number"
        if self.canvas_length > LARGEST_CANVAS:
            yield f"canvas_length is {self.canvas_length}; canvases of at most {LARGEST_CANVAS} tokens are supported"
        if self.prefix not in self.prefixes:
            yield f"prefix is {self.prefix!r}; {self.model_type} has: {', '.join(self.prefixes)}"
        elif self.prefix == "blocks" and not self.denoises:
            yield 'prefix is "blocks", whose length is the canvas_length, and there is none; give one'
        if not 0 <= self.rms_norm_eps <= 1:
            yield f"rms_norm_eps is {self.rms_norm_eps!r}; it must be at least 0 and at most 1"
        cap = getattr(self, "final_logit_softcapping", None)
        if cap is not None and not is_above_zero(cap):
            yield f"final_logit_softcapping is {cap!r}; it must be above 0, or null"

    # -- config.json -----------------------------------------------------------------------------------------------

    @classmethod
    def is_of(cls, values: Mapping[str, Any]) -> bool:
        """Whether `values`, the content of a config.json, is a config of this family."""
        return bool(values.get("model_type") == cls.model_type)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Return the config, given the content of a config.json.

        Raises CheckpointError, naming the field, for a value that the model does not support: every value is computed
        with or refused, never ignored. Keys that do not change the computation are kept in `values`.
        """
        raise NotImplementedError

    @classmethod
    def text_of(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the object within `values` that has the fields of the text model; changing it changes `values`."""
        return values

    @classmethod
    def completed(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the whole content of a config.json; `values` has the keys that differ from the defaults."""
        return values

    @classmethod
    def of(cls, values: Mapping[str, Any], theirs: Any, **own: Any) -> Self:
        """Return the config with each field from `own`, else from the attribute of that name of `theirs`."""
        own = {"prefix": values.get("prefix") or "causal"} | own | {"values": copy.deepcopy(dict(values))}
        names = [each.name for each in fields(cls) if each.name not in own and hasattr(theirs, each.name)]
        return cls(**{name: getattr(theirs, name) for name in names}, **own)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of config.json, with all keys as they were read."""
        return copy.deepcopy(dict(self.values))

    def with_tokens(
        self, vocab_size: int, special: Mapping[str, int | None], vocabulary: Mapping[str, int] | None = None
    ) -> Self:
        """Return the config with a vocabulary of `vocab_size` tokens.

        special: bos_token_id, eos_token_id, pad_token_id and mask_token_id. vocabulary: token -> id; the ids of image
        tokens are looked up in it, and if one is missing the model takes no images (None: these ids stay).
        """
        values = self.to_dict()
        self.text_of(values).update(vocab_size=vocab_size, **special)
        if vocabulary is not None:
            ids = {key: vocabulary.get(token, vocab_size) for key, token in self.image_spellings.items()}
            values |= {key: token for key, token in ids.items() if values.get(key) is not None}
        return self.read(values)

    def with_canvases(self, canvas_length: int, prefix: str = "causal") -> Self:
        """Return the config of the same model as a denoiser of canvases of `canvas_length` tokens, with this prefix."""
        more = {} if prefix == "causal" else {"prefix": prefix}
        return self.read(self.to_dict() | {"canvas_length": canvas_length} | more)

    @property
    def stored_dtype(self) -> str | None:
        """The dtype of the weights as config.json names it, None if it names none."""
        stored = self.values.get("dtype", self.values.get("torch_dtype"))
        return None if stored is None else str(stored)

    def written(self, dtype: str, quantization: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the content of a config.json for weights of this dtype and, if they are quantised, `quantization`."""
        values = self.to_dict()
        values.pop("quantization_config", None)
        named = "torch_dtype" if "torch_dtype" in values and "dtype" not in values else "dtype"  # older files' key
        values |= {"model_type": values.get("model_type", self.model_type), "architectures": [self.architecture]}
        return values | {named: dtype} | ({} if quantization is None else {"quantization_config": dict(quantization)})

    # -- one model -------------------------------------------------------------------------------------------------

    @property
    def block(self) -> int | None:
        """The length of the blocks that clean tokens see whole; None with a causal prefix.

        Blocks are counted from the document's start, and canvases begin at their multiples. With a causal prefix
        canvases begin at any column.
        """
        return self.canvas_length if self.prefix == "blocks" else None

    @property
    def predicts_next_tokens(self) -> bool:
        """Whether clean tokens predict the next one; False if they already see tokens behind them."""
        return self.prefix == "causal"

    @property
    def trained_with(self) -> dict[str, Any]:
        """The canvas objective's keys, as in a recipe, if there is no blockdiff.json; {} if causal or a drafter."""
        follows: dict[str, Any] = {} if self.mask is None else {"corruption": "mask"}
        follows |= {} if self.has_self_conditioning else {"coin": 0.0}
        follows |= {} if self.predicts_next_tokens else {"ar_loss": "none"}
        return follows | dict(self.objective) if self.denoises and not self.is_drafter else {}

    @property
    def cached_per_token(self) -> int:
        """The count of numbers that a prefix stores for one token."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines that describe the shape of the model to a person."""
        raise NotImplementedError

    @property
    def answer_length(self) -> int:
        """The most tokens of an answer, if neither a request nor generation_config.json has a number."""
        return self.canvas_length if self.denoises else 256

    def image_side(self) -> ImageSide | None:
        """Build the modules that turn images into embeddings, with no weights read yet; None without an image side."""
        return None

    def image_tokens(self) -> tuple[int | str, int, int | str] | None:
        """Return three tokens, each an id or its spelling: before an image, for each of its parts, and after it.

        None if the model takes no images: it has no image side, or its vocabulary lacks these tokens.
        """
        return None

    @classmethod
    def for_target(
        cls, target: Family, layers: int, block: int, mask: int, scale: float, softcap: float | None
    ) -> Family:
        """Return the config of a drafter with `layers` layers and blocks of `block` tokens for a target.

        target: the target's config. mask: the mask token. scale: the factor of the target's embeddings. softcap: the
        cap of its logits (None: uncapped).
        """
        raise NotImplementedError

    # -- the family ------------------------------------------------------------------------------------------------

    @classmethod
    def image_processor(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Convert `values`, of a preprocessor_config.json, for an image processor that needs no torchvision.

        They are unchanged unless a family overrides this.
        """
        return values

    @classmethod
    def part_of(cls, name: str) -> str:
        """Return the part of one of our parameters or buffers by its name, "other" if no pattern matches."""
        parts = cls.parts.items()
        return next((part for part, ours in parts if any(fnmatchcase(name, pattern) for pattern in ours)), "other")

    @classmethod
    def units(cls, model: nn.Module) -> list[nn.Module]:
        """Return the modules of a model to shard one by one: inner modules before outer ones, the model last."""
        named = dict(model.named_modules())
        patterns = [re.compile(re.escape(unit).replace(r"\{\}", r"\d+")) for unit in cls.sharding_units]
        return [*(named[name] for pattern in patterns for name in named if pattern.fullmatch(name)), model]

    @classmethod
    def require_written(cls) -> None:
        """Raise CheckpointError if checkpoints of the family can be read but not written."""
        if not cls.is_written:
            raise CheckpointError(f"a model of {cls.architecture} is read and run, and not written; copy its files")

    @classmethod
    def require(cls, **asked: str) -> None:
        """Raise CheckpointError for the first choice, by `predictions=` and so on, that the family does not support."""
        for kind, choice in asked.items():
            supported = getattr(cls, kind)
            if choice not in supported:
                there = ", ".join(supported) or "none"
                raise CheckpointError(f"{cls.model_type} does not support {choice} ({kind}: {there})")


# Fields that transformers' class has for every model and ours do not; `num_labels` is the length of lists there.
OF_EVERY_CLASS = (
    *("num_labels", "id2label", "label2id", "problem_type", "output_attentions"),
    *("attn_implementation", "experts_implementation"),
)


def for_transformers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the content of a config.json for transformers' class, without fields that none of our models uses."""
    content = {name: value for name, value in values.items() if name not in OF_EVERY_CLASS}
    return {
        name: for_transformers(value) if isinstance(value, Mapping) else copy.deepcopy(value)
        for name, value in content.items()
    }


def written_out(theirs: Any) -> dict[str, Any]:
    """Return the content of transformers' config with its class's defaults, except defaults that all classes share."""
    from transformers import PreTrainedConfig

    def own(values: dict[str, Any]) -> dict[str, Any]:
        differences = {name: value for name, value in values.items() if name not in shared or value != shared[name]}
        return {name: own(value) if name.endswith("_config") else value for name, value in differences.items()}

    shared, whole = (json.loads(each.to_json_string(use_diff=False)) for each in (PreTrainedConfig(), theirs))
    return own(whole)


@functools.cache
def families() -> dict[str, type[Family]]:
    """Return every family by its model type: the FAMILIES of each module of this package that has any."""
    names = [each.name for each in pkgutil.iter_modules(models.__path__, "blockdiff.models.")]
    modules = [importlib.import_module(name) for name in names]
    return {family.model_type: family for module in modules for family in getattr(module, "FAMILIES", ())}


def family_of(values: Mapping[str, Any]) -> type[Family]:
    """Return the family of a config.json with content `values`; CheckpointError if there is none.

    If several match, a family that recognises the file by more than its model type is preferred to the one that the
    type names.
    """
    values = dict(values)
    if (of_speculators := values.get("speculators_model_type")) is not None:  # whose files have no other type
        values["model_type"] = f"speculators_{of_speculators}"
    model_type = values.get("model_type")
    matches = [family for family in families().values() if family.is_of(values)]
    if not matches:
        known = ", ".join(repr(name) for name in families())
        raise CheckpointError(f"model_type is {model_type!r}; blockdiff reads {known}")
    if not any(family.is_drafter for family in matches):
        ours = [family for family in families().values() if family.is_drafter]
        words = ("draft", *(family.model_type for family in ours))
        for other in map(str, values.get("architectures") or ()):
            if any(word in other.lower() for word in words):
                known = ", ".join(family.architecture for family in ours)
                raise CheckpointError(f"{other!r:.80} is a drafter of another kind; blockdiff reads those of {known}")
    return next((family for family in matches if family.model_type != model_type), matches[0])
