"""The settings of a model's training that sampling follows: `blockdiff.json` beside the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from blockdiff.checkpoint.files import DIFFUSION, read_json
from blockdiff.errors import CheckpointError
from blockdiff.files import write_json
from blockdiff.models.family import Family

PromptForm = Literal["raw", "chat"]


@dataclass(frozen=True)
class DiffusionSettings:
    """The prediction and corruption that a model was trained with, and a record of the rest of its objective.

    prediction: what the logits mean. corruption: the noise that a canvas starts from and that fills places where no
    token is accepted: uniform tokens, or the mask token `mask_id`. objective: the parts of the objective by name.
    prompts: the form of the prompts in training, raw text or conversations (None: both, or unknown). calibration: the
    temperatures of typed decisions, by the key of what they were fitted to (docs/decisions.md). strategy: the text of
    the default sampling strategy (None: the family's). canvas_length: the tokens of a canvas if config.json leaves them
    out (`read_config` reads it). The defaults are those of the released DiffusionGemma, whose directory has no such
    file.
    """

    prediction: Literal["posterior", "leave_one_out"] = "posterior"
    corruption: Literal["uniform", "mask"] = "uniform"
    mask_id: int | None = None
    objective: Mapping[str, Any] = field(default_factory=dict)
    prompts: PromptForm | None = None
    calibration: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    strategy: str | None = None
    canvas_length: int | None = None

    def __post_init__(self) -> None:
        if self.prediction not in ("posterior", "leave_one_out"):
            raise ValueError(f"prediction must be posterior or leave_one_out, not {self.prediction!r}")
        if self.corruption not in ("uniform", "mask"):
            raise ValueError(f"corruption must be uniform or mask, not {self.corruption!r}")
        if self.prompts not in ("raw", "chat", None):
            raise ValueError(f"prompts must be raw, chat or null, not {self.prompts!r}")
        if not isinstance(self.strategy, str | None):
            raise ValueError(f"strategy must be a text or null, not {self.strategy!r}")
        is_id = isinstance(self.mask_id, int) and not isinstance(self.mask_id, bool) and self.mask_id >= 0
        if is_id != (self.corruption == "mask") or is_id == (self.mask_id is None):
            raise ValueError(f"mask_id must be a token id with mask corruption, else null, not {self.mask_id!r}")

    @classmethod
    def of(cls, objective: Any, record: Mapping[str, Any] | None = None) -> DiffusionSettings:
        """Return the settings of an `Objective` that trains a model. record: the parts that it is made of.

        A custom corruption is sampled as mask noise if it has a `mask_id`, else as uniform noise.
        """
        mask_id = getattr(getattr(objective, "corruption", None), "mask_id", None)
        return cls(
            prediction=getattr(objective, "prediction", "posterior"),
            corruption="uniform" if mask_id is None else "mask",
            mask_id=mask_id,
            objective=record or {},
        )

    @classmethod
    def of_family(cls, config: Family) -> DiffusionSettings:
        """Return the settings of a model without a blockdiff.json: those that its family is trained with."""
        if config.mask is None:
            return cls(objective=config.trained_with)
        return cls(corruption="mask", mask_id=config.mask, objective=config.trained_with)

    def save(self, directory: str | Path) -> None:
        """Write `blockdiff.json` into a checkpoint directory, whole or not at all."""
        write_json(Path(directory) / DIFFUSION, asdict(self))

    @classmethod
    def from_pretrained(cls, directory: str | Path, config: Family | None = None) -> DiffusionSettings:
        """Return the settings of a checkpoint directory: its blockdiff.json over those of the family of `config`.

        Raises CheckpointError if the file cannot be used.
        """
        file = Path(directory) / DIFFUSION
        of_family = cls() if config is None else cls.of_family(config)
        if not file.is_file():
            return of_family
        values = read_json(file)
        if unknown := sorted(values.keys() - cls.__dataclass_fields__.keys()):
            fields = ", ".join(cls.__dataclass_fields__)
            raise CheckpointError(f"{file}: unknown key {unknown[0]}; there are {fields}")
        try:
            return replace(of_family, **values)
        except ValueError as error:
            raise CheckpointError(f"{file}: {error}") from None
