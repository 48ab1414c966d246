"""From rows to tokens that know where their responses lie. Choosing canvases and noise come in `collate`."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from blockdiff.canvas import cut
from blockdiff.data.rows import Row
from blockdiff.data.statistics import Statistics
from blockdiff.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]

TURN_TOKENS = ("<|turn>", "<turn|>")
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Rendered by a template to see whether it writes the Gemma 4 turn format.
PROBES: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": " a\n"}, {"role": "assistant", "content": " b\n"}],
    [
        {"role": "system", "content": " s "},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ],
)
CHUNK = 128  # rows given to the tokenizer in one call; their offsets are many small objects


@dataclass(frozen=True)
class Example:
    """A row as tokens, with the columns [start, end) of its responses; `sample_id` is its row number."""

    sample_id: int
    tokens: list[int]
    responses: list[Span]
    is_truncated: bool = False
    where: str = ""


def packaged_template() -> str:
    """The chat template of the Gemma 4 turn format, with generation tags."""
    return (files("blockdiff.data") / "templates" / "gemma4.jinja").read_text(encoding="utf-8")


def training_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The template that marks the assistant turns: the tokenizer's own if it has generation tags.

    One that writes the Gemma 4 turn format without tags (as the released one), or none at all beside a
    vocabulary with that format's turn tokens, gives the packaged template. Raises DataError for any other:
    without tags nothing says exactly where a response starts and ends.
    """
    own = tokenizer.get_chat_template() if tokenizer.chat_template else None
    if own is None:
        vocabulary = tokenizer.get_vocab()
        if all(token in vocabulary for token in TURN_TOKENS):
            return packaged_template()
        raise DataError(
            "the tokenizer has no chat template, so messages rows cannot be rendered; "
            "set one with {% generation %} tags, or write prompt/response rows"
        )
    if GENERATION_TAG.search(own):
        return own
    packaged = packaged_template()
    if all(_text_or_none(tokenizer, own, probe) == render(tokenizer, packaged, probe)[0] for probe in PROBES):
        return packaged
    raise DataError(
        "the tokenizer's chat template has no {% generation %} tags, so it cannot mark assistant turns; "
        "add them around each assistant turn and its end token, or write prompt/response rows"
    )


def render(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    messages: Sequence[dict[str, str]],
    enable_thinking: bool = False,
) -> tuple[str, list[Span]]:
    """The text of a conversation and the character spans the template marks, touching ones merged."""
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, spans = render_jinja_template(
        conversations=[list(messages)],
        chat_template=template,
        return_assistant_tokens_mask=bool(GENERATION_TAG.search(template)),
        enable_thinking=enable_thinking,
        **tokenizer.special_tokens_map,
    )
    return texts[0], merged(spans[0]) if spans else []


def merged(spans: Sequence[Span]) -> list[Span]:
    """Spans in order, those that touch made one and empty ones left out."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        elif end > start:
            result.append((start, end))
    return result


def token_spans(offsets: Sequence[Span], spans: Sequence[Span]) -> list[Span]:
    """Character spans as token columns, given every token's character offsets.

    Raises ValueError when a token reaches over the edge of a span, for then no column is exact.
    """
    starts = [start for start, _ in offsets]
    result = []
    for start, end in spans:
        first, last = bisect_left(starts, start), bisect_left(starts, end)
        if any(column and offsets[column - 1][1] > edge for column, edge in ((first, start), (last, end))):
            raise ValueError("a token reaches over the edge of an assistant turn")
        if last > first:
            result.append((first, last))
    return result


def truncated(
    tokens: list[int], responses: Sequence[Span], max_length: int, canvas_length: int
) -> tuple[list[int], list[Span]] | None:
    """Tokens and responses cut to `max_length`, a response only between its canvases; None if no canvas fits.

    Nothing is kept after the last response: what follows a cut is no longer what the conversation says.
    """
    if len(tokens) <= max_length:
        return tokens, list(responses)
    kept = []
    for start, end in responses:
        if end > max_length:
            end = start + (max_length - start) // canvas_length * canvas_length
            kept += [(start, end)] if end > start else []
            break
        kept.append((start, end))
    return (tokens[: kept[-1][1]], kept) if kept else None


@dataclass(frozen=True)
class Encoder:
    """Turns rows into examples for one tokenizer, canvas length and largest row.

    `eos_id` is the first configured eos id: it ends prompt/response rows (chat turns end by their template)
    and fills last canvases.
    """

    tokenizer: PreTrainedTokenizerBase
    eos_id: int
    canvas_length: int
    max_length: int | None = None
    enable_thinking: bool = False
    turns: Literal["all", "last"] = "all"
    system: str | None = None
    too_long: Literal["truncate", "drop", "refuse"] = "truncate"

    @cached_property
    def template(self) -> str:
        """The chat template that marks assistant turns; looked up when the first messages row comes."""
        return training_template(self.tokenizer)

    def encode(self, rows: Sequence[Row]) -> tuple[list[Example], Statistics]:
        """The examples of `rows` in order, and what became of the rows.

        Raises DataError naming file and line where a row cannot be tokenised, and when no row is left.
        """
        examples = []
        unfit = cut_rows = cut_tokens = 0
        for sample_id, (row, (tokens, responses)) in enumerate(zip(rows, self._spans(rows), strict=True)):
            fitted = (
                (tokens, responses)
                if self.max_length is None
                else truncated(tokens, responses, self.max_length, self.canvas_length)
            )
            if fitted is None:
                unfit += 1
                continue
            is_cut = len(fitted[0]) < len(tokens)
            cut_rows += is_cut
            cut_tokens += len(tokens) - len(fitted[0])
            examples.append(Example(sample_id, fitted[0], fitted[1], is_cut, row.where))
        if not examples:
            raise DataError(
                f"none of {len(rows)} rows has room for a canvas of {self.canvas_length} tokens "
                f"within max_length {self.max_length}; raise data.max_length"
            )
        spans = [span for example in examples for span in example.responses]
        statistics = Statistics(
            rows=len(rows),
            dropped=unfit,
            truncated=cut_rows,
            cut_tokens=cut_tokens,
            responses=len(spans),
            canvases=sum(len(cut(span, self.canvas_length)) for span in spans),
            response_tokens=sum(end - start for start, end in spans),
            clean_tokens=sum(len(example.tokens) for example in examples),
            longest=max(len(example.tokens) for example in examples),
            canvas_length=self.canvas_length,
        )
        return examples, statistics

    def _spans(self, rows: Sequence[Row]) -> Iterator[tuple[list[int], list[Span]]]:
        for start in range(0, len(rows), CHUNK):
            chunk = rows[start : start + CHUNK]
            pairs, chats = (
                [row for row in chunk if row.messages is None],
                [row for row in chunk if row.messages],
            )
            encoded_pairs, encoded_chats = iter(self._pairs(pairs)), iter(self._chats(chats))
            for row in chunk:
                yield next(encoded_pairs if row.messages is None else encoded_chats)

    def _pairs(self, rows: Sequence[Row]) -> Iterator[tuple[list[int], list[Span]]]:
        """Raw text: bos and prompt, then response and eos, tokenised apart so that no token joins them."""
        if not rows:
            return
        bos = self.tokenizer.bos_token_id
        head = [] if bos is None else [bos]
        prompts = self._tokenise([row.prompt for row in rows], rows)["input_ids"]
        responses = self._tokenise([row.response for row in rows], rows)["input_ids"]
        for prompt, response in zip(prompts, responses, strict=True):
            start = prompt if prompt[:1] == head else [*head, *prompt]
            tokens = [*start, *response, self.eos_id]
            yield tokens, [(len(start), len(tokens))]

    def _chats(self, rows: Sequence[Row]) -> Iterator[tuple[list[int], list[Span]]]:
        if not rows:
            return
        rendered = []
        for row in rows:
            try:
                rendered.append(
                    render(self.tokenizer, self.template, row.messages or (), self.enable_thinking)
                )
            except _template_error() as error:
                raise DataError(
                    f"{row.where}: the chat template refuses it ({error}); change the row"
                ) from None
        encoded = self._tokenise([text for text, _ in rendered], rows, return_offsets_mapping=True)
        for row, tokens, offsets, (_, spans) in zip(
            rows, encoded["input_ids"], encoded["offset_mapping"], rendered, strict=True
        ):
            try:
                responses = token_spans(offsets, spans)
            except ValueError as error:
                raise DataError(f"{row.where}: {error}; change the chat template") from None
            if not responses:
                raise DataError(
                    f"{row.where}: the chat template marks no assistant turn; change the template"
                )
            yield tokens, responses

    def _tokenise(self, texts: Sequence[str | None], rows: Sequence[Row], **options: Any) -> Any:
        if not self.tokenizer.is_fast:
            raise DataError("the tokenizer has no character offsets; use a fast one (tokenizer.json)")
        options = {"add_special_tokens": False, "verbose": False, **options}
        try:
            return self.tokenizer(list(texts), **options)
        except Exception:  # tokenizers raises nothing narrower; find the row it comes from
            for text, row in zip(texts, rows, strict=True):
                try:
                    self.tokenizer(text, **options)
                except Exception as error:
                    raise DataError(
                        f"{row.where}: the tokenizer cannot encode it ({error}); change the row"
                    ) from None
            raise


def _text_or_none(
    tokenizer: PreTrainedTokenizerBase, template: str, messages: Sequence[dict[str, str]]
) -> str | None:
    try:
        return render(tokenizer, template, messages)[0]
    except _template_error():
        return None


def _template_error() -> type[Exception]:
    from jinja2 import TemplateError

    return TemplateError
