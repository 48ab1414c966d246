"""Telling what a model thought from what it answered, in the Gemma 4 turn format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPENS, CLOSES = "<|channel>", "<channel|>"
NAME = "thought\n"  # the name of the channel, which stands right after it is opened


def separated(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> tuple[str | None, list[int]]:
    """The text of the reasoning in a response (None: there is none) and the tokens of its answer.

    The answer is what follows the last closed channel. Reasoning that was never closed, because the response ran out of
    tokens, has no answer after it.
    """
    opens, closes = (_id(mark, tokenizer) for mark in (OPENS, CLOSES))
    if opens is None or closes is None or not {opens, closes} & set(tokens):
        return None, list(tokens)
    tokens = list(tokens)
    start = len(tokens) - tokens[::-1].index(closes) if closes in tokens else 0  # of the answer
    end = tokens.index(opens, start) if opens in tokens[start:] else len(tokens)
    thoughts = tokenizer.decode(tokens[:start] + tokens[end:], skip_special_tokens=True)
    return str(thoughts).removeprefix(NAME).strip(), tokens[start:end]


def _id(mark: str, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token of a mark; None where the vocabulary has none."""
    found = tokenizer.convert_tokens_to_ids(mark)
    return None if found is None or found == tokenizer.unk_token_id else int(found)
