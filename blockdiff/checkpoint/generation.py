"""The settings of generation, with transformers' defaults and file format, and the choice of special tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from blockdiff.checkpoint.files import GENERATION, find, read_json
from blockdiff.data.template import turn_ends
from blockdiff.errors import CheckpointError
from blockdiff.field_rules import Rule, broken_rule
from blockdiff.models.family import Family

# transformers' names of our settings; `entropy_bound` and `eos_ids` have another form there.
_THEIRS = {
    "max_new_tokens": "max_new_tokens",
    "max_steps": "max_denoising_steps",
    "t_min": "t_min",
    "t_max": "t_max",
    "stability": "stability_threshold",
    "confidence": "confidence_threshold",
    "pad_id": "pad_token_id",
}


@dataclass(frozen=True)
class Generation:
    """The settings that denoise canvases, sample next tokens and end a response.

    `max_steps` limits the denoising steps of a canvas, `max_new_tokens` the response (rounded up to whole canvases).
    `temperature` (0: greedy), `top_k` and `top_p` apply to next-token sampling. Any of `eos_ids` ends a response;
    `pad_id` fills prompts of unequal length. If `eos_ids` is empty or `pad_id` None, `special_tokens` finds it.
    """

    max_steps: int = 48
    entropy_bound: float = 0.1
    t_min: float = 0.4
    t_max: float = 0.8
    stability: int = 1
    confidence: float = 0.005
    max_new_tokens: int = 256
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        rules = {
            "max_steps": Rule(Integral, "an integer of at least 1", lambda x: x >= 1),
            "max_new_tokens": Rule(Integral, "an integer of at least 1", lambda x: x >= 1),
            "entropy_bound": Rule(Real, "a number more than 0", lambda x: x > 0),
            "t_max": Rule(Real, "a number more than 0", lambda x: x > 0),
            "t_min": Rule(
                Real, f"a number of at least 0 and at most t_max, {self.t_max}", lambda x: 0 <= x <= self.t_max
            ),
            "stability": Rule(Integral, "an integer of at least 0", lambda x: x >= 0),
            "confidence": Rule(Real, "a number of at least 0", lambda x: x >= 0),
            "temperature": Rule(Real, "a number of at least 0", lambda x: x >= 0),
            "top_k": Rule(Integral, "an integer of at least 1, or null", lambda x: x >= 1),
            "top_p": Rule(Real, "a number more than 0 and at most 1", lambda x: 0 < x <= 1),
        }
        if broken := broken_rule(self, rules):
            raise ValueError(broken)

    @classmethod
    def from_pretrained(cls, path: str | Path, config: Family | None = None) -> Generation:
        """Return the settings of a checkpoint directory or Hub id: its generation_config.json over the defaults.

        config: the model's config, which sets the default answer length and number of steps. Raises CheckpointError if
        the file cannot be used.
        """
        file = find(path, with_weights=False) / GENERATION
        defaults = (
            {} if config is None else {"max_new_tokens": config.answer_length, _THEIRS["max_steps"]: steps_of(config)}
        )
        if not file.exists():
            return cls.from_dict(defaults)
        try:
            return cls.from_dict(
                defaults | {name: value for name, value in read_json(file).items() if value is not None}
            )
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{file}: {error}") from error

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Generation:
        """Return the settings from transformers' names, as written by `to_dict`; ValueError if a value is unusable."""
        acceptance = config.get("sampler_config") or {}
        if not isinstance(acceptance, Mapping):
            raise ValueError(f"sampler_config must be an object, got {acceptance!r:.80}")
        rule = acceptance.get("_cls_name", "EntropyBoundSamplerConfig")
        if rule != "EntropyBoundSamplerConfig":
            raise ValueError(f"sampler {rule!r} is not supported, only EntropyBoundSamplerConfig")
        values = {ours: config.get(theirs) for ours, theirs in _THEIRS.items()}
        if config.get("do_sample"):  # these are transformers' defaults; without do_sample it is greedy
            top_k = config.get("top_k", 50)
            values |= {"temperature": config.get("temperature", 1.0), "top_p": config.get("top_p", 1.0)}
            values |= {"top_k": top_k or None}
        values |= {"entropy_bound": acceptance.get("entropy_bound"), "eos_ids": _ids(config.get("eos_token_id"))}
        values["pad_id"] = next(iter(_ids(config.get("pad_token_id"))), None)
        try:
            return cls(**{name: value for name, value in values.items() if value is not None})
        except ValueError as error:
            name, _, rule = str(error).partition(" ")
            raise ValueError(f"{_THEIRS.get(name, name)} {rule}") from None

    def to_dict(self) -> dict[str, Any]:
        """Return the settings by transformers' names, as the content of generation_config.json."""
        sampled = {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k or 0}
        return {
            **(sampled if self.temperature else {}),
            **{theirs: getattr(self, ours) for ours, theirs in _THEIRS.items()},
            "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": self.entropy_bound},
            "eos_token_id": list(self.eos_ids),
        }


@dataclass(frozen=True)
class SpecialTokens:
    """The ids of the tokens that end a response, and of the token that pads a row."""

    eos_ids: tuple[int, ...]
    pad_id: int


def special_tokens(config: Family | None, generation: Generation | None = None, tokenizer: Any = None) -> SpecialTokens:
    """Return the special tokens: each from the generation settings, else from the model's config, else the tokenizer.

    Any of the three may be None. If none of them has an eos, `eos_ids` is empty. If none has a pad, or the table has no
    row for it, `pad_id` is 0. If the settings have no eos but another has, the ends of turns in the tokenizer's chat
    template end a response, too. Raises CheckpointError if every token of the vocabulary ends a response.
    """

    def first(name: str, in_settings: str) -> tuple[int, ...]:
        elsewhere = (getattr(each, name, None) for each in (config, tokenizer))
        return next((ids for ids in map(_ids, (getattr(generation, in_settings, None), *elsewhere)) if ids), ())

    eos_ids = first("eos_token_id", "eos_ids")
    if tokenizer is not None and eos_ids and not (generation and generation.eos_ids):
        eos_ids = tuple(dict.fromkeys((*eos_ids, *turn_ends(tokenizer))))
    if config is not None and set(eos_ids) >= set(range(config.vocab_size)):
        raise CheckpointError("eos_token_id: every token of the vocabulary ends an answer; name the few that do")
    pad_id = (*first("pad_token_id", "pad_id"), 0)[0]
    has_row = config is None or pad_id < config.vocab_size  # any token can pad a row if the table has it
    return SpecialTokens(eos_ids, pad_id if has_row else 0)


def default_generation(config: Family, tokenizer: Any = None) -> Generation:
    """Return the settings of a model without any: transformers' defaults, and the family's steps and answer length."""
    special = special_tokens(config, tokenizer=tokenizer)
    return Generation(
        max_steps=steps_of(config),
        max_new_tokens=config.answer_length,
        eos_ids=special.eos_ids,
        pad_id=special.pad_id,
    )


def steps_of(config: Family) -> int:
    """Return the default limit on the denoising steps of a canvas: with a mask token, at least one per token."""
    return max(Generation.max_steps, config.canvas_length if config.mask is not None else 1)


def _ids(ids: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return token ids in a file as a tuple. The file may have one id, several, None, or a number below 0 for no token.

    Raises ValueError if they are not integers.
    """
    tokens = () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)
    if not all(isinstance(token, int) for token in tokens):
        raise ValueError(f"token ids must be integers, got {ids!r:.80}")
    return tuple(token for token in tokens if token >= 0)
