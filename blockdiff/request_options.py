"""The options of a request, each declared once: its name, type, default, rule, help, and where it can be set.

`blockdiff.sampling.Request` has these fields, and so has a line of a prompts file. `blockdiff sample` makes its options
from them, and the server the fields of its bodies. This module imports no torch, pydantic or typer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeGuard

from blockdiff.field_rules import Rule

PROMPTS, SAMPLING, CONTROL = "Prompts", "Sampling", "Control"  # groups of options in `--help`
MOST_STEPS = 1_000_000  # of a canvas
MOST_PENALTY = 1000.0
MOST_TOP = 20  # likeliest tokens listed for each token of an answer
MOST_STOPS, MOST_STOP = 64, 1024  # texts that end an answer, and the characters of each
MOST_DRAWS = 1024  # answers to one request, of which the best is returned


@dataclass(frozen=True)
class Option:
    """The rule of an option, and where it can be set.

    help, group, metavar: of the command's option (no help: the command has none, or declares it itself). is_file: the
    command's option names a file that has the value. served: the field of the server's bodies (None: no field, or
    another one sets it). least, most: the limits of a number, for checks before a request exists.
    """

    rule: Rule
    help: str = ""
    group: str = CONTROL
    metavar: str = ""
    is_file: bool = False
    served: str | None = None
    least: int | None = None
    most: int | None = None


def option(default: Any, rule: Rule, *surfaces: Any, **more: Any) -> Any:
    """Declare a dataclass field with its `Option`."""
    return field(default=default, metadata={"option": Option(rule, *surfaces, **more)})


def is_list(value: object) -> bool:
    """Return True unless a sequence is a text."""
    return not isinstance(value, str | bytes)


def is_integer(value: object) -> TypeGuard[int]:
    """Return True for an integer that is no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _integer(least: int, most: int) -> Rule:
    return Rule(int, f"an integer from {least} to {most:,}", lambda value: least <= value <= most)


def _number(least: float, most: float, words: str) -> Rule:
    return Rule((int, float), words, lambda value: least <= value <= most)


FLAG, TEXT = Rule(bool, "true or false"), Rule(str, "text")
SEED = Rule(int, "an integer from 0 to 2**64 - 1", lambda value: 0 <= value < 2**64)
STOPS = Rule(
    Sequence,
    f"a list of at most {MOST_STOPS} texts of at most {MOST_STOP:,} characters",
    lambda value: is_list(value) and len(value) <= MOST_STOPS,
    lambda each: _is_text(each) and len(each) <= MOST_STOP,
)
TEXTS_OR_IDS = Rule(Sequence, "a list of texts and token ids", is_list, lambda each: is_integer(each) or _is_text(each))
PENALTY = _number(1 / MOST_PENALTY, MOST_PENALTY, f"a number from {1 / MOST_PENALTY} to {MOST_PENALTY:g}")


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """The options of a request, without effect by default; docs/control.md explains the controls."""

    seed: int | None = option(None, SEED)
    thinking: bool = option(False, FLAG, "Ask for reasoning, which is kept apart from the answer.", PROMPTS)
    allow_control_tokens: bool = option(
        False, FLAG, "Read a control token such as <turn|> in a prompt as a token, not as text.", PROMPTS
    )
    template_options: Mapping[str, Any] | None = option(None, Rule(Mapping, "an object of variables"))
    max_new_tokens: int | None = option(None, Rule(int, "an integer of at least 1", lambda value: value >= 1))
    min_tokens: int = option(
        0,
        Rule(int, "an integer of at least 0", lambda value: value >= 0),
        "The answer does not end before N tokens.",
        metavar="N",
        served="min_tokens",
        least=0,
    )
    max_steps: int | None = option(None, _integer(1, MOST_STEPS), served="steps", least=1)
    best_of: int = option(
        1,
        _integer(1, MOST_DRAWS),
        "Draw N answers and give the one with the highest mean log-probability.",
        SAMPLING,
        "N",
        served="best_of",
        least=1,
        most=MOST_DRAWS,
    )
    scores: bool = option(False, FLAG, "Give the log-probability of every token.", SAMPLING)
    top_logprobs: int = option(0, _integer(0, MOST_TOP))
    scores_prompt: bool = option(False, FLAG)
    template: str | None = option(
        None,
        TEXT,
        "Form of the answer: <?N> is a hole of N tokens, <?? stands for <? itself.",
        metavar="TEXT",
        served="template",
    )
    regex: str | None = option(
        None, TEXT, "A regular expression that the whole answer matches.", metavar="REGEX", served="regex"
    )
    json_schema: str | Mapping[str, Any] | None = option(
        None,
        Rule((str, Mapping), "an object or its JSON"),
        "A JSON schema that the answer satisfies; - reads stdin.",
        metavar="FILE",
        is_file=True,
        served="json_schema",
    )
    banned: Sequence[str | int] = option(
        (), TEXTS_OR_IDS, "A text that must not occur (repeatable).", metavar="TEXT", served="banned"
    )
    repetition_penalty: float = option(
        1.0,
        PENALTY,
        "Above 1, tokens that were there before become less likely.",
        metavar="X",
        served="repetition_penalty",
    )
    draft: str | None = option(
        None, TEXT, "An answer to start from; a share --noise of it is redone.", metavar="TEXT", served="draft"
    )
    noise: float | None = option(
        None,
        _number(0, 1, "a number in [0, 1]"),
        "Share of the draft that is noise at first (0.5).",
        metavar="T",
        served="noise",
        least=0,
        most=1,
    )
    stop: Sequence[str] = option((), STOPS, "A text that ends the answer (repeatable).", metavar="TEXT")


OPTIONS: dict[str, Option] = {each.name: each.metadata["option"] for each in fields(RequestOptions)}
# The name of each field in the server's bodies, by its name here.
SERVED = {name: rule.served for name, rule in OPTIONS.items() if rule.served is not None}
