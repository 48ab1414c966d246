"""An example: a row as tokens, and what of them is learnt."""

from __future__ import annotations

from dataclasses import dataclass

from blockdiff.data.messages import ImageSource
from blockdiff.data.template import Span


@dataclass(frozen=True)
class ExampleImage:
    """An image of an example without its pixels: where it comes from, the columns it takes, and its digest."""

    source: ImageSource
    column: int
    tokens: int
    digest: bytes


@dataclass(frozen=True)
class Slot:
    """The place of a decision's label in a row, and the tokens of the labels that it may have, with their weights."""

    column: int
    tokens: list[int]
    weights: list[float]


@dataclass(frozen=True)
class Example:
    """A row as tokens, with the columns [start, end) of its responses; `sample_id` is its row number.

    Of several sources, row numbers go on from one to the next. The tokens have all placeholders of `images`. Columns of
    `excluded` are turns that the row marks as not to be learnt. Of a decision the `slots` alone are learnt.
    """

    sample_id: int
    tokens: list[int]
    responses: list[Span]
    is_truncated: bool = False
    where: str = ""
    images: tuple[ExampleImage, ...] = ()
    excluded: tuple[Span, ...] = ()
    slots: tuple[Slot, ...] = ()
