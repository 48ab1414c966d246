"""The sections of a recipe, their keys, defaults and limits; reading one from YAML is `recipe`'s business."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Amount = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
AboveZero = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """One level of a recipe: frozen, and every key is known."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(Section):
    """Which weights training starts from: a checkpoint (`path`) or random ones (`preset`)."""

    path: str | None = None
    preset: str | None = None
    tokenizer: str | None = None  # a directory or hub id; null = the one beside the weights
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    kernels: Literal["auto", "triton", "torch"] = "auto"
    compile: bool = False

    @model_validator(mode="after")
    def _one_origin(self) -> ModelSection:
        if (self.path is None) == (self.preset is None):
            raise ValueError("give exactly one of model.path (a checkpoint) and model.preset (random)")
        return self


class Columns(Section):
    """Which column of the data holds what; null = the column of that name."""

    prompt: str | None = None
    response: str | None = None
    messages: str | None = None
    system: str | None = None
    id: str | None = None


class Source(Section):
    """One of several places rows come from; the mixture draws from it in proportion to `weight`."""

    path: str  # a file, a directory, a pattern or a hub id
    weight: AboveZero = 1.0
    name: str | None = None  # in statistics; null = the file's name
    subset: str | None = None  # a hub data set's configuration
    split: str | None = None  # a hub data set's split; null = data.split
    columns: Columns | None = None  # null = data.columns


def _sources(value: Any) -> Any:
    """A source that says no more than its path may be written as that."""
    if not isinstance(value, list):
        return value
    return [{"path": each} if isinstance(each, str) else each for each in value]


class DataSection(Section):
    """Which rows, how they become tokens, and how many canvases of each example an optimiser step scores."""

    train: str | list[Source]
    heldout: str | list[Source] | None = None
    split: str = "train"  # of hub data sets in data.train that name none
    heldout_split: str = "test"  # of those in data.heldout
    columns: Columns = Columns()
    streaming: bool = False
    shuffle_buffer: Positive = 10_000  # rows that streaming shuffles among themselves
    chat: bool = False  # prompt and response are the user's and the assistant's turn, not raw text
    turns: Literal["all", "last"] = "all"
    system: str | None = None  # put before conversations that bring no system message
    thinking: bool = False
    max_length: Positive | None = None  # tokens of an example; null = whatever the rows need
    too_long: Literal["truncate", "drop", "refuse"] = "truncate"
    pack: Positive | None = None  # tokens of a packed row; null = one example per row
    canvases: Positive | Literal["all"] = 1
    which: Literal["random", "first", "last"] = "random"
    cache: str = "auto"  # a directory, "auto" (the user's cache directory) or "off"

    @field_validator("cache", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        """YAML reads a bare off as false."""
        return "off" if value is False else value

    @field_validator("train", "heldout", mode="before")
    @classmethod
    def _bare_names(cls, value: Any) -> Any:
        return _sources(value)

    @model_validator(mode="after")
    def _no_empty_mixture(self) -> DataSection:
        if self.train == [] or self.heldout == []:
            raise ValueError("give at least one source of rows")
        return self


class ObjectiveSection(Section):
    """The noise and the losses (docs/objective.md, docs/training.md)."""

    schedule: Literal["linear", "cosine", "polynomial"] = "linear"
    power: AboveZero = 2.0  # of the polynomial 1 - t^power
    time: Literal["stratified", "uniform", "logit_normal"] = "stratified"
    time_mean: Annotated[float, Field(allow_inf_nan=False)] = 0.0  # of logit(t)
    time_std: AboveZero = 1.0
    eps: Annotated[float, Field(ge=0.0, lt=0.5)] = 1e-4
    corruption: Literal["uniform", "mask"] = "uniform"
    mask_token: str | None = None  # null = the tokenizer's own mask token
    weight: Literal["none", "elbo"] = "none"  # elbo: -alpha'(t) / (1 - alpha(t))
    weight_max: AboveZero | None = None  # null = no limit
    positions: Literal["all", "corrupted"] = "all"
    prediction: Literal["posterior", "leave_one_out"] = "posterior"
    normalisation: Literal["token", "example"] = "token"
    stop_gradient: bool = False  # into the encoder, from the canvas loss
    coin: Share = 0.5
    ar_weight: Amount = 1.0
    ar_scope: Literal["all", "response"] = "all"
    router: Literal["auto", "frozen", "trained"] = "auto"  # auto: frozen for model.path, trained for a preset


class OptimSection(Section):
    """AdamW, and the learning rate as a function of the optimiser step."""

    name: Literal["adamw", "adamw_8bit"] = "adamw"
    lr: AboveZero = 1.5e-4
    betas: tuple[Beta, Beta] = (0.95, 0.99)
    eps: Annotated[float, Field(gt=0.0)] = 1e-8
    weight_decay: Amount = 1e-4
    clip: Amount = 1.0  # largest gradient norm; 0 = no clipping
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_steps: Count = 25
    decay_steps: Count | None = None  # of wsd; null = a tenth of train.steps
    final_lr_ratio: Share = 0.1
    layer_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    freeze: list[str] = []
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None


class TrainSection(Section):
    """How long, how many rows per optimiser step (over all ranks), and when to log, evaluate and save."""

    steps: Positive
    batch_size: Positive
    micro_batch_size: Positive | None = None  # rows of one forward on one rank; null = all of them
    autocast: Literal["bfloat16"] | None = None
    activation_checkpointing: bool = False
    non_finite: Literal["stop", "skip"] = "stop"
    log_every: Positive = 10
    eval_every: Count = 0  # 0 = at the end only
    save_every: Count = 0  # 0 = at the end only
    keep: Positive = 2  # how many of the newest checkpoints/step-N stay
    keep_every: Count = 0  # checkpoints at multiples of this stay too
    trackers: list[str] = []
    timeout: Positive = 600  # seconds a rank waits for the others


class EvaluationSection(Section):
    """What is measured during training beside the training losses, and what follows from it."""

    rows: Positive | None = None  # of data.heldout; null = all
    noise_levels: Positive = 5  # equal parts of t that losses and accuracies are reported for
    prompts: str | list[Source] | None = None  # rows whose prompts are sampled and whose responses are the reference
    prompts_every: Count = 0  # 0 = at the end only
    prompts_count: Positive = 32
    task: Literal["exact", "gsm8k", "sudoku"] = "exact"
    best: str | None = None  # the metric whose best checkpoint is kept and becomes model/
    patience: Positive | None = None  # evaluations without a better `best` before training ends

    @field_validator("prompts", mode="before")
    @classmethod
    def _bare_names(cls, value: Any) -> Any:
        return _sources(value)


class GenerationSection(Section):
    """What the trained model's generation_config.json says; null keeps what the model brought, or the default."""

    max_new_tokens: Positive | None = None
    max_steps: Positive | None = None
    entropy_bound: AboveZero | None = None
    t_min: Amount | None = None
    t_max: Amount | None = None
    stability: Count | None = None
    confidence: AboveZero | None = None
