"""`Recipe`: everything that decides a training run, in sections with their keys, defaults and limits.

`recipe_files` reads one from YAML, `recipe_checks` looks at it before anything is loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from blockdiff.data.collate import CanvasChoice, RandomCanvases
from blockdiff.data.sources import Source
from blockdiff.errors import RecipeError, RequestError
from blockdiff.evals import TASKS
from blockdiff.evals.questions import Task
from blockdiff.layers.lora import LowRank
from blockdiff.models.family import Family
from blockdiff.sampling.strategies import parse_strategy
from blockdiff.stored_forms import Quantize
from blockdiff.training import recipe_choices as choices
from blockdiff.training.kinds import kinds
from blockdiff.training.recipe_choices import OneOf, Positive, by_class
from blockdiff.training.recipe_errors import SOURCES, Key, one_line
from blockdiff.training.schedule import CosineDecay, LearningRateSchedule

Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Amount = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
AboveZero = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """One level of a recipe: frozen, and every key is known."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _none_is_null_and_a_switch_is_no_number(cls, value: Any, key: ValidationInfo) -> Any:
        kinds = _kinds(cls.model_fields[str(key.field_name)].annotation)
        if value == "none" and type(None) in kinds:
            return None
        if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:  # pydantic would take it for 0 or 1
            raise ValueError("input should be a number, not a switch")
        return value


def _kinds(annotation: Any) -> set[Any]:
    """The types that a key's value may have, taken out of unions and annotations."""
    if get_origin(annotation) in (Union, UnionType, Annotated):
        inner = get_args(annotation)
        return set().union(*map(_kinds, inner[:1] if get_origin(annotation) is Annotated else inner))
    return {annotation}


def _strategy(text: str) -> str:
    try:
        parse_strategy(text)
    except RequestError as error:
        raise ValueError(str(error)) from None
    return text


StrategyText = Annotated[str, AfterValidator(_strategy)]  # NAME:key=value,...


class ModelSection(Section):
    """The weights that training starts from: a checkpoint's (`path`) or random ones (`preset`)."""

    path: str | None = None
    preset: str | None = None
    tokenizer: str | None = None  # a directory or hub id; null = the one beside the weights
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    # Of frozen weights, those below adapters and a drafter's target; null: as the checkpoint stores them.
    quantize: Quantize | None = None
    router: Literal["auto", "frozen", "trained"] = "auto"  # auto: frozen for `path`, trained for `preset`
    images: Literal["none", "frozen", "trained"] = "none"  # the image side; none: rows have no images
    kernels: Literal["auto", "triton", "torch"] = "auto"
    compile: bool = False

    @model_validator(mode="after")
    def _one_origin(self) -> ModelSection:
        if (self.path is None) == (self.preset is None):
            raise ValueError("give exactly one of model.path (a checkpoint) and model.preset (random)")
        return self

    @property
    def rounds(self) -> bool:
        """True if the recipe stores weights in fewer bits, whatever the checkpoint does."""
        return self.quantize not in (None, "none")


class Columns(Section):
    """The column of the data for each field; null = the column of that name."""

    prompt: str | None = None
    response: str | None = None
    messages: str | None = None
    tools: str | None = None
    system: str | None = None
    images: str | None = None
    id: str | None = None


class Images(Section):
    """The folder of the images that rows name; null = that of the file of rows."""

    root: str | None = None
    anywhere: bool = False  # paths may lead out of it


class DataSection(Section):
    """The rows, their way to tokens, and the canvases of each example that an optimiser step scores."""

    train: choices.Sources
    heldout: choices.Sources | None = None
    columns: Columns = Columns()
    images: Images = Images()
    streaming: Annotated[choices.Streaming | None, choices.STREAMING] = None
    chat: bool = False  # prompt and response are the user's and the assistant's turn, not raw text
    turns: Literal["all", "last"] = "all"
    system: str | None = None  # put before conversations that bring no system message
    thinking: bool = False
    template: str = "tokenizer"  # a file, one of several of the tokenizer, or verbatim: ours
    control_tokens: Literal["text", "allow"] = "text"  # what rows that spell control tokens become
    on_bad_row: Literal["stop", "skip"] = "stop"  # at rows that cannot be used
    max_length: Annotated[choices.MaxLength | None, choices.MAX_LENGTH] = None  # null = whatever the rows need
    pack: Positive | None = None  # tokens of a packed row; null = one example per row
    canvases: Annotated[CanvasChoice, choices.CANVASES] = RandomCanvases(1)
    # A directory, "auto" (the user's cache directory) or "off", which YAML reads as false.
    cache: Annotated[str, BeforeValidator(lambda value: "off" if value is False else value)] = "auto"


class ObjectiveSection(Section):
    """The trained thing and its losses; the class of each kind of run (`training/kinds`) adds its keys and verbs."""

    kind: str
    paths: ClassVar[tuple[str, ...]] = ()  # the keys that name models
    inherited: ClassVar[tuple[str, ...]] = ()  # the keys in which a recipe follows the training of `model.path`

    @classmethod
    def suits(cls, config: Family) -> bool:
        """True if it is the kind of a recipe that names none, for a model of this config."""
        return False

    @classmethod
    def complete(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """A recipe's mapping with what follows from the keys of the kind for other sections."""
        return tree


def kind_class(section: Any) -> type[ObjectiveSection]:
    """The class of the kind that a section names; without a name it is that of canvases until the model is read.

    Raises ValueError for a name that no kind has.
    """
    name = section.get("kind", "canvas") if isinstance(section, Mapping) else "canvas"
    if not isinstance(name, str) or name not in kinds():
        if isinstance(name, str) and "." in name:
            raise ValueError(f"it was given from Python; give it again from Python (got kind {name})")
        raise ValueError(f"kind should be {', '.join(map(repr, kinds()))} (got {name!r})")
    found: type[ObjectiveSection] = kinds()[name]
    return found


def _of_kind(value: Any) -> Any:
    """The keys of a kind, read by its class."""
    if isinstance(value, ObjectiveSection) or not isinstance(value, Mapping):
        return value
    return kind_class(value).model_validate(value)


class LoraSection(Section):
    """Low-rank adapters in place of the weights; without a rank all weights train (docs/adapters.md)."""

    rank: Count = 0  # of attention and mlp; 0 = no adapters, or as `parts` says
    alpha: AboveZero | dict[str, AboveZero] | None = None  # for all parts or by part; null = twice each part's rank
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0  # of the inputs of linear layers; experts have none
    rslora: bool = False  # alpha / sqrt(rank) in place of alpha / rank
    parts: dict[str, Count] | None = None  # in place of `rank`: part of the model -> rank, 0 = none
    tokens: list[str | Annotated[int, Field(ge=0)]] = []  # whose rows of the embedding table train too
    noisy_only: bool = False  # the adapters act on noisy tokens only, and clean ones are the base's to the bit
    path: str | None = None  # an adapter that trains on, which brings all of this but the dropout

    @model_validator(mode="after")
    def _one_says_the_ranks(self) -> LoraSection:
        own = {name: value for name, value in self.model_dump().items() if name not in ("path", "dropout")}
        if self.path and (
            said := next((name for name in own if own[name] != type(self).model_fields[name].default), 0)
        ):
            raise ValueError(f"lora.path is an adapter that brings its own {said}; leave lora.{said} out")
        if self.rank and self.parts is not None:
            raise ValueError("give one of lora.rank (of attention and mlp) and lora.parts (a rank by part)")
        return self

    @property
    def ranks(self) -> dict[str, int]:
        """The rank of every part that is adapted."""
        parts = dict.fromkeys(("attention", "mlp"), self.rank) if self.parts is None else self.parts
        return {part: rank for part, rank in parts.items() if rank > 0}

    @property
    def trains(self) -> bool:
        """True where adapters train and the weights stand still."""
        return bool(self.ranks or self.tokens or self.path)

    def low_rank(self) -> dict[str, LowRank]:
        """Rank, scale and dropout of each part's adapters."""
        alphas = self.alpha if isinstance(self.alpha, dict) else dict.fromkeys(self.ranks, self.alpha)
        return {
            part: LowRank(rank, float(alphas.get(part) or 2 * rank), self.rslora, self.dropout, self.noisy_only)
            for part, rank in self.ranks.items()
        }


def _no_lora(value: Any) -> Any:
    """`lora: none` says that all weights train, `lora: 16` is short for a rank."""
    if isinstance(value, int) and not isinstance(value, bool):
        return {"rank": value}
    return {} if value in (None, "none", False) else value


class OptimSection(Section):
    """AdamW or Muon, and the learning rate as a function of the optimiser step."""

    name: Literal["adamw", "muon", "adamw_8bit"] = "adamw"
    lr: AboveZero = 1.5e-4
    betas: tuple[Beta, Beta] = (0.95, 0.99)
    eps: Annotated[float, Field(gt=0.0)] = 1e-8
    momentum: Beta = 0.95  # of matrices under muon
    weight_decay: Amount = 1e-4
    clip: Amount = 1.0  # largest gradient norm; 0 = no clipping
    schedule: Annotated[LearningRateSchedule, choices.LR_SCHEDULE] = CosineDecay()
    warmup_steps: Count | None = None  # null = 25, of a run of less than 250 steps a tenth
    freeze: list[str] = []
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None


class TrainSection(Section):
    """The length of a run, the rows of an optimiser step (over all ranks), and when to log, evaluate and save."""

    steps: Positive | None = None
    epochs: AboveZero | None = None  # passes over the examples instead of steps; the last step is not cut short
    batch_size: Annotated[int, Field(gt=0, le=1_000_000)]
    micro_batch_size: Positive | None = None  # rows of one forward on one rank; null = all of them
    autocast: Literal["bfloat16"] | None = None
    activation_checkpointing: bool = False
    non_finite: Literal["stop", "skip"] = "stop"
    log_every: Positive = 10
    eval_every: Count = 0  # 0 = at the end only
    save_every: Count = 0  # 0 = at the end only
    keep: Positive = 2  # how many of the newest checkpoints/step-N stay
    keep_every: Count = 0  # checkpoints at multiples of this stay too
    save_async: bool = False  # write them while training goes on, from a copy in the memory of the host
    trackers: list[str] = []
    timeout: Positive = 600  # seconds a rank waits for the others

    @model_validator(mode="after")
    def _one_length(self) -> TrainSection:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of train.steps and train.epochs")
        return self


class ParallelSection(Section):
    """The spread of weights over processes (docs/cluster.md), each with rows of its own, except with `tensor`."""

    shard: Literal["none", "full"] = "none"  # none: all weights on each; full: a piece of every tensor (FSDP2)
    experts: Positive = 1  # processes that split the experts of each layer
    tensor: Positive = 1  # processes that run every layer together, on the same rows
    offload: bool = False  # with full: weights, gradients and optimiser state on the host

    @model_validator(mode="after")
    def _offloads_pieces(self) -> ParallelSection:
        if self.offload and self.shard != "full":
            raise ValueError("parallel.offload needs parallel.shard: full")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The kinds of mesh that this asks for; the model's family must be capable of all of them."""
        asked = {"shard": self.shard == "full", "experts": self.experts > 1, "tensor": self.tensor > 1}
        return tuple(name for name, is_asked in asked.items() if is_asked) or ("replicate",)


def _task(value: Any) -> Any:
    """The name of a task, or a task from Python."""
    if isinstance(value, Task) or (isinstance(value, str) and (value in TASKS or ":" in value)):
        return value
    if (
        isinstance(value, Mapping) and len(value) == 1 and "." in str(next(iter(value)))
    ):  # as a run directory records it
        raise ValueError("it was given from Python; give it again from Python")
    names = ", ".join(map(repr, TASKS))
    raise ValueError(f"input should be {names}, module:function or, from Python, a blockdiff.evals.questions.Task")


class EvaluationSection(Section):
    """Measurements during training beside the training losses, and what follows from them."""

    rows: Positive | None = None  # of data.heldout; null = all
    prompts: choices.Sources | None = None  # rows whose prompts are sampled and whose responses are the reference
    prompts_every: Count = 0  # 0 = at the end only
    prompts_count: Positive = 32
    task: Annotated[Any, BeforeValidator(_task), PlainSerializer(by_class)] = (
        "exact"  # or module:function, or a `Task` from Python
    )
    strategy: StrategyText | None = None  # of the sampling
    best: str | None = None  # the metric by which the best checkpoint is chosen, which is kept and becomes model/
    patience: Positive | None = None  # evaluations without a better `best` before training ends


class GenerationSection(Section):
    """The keys of the trained model's generation_config.json; null keeps what the model brought, or the default."""

    max_new_tokens: Positive | None = None
    max_steps: Positive | None = None
    entropy_bound: AboveZero | None = None
    t_min: Amount | None = None
    t_max: Amount | None = None
    stability: Count | None = None
    confidence: Amount | None = None
    temperature: Amount | None = None  # of next-token sampling, 0 = greedy; so are the next two
    top_k: Positive | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None


def _from_python(value: Any) -> Any:
    if value is None or callable(value):
        return value
    if isinstance(value, Mapping) or (isinstance(value, str) and "." in value):  # as a run directory records it
        raise ValueError(f"it was given from Python; give it again from Python (got {value})")
    raise ValueError(f"give a class or a function that makes it (got a {type(value).__name__})")


def _rewards(value: Any) -> Any:
    if value is None or (isinstance(value, tuple) and all(callable(function) for function, _ in value)):
        return value
    raise ValueError(f"it was given from Python; give it again from Python (got {value!r:.200})")


OnlyFromPython = Annotated[Callable[..., Any] | None, BeforeValidator(_from_python), PlainSerializer(by_class)]


class GivenSection(Section):
    """Parts that only Python can give: a run directory records them, and training from that asks for them again."""

    objective: OnlyFromPython = None  # called as `blockdiff.objective.Objective` is
    optimiser: OnlyFromPython = None  # makes an optimiser from the parameters that train
    trainer: OnlyFromPython = None  # the subclass of `Trainer` that trains
    # functions of a row and the result that answers it, and their weights
    reward: Annotated[Any, BeforeValidator(_rewards), PlainSerializer(by_class)] = None


class Recipe(Section):
    """Everything that decides a training run."""

    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    output: str | None = None
    model: ModelSection
    data: DataSection
    objective: Annotated[SerializeAsAny[ObjectiveSection], BeforeValidator(_of_kind)] = Field(
        default_factory=lambda: kind_class({}).model_validate({})
    )
    lora: Annotated[LoraSection, BeforeValidator(_no_lora)] = LoraSection()
    optim: OptimSection = OptimSection()
    train: TrainSection
    parallel: ParallelSection = ParallelSection()
    evaluation: EvaluationSection = EvaluationSection()
    generation: GenerationSection = GenerationSection()
    given: GivenSection = GivenSection()

    @model_validator(mode="before")
    @classmethod
    def _completed(cls, tree: Any) -> Any:
        """The mapping with what follows from the kind of run for other sections."""
        section = tree.get("objective") if isinstance(tree, dict) else None
        if not isinstance(section, Mapping | None) or not isinstance(tree, dict):
            return tree
        try:
            return kind_class(section or {}).complete(tree)
        except ValueError:  # the validator of the section says it, with its place
            return tree

    def __init__(self, **sections: Any) -> None:
        try:
            super().__init__(**sections)
        except ValidationError as error:
            raise RecipeError(one_line(error, keys(), kinds_with(), {}, "Recipe")) from error

    def resolved(self) -> str:
        """The recipe as YAML text, defaults filled in and paths located; it reads back as an equal recipe."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _keys_below(section: type[BaseModel], place: Key) -> Iterator[tuple[Key, list[str]]]:
    yield place, [*section.model_fields]
    for name, field in section.model_fields.items():
        for kind in _kinds(field.annotation):
            if isinstance(kind, type) and issubclass(kind, Section):
                yield from _keys_below(kind, (*place, name))


@functools.cache
def keys() -> dict[Key, list[str]]:
    """The keys below each key; those of `objective` are the keys of all kinds."""
    found = dict(_keys_below(Recipe, ()))
    found[("objective",)] = list(dict.fromkeys(key for kind in kinds().values() for key in kind.model_fields))
    found |= {(*key, word): [*names] for key, choice in choosing().items() for word, names in choice.fields.items()}
    return found | {key: [field.name for field in fields(Source)] for key in SOURCES}


@functools.cache
def choosing() -> dict[Key, OneOf]:
    """The keys that choose an object."""
    sections = {name: [field.annotation] for name, field in Recipe.model_fields.items()}
    sections["objective"] = [*kinds().values()]
    return {
        (name, key): choice
        for name, classes in sections.items()
        for section in classes
        for key, field in getattr(section, "model_fields", {}).items()
        for choice in field.metadata
        if isinstance(choice, OneOf)
    }


@functools.cache
def kinds_with() -> dict[str, list[str]]:
    """The kinds that have a key of `objective`, by the key."""
    found: dict[str, list[str]] = {}
    for name, kind in kinds().items():
        for key in kind.model_fields:
            found.setdefault(key, []).append(name)
    return found
