"""The slots of a decision to train on: its canvas as text, and the label tokens of each slot."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from blockdiff.data.example import Slot
from blockdiff.data.rows import Row
from blockdiff.data.template import Rendered, Span
from blockdiff.errors import DataError, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def answered(row: Row, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[Span]]:
    """Return the text of a decision's canvas with the most probable labels, and the character spans of its slots."""
    assert row.decision is not None
    return row.decision.answered([_likeliest(target) for target in row.targets], _space(row, tokenizer))


def slot_spans(row: Row, each: Rendered, tokenizer: PreTrainedTokenizerBase) -> list[Span]:
    """The character spans of a decision's slots in a rendered conversation; [] for a row without a decision.

    Raises ValueError if the chat template has changed the answer.
    """
    if row.decision is None:
        return []
    text, spans = answered(row, tokenizer)
    begin = each.text.find(text, each.spans[-1][0])
    if not 0 <= begin < each.spans[-1][1]:
        raise ValueError("the chat template changes the answer of a decision")
    return [(begin + start, begin + end) for start, end in spans]


def slots_of(
    row: Row,
    tokens: Sequence[int],
    spans: Sequence[Span],
    responses: Sequence[Span],
    canvas_length: int,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[Slot, ...]:
    """The slots of a decision whose labels are at the columns `spans`; () for a row without a decision.

    Raises DataError with the row's `where` unless each label is one token and all are in one canvas.
    """
    if row.decision is None:
        return ()
    (start, end), slots = responses[-1], list[Slot]()
    if end - start > canvas_length:
        words = f"the answers need {end - start} tokens, but a canvas has {canvas_length}; ask fewer questions jointly"
        raise DataError(f"{row.where}: {words}")
    space = _space(row, tokenizer)
    for (column, stop), labels, target in zip(spans, row.decision.labels, row.targets, strict=True):
        ids = [_tokens(tokenizer, space + label) for label in labels]
        if stop - column != 1 or (tokens[column],) != ids[_likeliest(target)]:
            raise DataError(f"{row.where}: a label is not a single token in the template's text; use another form")
        weighted = [(id, weight) for [id], weight in zip(ids, target, strict=True) if weight]
        slots.append(Slot(column, [id for id, _ in weighted], [weight for _, weight in weighted]))
    return tuple(slots)


def _space(row: Row, tokenizer: PreTrainedTokenizerBase) -> str:
    """The space before every label that makes each one token. Raises DataError if there is none."""
    assert row.decision is not None
    try:
        return row.decision.spellings(lambda text: len(_tokens(tokenizer, text)))[0]
    except RequestError as error:
        raise DataError(f"{row.where}: {error}") from None


@lru_cache(maxsize=1024)
def _tokens(tokenizer: PreTrainedTokenizerBase, label: str) -> tuple[int, ...]:
    return tuple(tokenizer(label, add_special_tokens=False)["input_ids"])


def _likeliest(target: Sequence[float]) -> int:
    return max(range(len(target)), key=target.__getitem__)
