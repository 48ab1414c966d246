"""`Example`, a row as tokens with the spans to learn."""

from __future__ import annotations

from dataclasses import dataclass

from blockdiff.data.messages import ImageSource
from blockdiff.data.template import Span


@dataclass(frozen=True)
class ExampleImage:
    """An image of an example without its pixels: its source, its columns in the row, and its digest."""

    source: ImageSource
    column: int
    tokens: int
    digest: bytes


@dataclass(frozen=True)
class Slot:
    """The column of a decision's label in a row, and the tokens of its possible labels with their weights."""

    column: int
    tokens: list[int]
    weights: list[float]


@dataclass(frozen=True)
class Example:
    """A row as tokens, with the columns [start, end) of its responses.

    sample_id: the row's number, counted through all sources.
    where: the file and line of the row.
    images: the images of the placeholders in `tokens`.
    excluded: the columns of turns that the row marks as not to be learnt.
    slots: the slots of a decision, of which nothing else is learnt.
    """

    sample_id: int
    tokens: list[int]
    responses: list[Span]
    is_truncated: bool = False
    where: str = ""
    images: tuple[ExampleImage, ...] = ()
    excluded: tuple[Span, ...] = ()
    slots: tuple[Slot, ...] = ()
