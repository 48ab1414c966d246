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

from blockdiff.data.canvas_choice import CanvasChoice, RandomCanvases
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
    """One level of a recipe. It is frozen and accepts no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _accept_none_and_refuse_bools_as_numbers(cls, value: Any, key: ValidationInfo) -> Any:
        kinds = _kinds(cls.model_fields[str(key.field_name)].annotation)
        if value == "none" and type(None) in kinds:
            return None
        if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:  # pydantic would take it for 0 or 1
            raise ValueError("input should be a number, not a switch")
        return value


def _kinds(annotation: Any) -> set[Any]:
    """The types of a key's value, taken out of unions and annotations."""
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
    tokenizer: str | None = None  # a directory or hub id; null = that of model.path
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    # The format of frozen weights: those below adapters, and a drafter's target; null: as the checkpoint stores them.
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
        """Whether the recipe, and not only the checkpoint, stores weights in fewer bits."""
        return self.quantize not in (None, "none")


class Columns(Section):
    """The column of the data for each field; null = the column with the field's name."""

    prompt: str | None = None
    response: str | None = None
    messages: str | None = None
    tools: str | None = None
    system: str | None = None
    images: str | None = None
    id: str | None = None


class Images(Section):
    """The folder of the images that rows name; null = the folder of the file of rows."""

    root: str | None = None
    anywhere: bool = False  # paths may lead out of the folder


class DataSection(Section):
    """The rows, how they become tokens, and which canvases of an example an optimiser step scores."""

    train: choices.Sources
    heldout: choices.Sources | None = None
    columns: Columns = Columns()
    images: Images = Images()
    streaming: Annotated[choices.Streaming | None, choices.STREAMING] = None
    chat: bool = False  # prompt and response are the user's and the assistant's turn, not raw text
    turns: Literal["all", "last"] = "all"
    system: str | None = None  # the system message of conversations that have none
    thinking: bool = False
    template: str = "tokenizer"  # a file, a named template of the tokenizer, or verbatim: blockdiff's own
    control_tokens: Literal["text", "allow"] = "text"  # whether spelt-out control tokens are text or control tokens
    on_bad_row: Literal["stop", "skip"] = "stop"  # what to do at a row that cannot be used
    max_length: Annotated[choices.MaxLength | None, choices.MAX_LENGTH] = None  # null = no limit
    pack: Positive | None = None  # tokens of a packed row; null = one example per row
    canvases: Annotated[CanvasChoice, choices.CANVASES] = RandomCanvases(1)
    # A directory, "auto" (the user's cache directory) or "off", which YAML reads as false.
    cache: Annotated[str, BeforeValidator(lambda value: "off" if value is False else value)] = "auto"


class ObjectiveSection(Section):
    """The kind of run and its losses. The class of each kind (`training/kinds`) adds its keys and methods."""

    kind: str
    paths: ClassVar[tuple[str, ...]] = ()  # the keys whose values are models
    inherited: ClassVar[tuple[str, ...]] = ()  # the keys whose defaults are those that `model.path` was trained with

    @classmethod
    def suits(cls, config: Family) -> bool:
        """Whether a recipe without `objective.kind` has this kind, for a model of this config."""
        return False

    @classmethod
    def complete(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """Return a recipe's mapping with the keys of other sections that follow from this kind's keys."""
        return tree


def kind_class(section: Any) -> type[ObjectiveSection]:
    """Return the class of the kind that a section names; the class of kind `canvas` if it names none.

    Raises ValueError for an unknown kind.
    """
    name = section.get("kind", "canvas") if isinstance(section, Mapping) else "canvas"
    if not isinstance(name, str) or name not in kinds():
        if isinstance(name, str) and "." in name:
            raise ValueError(f"kind {name} was passed from Python; pass it from Python again")
        raise ValueError(f"kind should be {', '.join(map(repr, kinds()))} (got {name!r})")
    section_class: type[ObjectiveSection] = kinds()[name]
    return section_class


def _of_kind(value: Any) -> Any:
    """Validate the keys of `objective` with the class of their kind."""
    if isinstance(value, ObjectiveSection) or not isinstance(value, Mapping):
        return value
    return kind_class(value).model_validate(value)


class LoraSection(Section):
    """Low-rank adapters on frozen weights. Without a rank there are none, and all weights train (docs/adapters.md)."""

    rank: Count = 0  # of attention and mlp; 0 = no adapters, unless `parts` has a rank
    alpha: AboveZero | dict[str, AboveZero] | None = None  # for all parts or by part; null = twice each part's rank
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0  # of the inputs of linear layers; experts have none
    rslora: bool = False  # scale by alpha / sqrt(rank) instead of alpha / rank
    parts: dict[str, Count] | None = None  # instead of `rank`: part of the model -> rank, 0 = none
    tokens: list[str | Annotated[int, Field(ge=0)]] = []  # tokens whose embeddings train, too
    noisy_only: bool = False  # apply adapters to noisy tokens only; clean tokens get the base weights' exact results
    path: str | None = None  # an adapter to train further; it replaces all of this except the dropout

    @model_validator(mode="after")
    def _one_source_of_ranks(self) -> LoraSection:
        keys = {name: value for name, value in self.model_dump().items() if name not in ("path", "dropout")}
        if self.path and (
            changed := next((name for name in keys if keys[name] != type(self).model_fields[name].default), 0)
        ):
            raise ValueError(f"lora.path is an adapter with its own {changed}; leave lora.{changed} out")
        if self.rank and self.parts is not None:
            raise ValueError("give one of lora.rank (of attention and mlp) and lora.parts (a rank by part)")
        return self

    @property
    def ranks(self) -> dict[str, int]:
        """The rank of each part that is adapted."""
        parts = dict.fromkeys(("attention", "mlp"), self.rank) if self.parts is None else self.parts
        return {part: rank for part, rank in parts.items() if rank > 0}

    @property
    def trains(self) -> bool:
        """Whether only adapters train and the weights are frozen."""
        return bool(self.ranks or self.tokens or self.path)

    def low_rank(self) -> dict[str, LowRank]:
        """The rank, scale and dropout of each adapted part."""
        alphas = self.alpha if isinstance(self.alpha, dict) else dict.fromkeys(self.ranks, self.alpha)
        return {
            part: LowRank(rank, float(alphas.get(part) or 2 * rank), self.rslora, self.dropout, self.noisy_only)
            for part, rank in self.ranks.items()
        }


def _no_lora(value: Any) -> Any:
    """Expand `lora: none`, with which all weights train, and `lora: 16`, which is short for a rank."""
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
    warmup_steps: Count | None = None  # null = 25, or a tenth of a run of less than 250 steps
    freeze: list[str] = []
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None


class TrainSection(Section):
    """The length of a run, the rows of an optimiser step (over all ranks), and when to log, evaluate and save."""

    steps: Positive | None = None
    epochs: AboveZero | None = None  # passes over the examples instead of steps; the last step has a whole batch
    batch_size: Annotated[int, Field(gt=0, le=1_000_000)]
    micro_batch_size: Positive | None = None  # rows of one forward on one rank; null = all rows of the rank
    autocast: Literal["bfloat16"] | None = None
    activation_checkpointing: bool = False
    non_finite: Literal["stop", "skip"] = "stop"
    log_every: Positive = 10
    eval_every: Count = 0  # 0 = at the end only
    save_every: Count = 0  # 0 = at the end only
    keep: Positive = 2  # the number of newest checkpoints/step-N that are kept
    keep_every: Count = 0  # checkpoints at multiples of this number are kept, too
    save_async: bool = False  # write checkpoints while training continues, from a copy in host memory
    trackers: list[str] = []
    timeout: Positive = 600  # seconds a rank waits for the others

    @model_validator(mode="after")
    def _one_length(self) -> TrainSection:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of train.steps and train.epochs")
        return self


class ParallelSection(Section):
    """The distribution of weights over processes (docs/cluster.md). Each has its own rows, except with `tensor`."""

    shard: Literal["none", "full"] = "none"  # none: every process has all weights; full: a piece of each (FSDP2)
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
        """The names of the parallelisms in use; the model's family must support all of them."""
        is_used = {"shard": self.shard == "full", "experts": self.experts > 1, "tensor": self.tensor > 1}
        return tuple(name for name in is_used if is_used[name]) or ("replicate",)


def _task(value: Any) -> Any:
    """Validate the name of a task, or a task from Python."""
    if isinstance(value, Task) or (isinstance(value, str) and (value in TASKS or ":" in value)):
        return value
    if (
        isinstance(value, Mapping) and len(value) == 1 and "." in str(next(iter(value)))
    ):  # as a run directory records it
        raise ValueError(f"{next(iter(value))} was passed from Python; pass it from Python again")
    names = ", ".join(map(repr, TASKS))
    raise ValueError(f"input should be {names}, module:function or, from Python, a blockdiff.evals.questions.Task")


class EvaluationSection(Section):
    """Measurements during training in addition to the training losses, and what they decide."""

    rows: Positive | None = None  # of data.heldout; null = all
    prompts: choices.Sources | None = None  # rows with prompts to answer and the responses to compare with
    prompts_every: Count = 0  # 0 = at the end only
    prompts_count: Positive = 32
    task: Annotated[Any, BeforeValidator(_task), PlainSerializer(by_class)] = (
        "exact"  # a name, module:function, or a `Task` from Python
    )
    strategy: StrategyText | None = None  # the sampling strategy
    best: str | None = None  # the metric that chooses the best checkpoint, which is kept and becomes model/
    patience: Positive | None = None  # evaluations without a better `best` before training ends


class GenerationSection(Section):
    """The keys of the trained model's generation_config.json; null keeps the model's value, or else the default."""

    max_new_tokens: Positive | None = None
    max_steps: Positive | None = None
    entropy_bound: AboveZero | None = None
    t_min: Amount | None = None
    t_max: Amount | None = None
    stability: Count | None = None
    confidence: Amount | None = None
    temperature: Amount | None = None  # this and the next two are for next-token sampling; 0 = greedy
    top_k: Positive | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None


def _from_python(value: Any) -> Any:
    if value is None or callable(value):
        return value
    if isinstance(value, Mapping) or (isinstance(value, str) and "." in value):  # as a run directory records it
        raise ValueError(f"{value!r:.200} was passed from Python; pass it from Python again")
    raise ValueError(f"pass a class or a function that constructs it (got a {type(value).__name__})")


def _rewards(value: Any) -> Any:
    if value is None or (isinstance(value, tuple) and all(callable(function) for function, _ in value)):
        return value
    raise ValueError(f"{value!r:.200} was passed from Python; pass it from Python again")


OnlyFromPython = Annotated[Callable[..., Any] | None, BeforeValidator(_from_python), PlainSerializer(by_class)]


class GivenSection(Section):
    """Parts that only Python can pass. A run directory records them; training from it requires them again."""

    objective: OnlyFromPython = None  # called with the arguments of `blockdiff.objective.Objective`
    optimiser: OnlyFromPython = None  # called with the parameters that train
    trainer: OnlyFromPython = None  # the subclass of `Trainer` in use
    # pairs of a function of a row and its result, and the function's weight
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
        """Add the keys of other sections that follow from the kind of run."""
        section = tree.get("objective") if isinstance(tree, dict) else None
        if not isinstance(section, Mapping | None) or not isinstance(tree, dict):
            return tree
        try:
            return kind_class(section or {}).complete(tree)
        except ValueError:  # the section's own validator reports it, with its place
            return tree

    def __init__(self, **sections: Any) -> None:
        try:
            super().__init__(**sections)
        except ValidationError as error:
            raise RecipeError(one_line(error, keys(), kinds_with(), {}, "Recipe")) from error

    def resolved(self) -> str:
        """The recipe as YAML with all defaults and absolute paths. It reads back as an equal recipe."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _keys_below(section: type[BaseModel], path: Key) -> Iterator[tuple[Key, list[str]]]:
    yield path, [*section.model_fields]
    for name, field in section.model_fields.items():
        for kind in _kinds(field.annotation):
            if isinstance(kind, type) and issubclass(kind, Section):
                yield from _keys_below(kind, (*path, name))


@functools.cache
def keys() -> dict[Key, list[str]]:
    """The names of the keys below each key. Those below `objective` are of all kinds."""
    names_below = dict(_keys_below(Recipe, ()))
    names_below[("objective",)] = list(dict.fromkeys(key for kind in kinds().values() for key in kind.model_fields))
    for key, choice in choosing().items():
        names_below |= {(*key, word): [*names] for word, names in choice.fields.items()}
    return names_below | {key: [field.name for field in fields(Source)] for key in SOURCES}


@functools.cache
def choosing() -> dict[Key, OneOf]:
    """The keys whose value is a choice of objects, with the choice."""
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
    """The names of the kinds that have each key of `objective`."""
    names: dict[str, list[str]] = {}
    for name, kind in kinds().items():
        for key in kind.model_fields:
            names.setdefault(key, []).append(name)
    return names
