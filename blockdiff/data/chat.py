"""`Encoder`, which turns rows into tokens with the spans of their responses. `collate` chooses canvases and noise."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

from blockdiff.canvas import cut
from blockdiff.data.alterations import Alterations, find_alterations
from blockdiff.data.control_tokens import ControlTokens, Guard, make_guard, why_not_encoded
from blockdiff.data.decision_slots import answered, slot_spans, slots_of
from blockdiff.data.example import Example, ExampleImage, Slot
from blockdiff.data.image_parts import text_with_images
from blockdiff.data.images import ImageReader
from blockdiff.data.messages import with_thought_apart
from blockdiff.data.rows import Row
from blockdiff.data.statistics import Statistics
from blockdiff.data.template import (
    TOOL_TOKENS,
    EndlessTemplate,
    RefusedByTemplate,
    Rendered,
    Span,
    asks_date,
    dated,
    marked,
    reads_thoughts,
    render,
    token_spans,
    training_template,
)
from blockdiff.data.tokenise import Encoded, expanded, ids_around, rust_tokenizer, tokenised
from blockdiff.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK_ROWS = 128  # the largest number of rows in one call of the tokenizer; their offsets are many small objects
CHUNK_CHARACTERS = 1 << 20  # the same of characters, unless one row has more


class Encoding(NamedTuple):
    """The tokens of a whole row, with the spans of the responses to learn and the spans that the row excludes."""

    row: Row
    tokens: list[int]
    responses: list[Span]
    excluded: tuple[Span, ...]
    images: list[ExampleImage]
    context_turns: int  # turns of the assistant that are not learnt
    changes: Counter[str]  # counts of messages that the chat template altered
    slots: tuple[Slot, ...] = ()


def truncated(
    tokens: list[int], responses: Sequence[Span], max_length: int, canvas_length: int, aligned: bool = False
) -> tuple[list[int], list[Span]] | None:
    """Cut tokens and responses to `max_length`, a response only between canvases; None if no canvas fits.

    Tokens after the last response are dropped, too: without the cut part they would continue another conversation.
    aligned: as in `canvas.cut`.
    """
    if len(tokens) <= max_length:
        return tokens, list(responses)
    fitting = []
    for start, end in responses:
        if end > max_length:
            ends = [canvas_end for _, canvas_end in cut((start, end), canvas_length, aligned)]
            whole = [canvas_end for canvas_end in ends if canvas_end <= max_length]
            fitting += [(start, whole[-1])] if whole else []
            break
        fitting.append((start, end))
    return (tokens[: fitting[-1][1]], fitting) if fitting else None


@dataclass(frozen=True)
class Encoder:
    """Turns rows into examples.

    eos_id: the token that ends prompt/response rows (the template ends chat turns) and fills last canvases.
    turns: every assistant turn is a response, or only the last one.
    system: the system message of conversations that have none.
    too_long: cut rows of more than `max_length` tokens at a canvas boundary, leave them out, or raise DataError.
    chat: prompt and response are a conversation of two turns.
    verbatim: use blockdiff's own template, which changes no message, instead of the tokenizer's.
    control_tokens: control tokens that rows spell out stay "text", or are "allow"ed to become control tokens.
    skips_bad_rows: leave out and count rows that cannot be used.
    reader: reads the images of rows; without it, rows with images raise DataError.
    day: the date that chat templates write.
    aligned: canvases begin at multiples of their length.
    """

    tokenizer: PreTrainedTokenizerBase
    eos_id: int
    canvas_length: int
    max_length: int | None = None
    enable_thinking: bool = False
    turns: Literal["all", "last"] = "all"
    system: str | None = None
    too_long: Literal["truncate", "drop", "refuse"] = "truncate"
    chat: bool = False
    verbatim: bool = False
    control_tokens: ControlTokens = "text"
    skips_bad_rows: bool = False
    reader: ImageReader | None = None
    day: date = field(default_factory=date.today)
    aligned: bool = False

    @cached_property
    def template(self) -> str:
        """The chat template with marks around assistant turns."""
        return training_template(self.tokenizer, verbatim=self.verbatim)

    @cached_property
    def tool_template(self) -> str:
        """The chat template of rows with tools. It is another one if the tokenizer has a template `tool_use`."""
        return training_template(self.tokenizer, ({},), verbatim=self.verbatim)

    @cached_property
    def guard(self) -> Guard:
        """The guard that keeps texts of rows from becoming control tokens."""
        return make_guard(self.tokenizer, str(self.tokenizer.chat_template or ""), self.control_tokens)

    @property
    def exported_template(self) -> str | dict[str, str]:
        """The chat template of the trained model's tokenizer; all templates by name if it has several."""
        several = self.tokenizer.chat_template
        if isinstance(several, dict) and "default" not in several and not self.verbatim:
            return several
        if not isinstance(several, dict) or self.verbatim:
            return self.template
        named = {"default": self.template, "tool_use": self.tool_template}
        return several | named if self.template != self.tool_template else self.template

    @cached_property
    def _alterations(self) -> dict[str, Alterations]:
        """The changes that chat templates make to messages, by template."""
        return {}

    def _alterations_of(self, template: str) -> Alterations:
        if template not in self._alterations:
            self._alterations[template] = find_alterations(
                lambda messages: render(self.tokenizer, template, messages, self._variables).text
            )
        return self._alterations[template]

    @property
    def _variables(self) -> dict[str, bool]:
        return {"enable_thinking": self.enable_thinking}

    @cached_property
    def _unknown_tool_token(self) -> str | None:
        """The first token that the chat template writes around tools and the tokenizer lacks; None if there is none."""
        template, vocabulary = self.tool_template, self.tokenizer.get_vocab()
        return next((token for token in TOOL_TOKENS if token in template and token not in vocabulary), None)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that decides the tokens of a row."""
        if not self.tokenizer.is_fast:
            raise _slow()
        backend = rust_tokenizer(self.tokenizer)
        try:
            template = self.tool_template + self.template * (self.template != self.tool_template)
        except DataError:  # only conversations need one
            template = str(self.tokenizer.chat_template or "")
        options = (self.eos_id, self.canvas_length, self.max_length, self.enable_thinking, self.turns, self.system)
        more = (self.too_long, self.chat, self.tokenizer.special_tokens_map, self.tokenizer.bos_token_id)
        is_split = bool(self.tokenizer.split_special_tokens)
        text = json.dumps([template, options, more, self.control_tokens, is_split], default=str)
        text += " skips bad rows" * self.skips_bad_rows + " aligned" * self.aligned
        text += f" {self.day}" * asks_date(template)
        text += "" if self.reader is None else self.reader.fingerprint
        return hashlib.blake2b((text + backend.to_str()).encode(), digest_size=16).hexdigest()

    @property
    def tokenizer_fingerprint(self) -> str:
        """A hash of the tokenizer without its chat template."""
        text = json.dumps(self.tokenizer.special_tokens_map, sort_keys=True, default=str)
        text += rust_tokenizer(self.tokenizer).to_str()
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def encode(self, rows: Sequence[Row]) -> tuple[list[Example], Statistics]:
        """Return the examples of rows in order, and statistics about the rows.

        Raises DataError with file and line of a row that cannot be tokenised, and if no row is left.
        """
        statistics = Statistics(self.canvas_length, self.aligned)
        examples = list(self.examples(rows, statistics))
        if not examples:
            raise self.nothing_left(statistics.rows)
        return examples, statistics

    def examples(self, rows: Iterable[Row], statistics: Statistics, counts_bad: bool = False) -> Iterator[Example]:
        """Yield the examples of rows, and count them in `statistics`. `sample_id` counts rows from 0.

        Raises DataError with file and line of a row that cannot be tokenised or is too long. With `counts_bad` or
        `skips_bad_rows` such rows are left out and counted instead.
        """
        bad = statistics if counts_bad or self.skips_bad_rows else None
        for sample_id, (row, tokens, responses, excluded, images, context_turns, changes, slots) in enumerate(
            self._encoded(rows, bad)
        ):
            statistics.count_row(row.messages is not None, context_turns, changes, row.unread)
            try:
                fitted = self._fitted(tokens, responses, row.where)
            except DataError as error:
                if bad is None:
                    raise
                bad.count_bad(error)
                continue
            if fitted is None:
                statistics.count_dropped(row.where)
                continue
            cut_tokens = len(tokens) - len(fitted[0])
            images_left = tuple(image for image in images if image.column < len(fitted[0]))  # no cut is in an image
            lengths = [image.tokens for image in images_left]
            statistics.count_example(fitted[0], fitted[1], lengths, cut_tokens=cut_tokens)
            clipped = tuple((start, min(end, len(fitted[0]))) for start, end in excluded if start < len(fitted[0]))
            yield Example(sample_id, fitted[0], fitted[1], cut_tokens > 0, row.where, images_left, clipped, slots)

    def nothing_left(self, rows: int, where: str = "") -> DataError:
        """The error for data without a usable row."""
        room = "is short enough" if self.too_long == "drop" else f"has room for a canvas of {self.canvas_length} tokens"
        return DataError(
            f"{where and where + ': '}none of {rows} rows {room} within max_length {self.max_length}; "
            "raise data.max_length"
        )

    def _fitted(self, tokens: list[int], responses: list[Span], where: str) -> tuple[list[int], list[Span]] | None:
        if self.max_length is None or len(tokens) <= self.max_length:
            return tokens, responses
        if self.too_long == "refuse":
            raise DataError(
                f"{where}: {len(tokens)} tokens, more than data.max_length {self.max_length}; "
                f"shorten it, raise the limit, or write {{truncate: {self.max_length}}} or {{drop: {self.max_length}}}"
            )
        if self.too_long == "drop":
            return None
        return truncated(tokens, responses, self.max_length, self.canvas_length, self.aligned)

    def _encoded(self, rows: Iterable[Row], counts: Statistics | None) -> Iterator[Encoding]:
        """Yield the encoding of every row. With `counts`, bad rows are counted there and left out."""
        if not self.tokenizer.is_fast:
            raise _slow()
        for chunk in _chunks(rows):
            if self.chat:
                chunk = [row.as_conversation() for row in chunk]
            try:
                yield from list(self._together(chunk))
                continue
            except DataError:
                if counts is None:
                    raise
            for row in chunk:  # one by one, to find those that cannot be encoded
                try:
                    encoded = list(self._together([row]))
                except DataError as error:
                    if not str(error).startswith(row.where):  # something that all rows need
                        raise
                    counts.count_bad(error)
                else:
                    yield from encoded

    def _together(self, rows: Sequence[Row]) -> Iterator[Encoding]:
        """Yield the encodings of rows that are tokenised together."""
        encoded_pairs = iter(self._pairs([row for row in rows if row.messages is None]))
        encoded_chats = iter(self._chats([row for row in rows if row.messages]))
        images = self._images(rows)
        for row in rows:
            ids, spans, excluded, changes = next(encoded_pairs if row.messages is None else encoded_chats)
            answers = [] if row.decision is None else [spans.pop() for _ in row.decision.questions][::-1]
            known = [*spans, *excluded, *answers]
            tokens, moved, placed = self._placed(row, ids, known, [next(images) for _ in row.sources])
            first_answer = len(known) - len(answers)
            responses, others = moved[: len(spans)], tuple(moved[len(spans) : first_answer])
            chosen = responses if self.turns == "all" and not answers else responses[-1:]
            slots = slots_of(row, tokens, moved[first_answer:], chosen, self.canvas_length, self.tokenizer)
            yield Encoding(row, tokens, chosen, others, placed, len(moved) - len(chosen) - len(slots), changes, slots)

    def _images(self, rows: Sequence[Row]) -> Iterator[ExampleImage]:
        """Yield the images of rows in order, still without their columns. All are read together."""
        sources = [(row, source) for row in rows for source in row.sources]
        if not sources:
            return
        if self.reader is None:
            raise DataError(
                f"{sources[0][0].where}: has an image, but the run reads none; set model.images to frozen or "
                "trained, or remove it"
            )
        paths = [self.reader.located(source, row.where) for row, source in sources]
        for (row, source), facts in zip(sources, self.reader.facts(paths), strict=True):
            if isinstance(facts, DataError):
                raise DataError(f"{row.where}: {facts}")
            if not isinstance(source, str | bytes):
                raise DataError(f"{row.where}: an image is a tensor; training needs the file or its bytes")
            yield ExampleImage(source, 0, *facts)

    def _placed(
        self, row: Row, tokens: list[int], responses: list[Span], images: Sequence[ExampleImage]
    ) -> tuple[list[int], list[Span], list[ExampleImage]]:
        """Repeat the single placeholder of each image as often as the image has tokens.

        Returns the tokens, the moved spans of the responses, and the images with their columns.
        """
        if self.reader is None or not (images or self.reader.tokens[1] in tokens):
            return tokens, responses, []
        try:
            whole = expanded(tokens, [image.tokens for image in images], ids_around(self.reader.tokens, self.tokenizer))
        except DataError as error:
            raise DataError(f"{row.where}: {error}") from None
        moved = [(whole.moved[start], whole.moved[end]) for start, end in responses]
        return (
            whole.ids,
            moved,
            [replace(image, column=column) for image, column in zip(images, whole.columns, strict=True)],
        )

    def _pairs(self, rows: Sequence[Row]) -> Iterator[tuple[list[int], list[Span], list[Span], Counter[str]]]:
        """Encode raw rows: bos and prompt, then response and eos. No token spans prompt and response.

        Yields the tokens, the span of the response, no excluded spans, and changes.
        """
        text = next((row for row in rows if row.is_text), None)
        if text is not None and self.canvas_length > 1:
            raise DataError(
                f"{text.where}: the row is one text, but canvases learn responses; write prompt (it may be empty) and "
                "response, or train next tokens of a causal model"
            )
        bos = self.tokenizer.bos_token_id
        head = [] if bos is None else [bos]
        responses = self._tokenise([row.response or "" for row in rows], rows)
        for (prompt, is_cut), response in zip(self._prompts(rows), responses, strict=True):
            start = prompt if prompt[:1] == head else [*head, *prompt]
            tokens = [*start, *response.ids, self.eos_id]
            yield tokens, [(len(start), len(tokens))], [], Counter(spelt=is_cut or bool(response.cuts))

    def _prompts(self, rows: Sequence[Row]) -> Iterator[tuple[list[int], bool]]:
        """Yield the tokens of raw prompts, with image placeholders, and whether they spell a control token."""
        parts = [
            text_with_images(row.prompt or "", row.images)
            if row.images
            else [{"type": "text", "text": row.prompt or ""}]
            for row in rows
        ]
        texts = [
            (part["text"], row) for row, of_row in zip(rows, parts, strict=True) for part in of_row if "text" in part
        ]
        encoded = iter(self._tokenise([text for text, _ in texts], [row for _, row in texts]))
        for of_row in parts:
            ids, is_cut = list[int](), False
            for part in of_row:
                if part["type"] == "text":
                    piece = next(encoded)
                    ids, is_cut = ids + piece.ids, is_cut or bool(piece.cuts)
                elif self.reader is not None:
                    ids.append(self.reader.tokens[1])
            yield ids, is_cut

    def _chats(self, rows: Sequence[Row]) -> Iterator[tuple[list[int], list[Span], list[Span], Counter[str]]]:
        rendered = [self._rendered(row) for row in rows]
        encoded = self._tokenise([each.text for each, _ in rendered], rows, [each.cuts for each, _ in rendered])
        for row, encoding, (each, changes) in zip(rows, encoded, rendered, strict=True):
            try:
                responses, excluded = (token_spans(encoding.offsets, spans) for spans in (each.spans, each.excluded))
                responses += token_spans(encoding.offsets, slot_spans(row, each, self.tokenizer))
            except ValueError as error:
                raise DataError(f"{row.where}: {error}; change the chat template") from None
            if not responses:
                raise DataError(f"{row.where}: the chat template marks no assistant turn; change the template")
            yield encoding.ids, responses, excluded, changes

    def _rendered(self, row: Row) -> tuple[Rendered, Counter[str]]:
        """Render a conversation with its chat template. Returns it and the template's changes to messages."""
        messages = row.messages or ()
        if row.decision is not None:
            messages = (*messages, {"role": "assistant", "content": answered(row, self.tokenizer)[0]})
        has_tools = bool(row.tools) or any("tool_calls" in message for message in messages)
        template = dated(self.tool_template if row.tools else self.template, self.day)
        if has_tools and self._unknown_tool_token:
            raise DataError(
                f"{row.where}: the chat template writes tools with {self._unknown_tool_token}, which the tokenizer "
                "does not have; use a tokenizer that has it, or remove the row"
            )
        turns = [message for message in messages if message["role"] == "assistant"]
        if self.turns == "last" and turns and not turns[-1].get("is_learnt", True):
            raise DataError(
                f"{row.where}: the last assistant message is marked as not to be learnt, but data.turns: last learns "
                "no other; remove the row, or set data.turns: all"
            )
        if self.system is not None and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": self.system}, *messages)
        apart = [with_thought_apart(message) for message in messages] if reads_thoughts(template) else list(messages)
        try:
            is_last = self.turns == "last"
            each = marked(self.tokenizer, template, apart, self._variables, row.tools, self.guard, is_last)
        except EndlessTemplate as error:  # other rows would not end either
            raise DataError(f"{error} for the row at {row.where}; name another one as data.template") from None
        except RefusedByTemplate as error:
            raise DataError(f"{row.where}: the chat template refuses it ({error}); change the row") from None
        except DataError as error:
            raise DataError(f"{row.where}: {error}") from None
        changes = self._alterations_of(template).count(apart) + Counter(each.changes)
        thoughts = sum(one is not other for one, other in zip(apart, messages, strict=True))
        return each, changes + Counter(thought=thoughts, spelt=bool(each.cuts))

    def _tokenise(
        self, texts: Sequence[str], rows: Sequence[Row], cuts: Sequence[tuple[int, ...]] | None = None
    ) -> list[Encoded]:
        """Tokenise texts without transformers' dictionaries of lists. Raises DataError with the row that fails.

        cuts: for rendered texts, the columns at which control tokens are spelt; their tokens have offsets. None: other
        texts, which are cut at the control tokens that they spell.
        """
        try:
            return self._encode(texts, cuts)
        except Exception:  # tokenizers raises nothing narrower; find the row it comes from
            for number, (text, row) in enumerate(zip(texts, rows, strict=True)):
                try:
                    self._encode([text], None if cuts is None else [cuts[number]])
                except DataError as error:
                    raise DataError(f"{row.where}: {error}") from None
                except Exception as error:
                    why = why_not_encoded(error, text, self.tokenizer)
                    raise DataError(f"{row.where}: the tokenizer cannot encode it ({why}); change the row") from None
            raise

    def _encode(self, texts: Sequence[str], cuts: Sequence[tuple[int, ...]] | None) -> list[Encoded]:
        return tokenised(texts, self.tokenizer, self.guard, cuts, has_offsets=cuts is not None)


def _chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield rows in chunks of at most CHUNK_ROWS rows and CHUNK_CHARACTERS characters, or of one row."""
    chunk, size = list[Row](), 0
    for row in rows:
        length = row.characters
        if chunk and (len(chunk) == CHUNK_ROWS or size + length > CHUNK_CHARACTERS):
            yield chunk
            chunk, size = [], 0
        chunk.append(row)
        size += length
    if chunk:
        yield chunk


def _slow() -> DataError:
    return DataError("the tokenizer has no character offsets; use a fast one (tokenizer.json)")
