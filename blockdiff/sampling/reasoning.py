"""Telling what a model thought from what it answered, in the formats of Gemma 4 and of MiniMax M3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The tokens around the reasoning, and the text that stands right after the first of them.
FORMATS = (("<mm:think>", "</mm:think>", ""), ("<|channel>", "<channel|>", "thought\n"))


def separated(
    tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase, is_open: bool = False
) -> tuple[str | None, list[int]]:
    """The text of the reasoning in a response (None: there is none) and the tokens of its answer.

    The answer is what follows the last closed channel. Reasoning that was never closed, because the response ran out of
    tokens, has no answer after it. is_open: whether the prompt has opened it.
    """
    opens, closes, name = _format(tokenizer)
    if opens is None or not (is_open or {opens, closes} & set(tokens)):
        return None, list(tokens)
    tokens = list(tokens)
    if is_open and closes not in tokens:
        start = end = len(tokens)
    else:
        start = len(tokens) - tokens[::-1].index(closes) if closes in tokens else 0  # of the answer
        end = tokens.index(opens, start) if opens in tokens[start:] else len(tokens)
    inside = [token for token in tokens[:start] + tokens[end:] if token not in (opens, closes)]
    thoughts = str(tokenizer.decode(inside, skip_special_tokens=True))
    return thoughts.removeprefix(name).strip(), tokens[start:end]


def is_opened(prompt: str) -> bool:
    """True where a prompt's text ends with the beginning of reasoning, so that the response goes on with it."""
    return prompt.rstrip().endswith(tuple((opens + name).rstrip() for opens, _, name in FORMATS))


def _format(tokenizer: PreTrainedTokenizerBase) -> tuple[int | None, int | None, str]:
    """The tokens of the format that a vocabulary has, and its text; None for the tokens where it has none."""
    for opens, closes, name in FORMATS:
        ids = [tokenizer.convert_tokens_to_ids(mark) for mark in (opens, closes)]
        if not {None, tokenizer.unk_token_id} & set(ids):
            return int(ids[0]), int(ids[1]), name
    return None, None, ""
