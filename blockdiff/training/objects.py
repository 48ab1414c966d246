"""The objects that the words of a recipe name, where they are not those of other rooms, and how each is recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, WrapValidator

from blockdiff.data.collate import AllCanvases, FirstCanvases, LastCanvases, RandomCanvases
from blockdiff.data.rows import CONTENT_KEYS
from blockdiff.data.sources import Source
from blockdiff.diffusion.corruption import Corruption, MaskCorruption, UniformCorruption
from blockdiff.diffusion.schedule import Cosine, Linear, LogitNormalTime, Polynomial, StratifiedTime, UniformTime
from blockdiff.diffusion.weight import ElboWeight, NoWeight
from blockdiff.errors import DataError, RecipeError
from blockdiff.training.one_of import OneOf, by_class
from blockdiff.training.schedule import Constant, CosineDecay, LinearDecay, StableDecay

Positive = Annotated[int, Field(gt=0)]


@dataclass(frozen=True)
class ArLoss:
    """The next-token loss of the encode pass, times `weight`: of all clean tokens, or of those in a response."""

    weight: float = 1.0
    scope: Literal["all", "response"] = "all"

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ValueError(f"the weight must be more than 0, got {self.weight}; none leaves this loss out")


@dataclass(frozen=True)
class Streaming:
    """Rows are read as they are needed; `shuffle_buffer` of them are shuffled among themselves."""

    shuffle_buffer: Positive = 10_000


@dataclass(frozen=True)
class MaxLength:
    """The longest example in tokens, and what happens to longer ones."""

    tokens: Positive
    too_long: ClassVar[Literal["truncate", "drop", "refuse"]]


class Truncate(MaxLength):
    """Longer examples are cut at a canvas boundary."""

    too_long = "truncate"


class Drop(MaxLength):
    """Longer examples are left out."""

    too_long = "drop"


class Refuse(MaxLength):
    """Longer examples end the run before it begins."""

    too_long = "refuse"


@dataclass(frozen=True)
class UniformTokens:
    """A corrupted token becomes any token of the vocabulary."""

    def for_tokenizer(self, tokenizer: Any, vocab_size: int, reserved: Collection[int | None]) -> Corruption:
        """The corruption of a model with so many tokens."""
        return UniformCorruption(vocab_size)


@dataclass(frozen=True)
class MaskToken:
    """A corrupted token becomes the mask token: the tokenizer's own, or another of its tokens by name."""

    token: str | None = None

    def for_tokenizer(self, tokenizer: Any, vocab_size: int, reserved: Collection[int | None]) -> Corruption:
        """The corruption for a tokenizer; RecipeError without a mask token or if its id is among `reserved`."""
        mask_id = tokenizer.mask_token_id if self.token is None else tokenizer.get_vocab().get(self.token)
        if mask_id is None:
            reason = "the tokenizer has no mask token"
            reason = reason if self.token is None else f"{self.token!r} is no token of the tokenizer"
            remedy = "name one of its tokens that no text contains, {mask: {token: NAME}}"
            raise RecipeError(f"objective.corruption: {reason}; {remedy}")
        if mask_id in reserved:
            name = tokenizer.convert_ids_to_tokens(mask_id)
            raise RecipeError(
                f"objective.corruption: {name!r} is the bos, eos or pad token; name another, {{mask: {{token: NAME}}}}"
            )
        return MaskCorruption(int(mask_id))


AnyCorruption = UniformTokens | MaskToken | Corruption

SCHEDULE = OneOf({"linear": Linear, "cosine": Cosine, "polynomial": Polynomial})
TIME = OneOf({"stratified": StratifiedTime, "uniform": UniformTime, "logit_normal": LogitNormalTime})
CORRUPTION = OneOf({"uniform": UniformTokens, "mask": MaskToken})
WEIGHT = OneOf({"none": NoWeight, "elbo": ElboWeight})
AR_LOSS = OneOf({"": ArLoss}, number="", none="none")
LR_SCHEDULE = OneOf({"cosine": CosineDecay, "linear": LinearDecay, "wsd": StableDecay, "constant": Constant})
CANVASES = OneOf(
    {"all": AllCanvases, "random": RandomCanvases, "first": FirstCanvases, "last": LastCanvases}, number="random"
)
STREAMING = OneOf({"": Streaming}, none=False, default=True)
MAX_LENGTH = OneOf({"truncate": Truncate, "drop": Drop, "refuse": Refuse}, number="truncate", none=None)


def described(part: object) -> Any:
    """An object by name and values, as YAML and JSON have them: as recipes spell it, or else by its class."""
    for choice in (SCHEDULE, TIME, CORRUPTION, WEIGHT, AR_LOSS, LR_SCHEDULE, CANVASES, MAX_LENGTH):
        if type(part) in choice.kinds.values():
            return choice.short(part)
    return by_class(part)


def _as_list(value: Any) -> Any:
    """One source may stand without a list, and from Python a list may be the rows of one."""
    is_rows = isinstance(value, list) and value and isinstance(value[0], Mapping) and CONTENT_KEYS & value[0].keys()
    return value if isinstance(value, list) and not is_rows else [value]


def _read_source(value: Any, read: Callable[[Any], Source]) -> Source:
    """A source that says no more than its path may be written as that; from Python it may be the rows themselves."""
    if isinstance(value, str):
        value = {"path": value}
    elif not isinstance(value, Mapping | Source | bool | int | float | None):
        value = {"rows": value}
    if isinstance(value, Mapping) and isinstance(value.get("rows"), int):
        raise ValueError(f"{value['rows']} rows were given from Python; give them again from Python")
    try:
        return read(value)
    except DataError as error:
        raise ValueError(str(error)) from None


def _written_source(source: Source) -> Any:
    """The fields of a source that differ from their defaults, or its path if that is all; rows as their number."""
    if source.rows is not None:
        return {"path": None, "name": source.title, "rows": len(source.rows)}
    values = {field.name: getattr(source, field.name) for field in fields(source)}
    changed = {field.name: values[field.name] for field in fields(source) if values[field.name] != field.default}
    return source.path if changed.keys() == {"path"} else changed


OneSource = Annotated[Source, WrapValidator(_read_source), PlainSerializer(_written_source)]
Sources = Annotated[list[OneSource], Field(min_length=1), BeforeValidator(_as_list)]
