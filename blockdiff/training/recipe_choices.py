"""Keys of a recipe whose value is an object: how `linear` or `{polynomial: {power: 3}}` is read and written.

An object of an unlisted class, passed from Python, stays as it is. A run records its class and values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, GetCoreSchemaHandler, PlainSerializer, WrapValidator
from pydantic_core import CoreSchema, core_schema

from blockdiff.data.canvas_choice import AllCanvases, FirstCanvases, LastCanvases, RandomCanvases
from blockdiff.data.rows import CONTENT_KEYS
from blockdiff.data.sources import Source
from blockdiff.diffusion.corruption import Corruption, MaskCorruption, UniformCorruption
from blockdiff.diffusion.schedule import Cosine, Linear, LogitNormalTime, Polynomial, StratifiedTime, UniformTime
from blockdiff.diffusion.weight import ElboWeight, NoWeight
from blockdiff.errors import DataError, RecipeError
from blockdiff.training.schedule import Constant, CosineDecay, LinearDecay, StableDecay

YAML_TYPES = (str, bool, int, float, Mapping, list, tuple, type(None))  # the types of YAML values


class OneOf:
    """The dataclasses that a key chooses from, as metadata of pydantic's `Annotated`.

    kinds: the dataclass of each word. A word alone means its defaults, `{word: {field: value}}` sets fields, and
    `{word: value}` sets the only field without a default. The word "" is never written: its fields are the key's own.
    number: the word that a bare number means, as its first field.
    none, default: how None, and "" with its defaults, are written.
    """

    def __init__(
        self, kinds: Mapping[str, type], *, number: str | None = None, none: Any = MISSING, default: Any = MISSING
    ) -> None:
        self.kinds, self.number, self.none, self.default = kinds, number, none, default
        self.fields = {word: {field.name: field.default for field in fields(kind)} for word, kind in kinds.items()}
        # The field that is written without its name, by word.
        self.only = {word: next(iter(names)) for word, names in self.fields.items() if [*names.values()] == [MISSING]}

    def full(self, value: Any) -> Any:
        """Return a YAML value as {word: fields}, or None. Raises ValueError with the values that the key accepts."""
        word, inner = value, None
        if isinstance(value, Mapping):
            if "" in self.kinds:
                return value if value.keys() == {""} else {"": value}
            word, inner = next(iter(value.items())) if len(value) == 1 else (None, None)
        elif self.none is not MISSING and value in (None, self.none):
            return None
        elif value is self.default:
            return {"": {}}
        elif self.number is not None and isinstance(value, int | float) and not isinstance(value, bool):
            return {self.number: {next(iter(self.fields[self.number])): value}}
        if isinstance(word, str) and "." in word:
            raise ValueError(f"{word} was passed from Python; pass it from Python again")
        if not isinstance(word, str) or not word or word not in self.kinds:
            raise ValueError(f"input should be {self._listed()}")
        if word in self.only and inner is not None:
            return {word: inner if isinstance(inner, Mapping) else {self.only[word]: inner}}
        if word not in self.only and isinstance(inner, Mapping | None):
            return {word: inner or {}}
        raise ValueError(f"{word} should have {self._example(word)}")

    def _example(self, word: str) -> str:
        """An example of the fields of a kind, as a recipe writes them."""
        if word in self.only:
            return f"a value, {{{word}: {self.only[word].upper()}}}"
        values = {name: "null" if default is None else default for name, default in self.fields[word].items()}
        listed = ", ".join(f"{name}: {value}" for name, value in values.items())
        return f"{{{listed}}}" if listed else "no keys"

    def _listed(self) -> str:
        words = [word for word in (self.none, self.default, *self.kinds) if word not in (MISSING, "")]
        listed = [repr(word) if isinstance(word, str) else json.dumps(word) for word in words]
        listed += ["a number"] if self.number is not None else []
        listed += [self._example("")] if "" in self.kinds else []
        return f"{', '.join(listed[:-1])} or {listed[-1]}"

    def short(self, part: Any) -> Any:
        """Return the shortest YAML value that reads back as `part`."""
        if part is None:
            return self.none
        word = next((word for word, kind in self.kinds.items() if type(part) is kind), None)
        if word is None:
            return by_class(part)
        values = {name: getattr(part, name) for name in self.fields[word]}
        changed = {name for name, value in values.items() if value != self.fields[word][name]}
        first = next(iter(values), "")
        if word == self.number and changed <= {first}:
            return values[first]
        if not changed:
            return word or self.default
        if word in self.only:
            return {word: values[first]}
        return {word: values} if word else values

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Read YAML values in short or full form, and accept any object with the methods of the protocol."""
        protocols = [each for each in (source, *get_args(source)) if getattr(each, "_is_protocol", False)]
        methods = [name for protocol in protocols for name in vars(protocol) if not name.startswith("_")]

        def chosen(value: Any, read: Any) -> Any:
            if type(value) in self.kinds.values():
                return value
            if not isinstance(value, YAML_TYPES):
                lacking = [name for name in methods if not callable(getattr(value, name, None))]
                if not methods or lacking or isinstance(value, type):
                    calls = ", ".join(f"{name}()" for name in methods)
                    expected = f"an object with {calls}" if methods else self._listed()
                    raise ValueError(f"input should be {expected}")
                return value
            full = self.full(value)
            return None if full is None else next(iter(read(full).values()))

        kinds = {
            word: core_schema.typed_dict_field(handler.generate_schema(kind), required=False)
            for word, kind in self.kinds.items()
        }
        writing = core_schema.plain_serializer_function_ser_schema(self.short)
        reading = core_schema.typed_dict_schema(kinds)
        return core_schema.no_info_wrap_validator_function(chosen, reading, serialization=writing)


def by_class(part: Any) -> Any:
    """Describe an object without a word in recipes: its class, with its fields, public attributes or repr."""
    if isinstance(part, Mapping):
        return {str(key): by_class(value) for key, value in part.items()}
    if isinstance(part, list | tuple):
        return [by_class(value) for value in part]
    if isinstance(part, YAML_TYPES):
        return part
    if hasattr(part, "tolist"):  # tensors and arrays
        return part.tolist()
    named = part if hasattr(part, "__qualname__") else type(part)
    name = f"{named.__module__}.{named.__qualname__}"
    if named is part:  # a class or a function
        return name
    if isinstance(part, partial):
        values = {"func": part.func, "args": part.args, **part.keywords}
    elif is_dataclass(part):
        values = {field.name: getattr(part, field.name) for field in fields(part)}
    elif hasattr(part, "__dict__"):
        values = {key: value for key, value in vars(part).items() if not key.startswith("_")}
    else:
        values = {"repr": repr(part)}
    return {name: by_class(values)} if values else name


Positive = Annotated[int, Field(gt=0)]


@dataclass(frozen=True)
class ArLoss:
    """The next-token loss of the encode pass times `weight`, over all clean tokens or only those of responses."""

    weight: float = 1.0
    scope: Literal["all", "response"] = "all"

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ValueError(f"the weight should be more than 0 (got {self.weight}); write none to leave the loss out")


@dataclass(frozen=True)
class Streaming:
    """Rows that are read when they are needed, and shuffled within a buffer of `shuffle_buffer` rows per source."""

    shuffle_buffer: Positive = 10_000


@dataclass(frozen=True)
class MaxLength:
    """The longest example in tokens, and what to do with longer ones."""

    tokens: Positive
    too_long: ClassVar[Literal["truncate", "drop", "refuse"]]


class Truncate(MaxLength):
    """Longer examples are cut at a canvas boundary."""

    too_long = "truncate"


class Drop(MaxLength):
    """Longer examples are left out."""

    too_long = "drop"


class Refuse(MaxLength):
    """Longer examples stop the run before training begins."""

    too_long = "refuse"


@dataclass(frozen=True)
class UniformTokens:
    """Corruption that replaces a token by a uniformly random token of the vocabulary."""

    def for_tokenizer(
        self, tokenizer: Any, vocab_size: int, reserved: Collection[int | None], mask: int | None
    ) -> Corruption:
        """The corruption for a model with `vocab_size` tokens."""
        return UniformCorruption(vocab_size)


@dataclass(frozen=True)
class MaskToken:
    """Corruption that replaces a token by the mask token: `token`, else the model's, else the tokenizer's."""

    token: str | None = None

    def for_tokenizer(
        self, tokenizer: Any, vocab_size: int, reserved: Collection[int | None], mask: int | None
    ) -> Corruption:
        """The corruption for a tokenizer and the model's mask id (`mask`, None: none).

        Raises RecipeError if there is no mask token, or if its id is one of `reserved`.
        """
        default_id = getattr(tokenizer, "mask_token_id", None) if mask is None else mask
        mask_id = default_id if self.token is None else tokenizer.get_vocab().get(self.token)
        if mask_id is None:
            reason = "the tokenizer has no mask token"
            reason = reason if self.token is None else f"the tokenizer has no token {self.token!r}"
            remedy = "choose one of its tokens that no text contains, {mask: {token: NAME}}"
            raise RecipeError(f"objective.corruption: {reason}; {remedy}")
        if mask_id in reserved:
            name = tokenizer.convert_ids_to_tokens(mask_id)
            raise RecipeError(
                f"objective.corruption: {name!r} is the bos, eos or pad token; choose {{mask: {{token: NAME}}}}"
            )
        return MaskCorruption(int(mask_id))


AnyCorruption = UniformTokens | MaskToken | Corruption

SCHEDULE = OneOf({"linear": Linear, "cosine": Cosine, "polynomial": Polynomial})
TIME = OneOf({"stratified": StratifiedTime, "uniform": UniformTime, "logit_normal": LogitNormalTime})
CORRUPTION = OneOf({"uniform": UniformTokens, "mask": MaskToken})
WEIGHT = OneOf({"none": NoWeight, "elbo": ElboWeight})
AR_LOSS = OneOf({"": ArLoss}, number="", none="none")
NEXT_TOKENS = OneOf({"": ArLoss}, number="")
LR_SCHEDULE = OneOf({"cosine": CosineDecay, "linear": LinearDecay, "wsd": StableDecay, "constant": Constant})
CANVASES = OneOf(
    {"all": AllCanvases, "random": RandomCanvases, "first": FirstCanvases, "last": LastCanvases}, number="random"
)
STREAMING = OneOf({"": Streaming}, none=False, default=True)
MAX_LENGTH = OneOf({"truncate": Truncate, "drop": Drop, "refuse": Refuse}, number="truncate", none=None)


def described(part: object) -> Any:
    """Describe an object by name and values, in the words of recipes if there are any, else by its class."""
    for choice in (SCHEDULE, TIME, CORRUPTION, WEIGHT, AR_LOSS, LR_SCHEDULE, CANVASES, MAX_LENGTH):
        if type(part) in choice.kinds.values():
            return choice.short(part)
    return by_class(part)


def _as_list(value: Any) -> Any:
    """Wrap a single source in a list; from Python, also a list of rows, which is one source."""
    is_rows = isinstance(value, list) and value and isinstance(value[0], Mapping) and CONTENT_KEYS & value[0].keys()
    return value if isinstance(value, list) and not is_rows else [value]


def _read_source(value: Any, read: Callable[[Any], Source]) -> Source:
    """Read a source: a mapping of its fields, its path alone, or rows from Python."""
    if isinstance(value, str):
        value = {"path": value}
    elif not isinstance(value, Mapping | Source | bool | int | float | None):
        value = {"rows": value}
    if isinstance(value, Mapping) and isinstance(value.get("rows"), int):
        raise ValueError(f"{value['rows']} rows were passed from Python; pass them from Python again")
    try:
        return read(value)
    except DataError as error:
        raise ValueError(str(error)) from None


def _written_source(source: Source) -> Any:
    """Return the fields of a source that are not defaults, or its path if that is all.

    Rows from Python are recorded by their number.
    """
    if source.rows is not None:
        return {"path": None, "name": source.title, "rows": len(source.rows)}
    values = {field.name: getattr(source, field.name) for field in fields(source)}
    changed = {field.name: values[field.name] for field in fields(source) if values[field.name] != field.default}
    return source.path if changed.keys() == {"path"} else changed


OneSource = Annotated[Source, WrapValidator(_read_source), PlainSerializer(_written_source)]
Sources = Annotated[list[OneSource], Field(min_length=1), BeforeValidator(_as_list)]
