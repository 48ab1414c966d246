"""Tokenises texts, and turns prompts (texts or messages) into the tokens before a response."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from blockdiff.data.control_tokens import ControlTokens, Guard, cut, make_guard, why_not_encoded
from blockdiff.data.image_parts import image_parts, images_in, text_with_images
from blockdiff.data.images import ImageReader, ImageTokens
from blockdiff.data.messages import OF_ASSISTANT, BadRow, ImageSource, Message, Part, checked_messages, checked_tools
from blockdiff.data.template import RefusedByTemplate, Span, is_variable, own_template, render
from blockdiff.errors import DataError
from blockdiff.images import ImageInput, PlacedImage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_IMAGES = "the model takes no images (none does beside a canvas model that drafts); leave them out"
SHOWN = "[image]"  # replaces an image in a prompt that people read


class Encoded(NamedTuple):
    """The token ids of a text, the characters [start, end) of each token if requested, and the indices of cuts."""

    ids: list[int]
    offsets: list[Span]
    cuts: tuple[int, ...]


class Prompt(NamedTuple):
    """A prompt as text for people to read, as tokens, and with the images at its placeholders."""

    text: str
    tokens: list[int]
    images: list[PlacedImage]


class Expanded(NamedTuple):
    """The tokens of a row with all placeholders of its images, and the first placeholder's column of each image.

    moved: the new column of every old one, and of the end.
    """

    ids: list[int]
    columns: list[int]
    moved: list[int]


def expanded(ids: Sequence[int], counts: Sequence[int], around: tuple[int, int, int]) -> Expanded:
    """Replace each placeholder by `counts` placeholders, one count per image, between the tokens that enclose an image.

    around: the ids before an image, of a placeholder, and after it. Raises DataError if `ids` has more or fewer
    placeholders than `counts`.
    """
    before, placeholder, after = around
    holes = [column for column, token in enumerate(ids) if token == placeholder]
    if len(holes) > len(counts):
        raise DataError("its text spells the token of an image, but there is none; change the text or add the image")
    if len(holes) < len(counts):
        raise DataError(
            f"the chat template writes {len(holes)} of {len(counts)} images; take one that writes parts of type image"
        )
    result, columns, moved, start = list[int](), list[int](), list[int](), 0
    for column, count in zip(holes, counts, strict=True):
        moved += range(len(result), len(result) + column - start + 1)
        result += [*ids[start:column], before, *[placeholder] * count, after]
        columns.append(len(result) - 1 - count)
        start = column + 1
    moved += range(len(result), len(result) + len(ids) - start + 1)
    return Expanded([*result, *ids[start:]], columns, moved)


def takes_images(tokens: ImageTokens | None, tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Return False for a model without image tokens, or if its tokenizer lacks one of them."""
    if tokens is None or tokenizer is None:
        return tokens is not None
    spelt = [token for token in tokens if isinstance(token, str)]
    return not {None, tokenizer.unk_token_id} & {tokenizer.convert_tokens_to_ids(token) for token in spelt}


def ids_around(tokens: ImageTokens, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int, int]:
    """Return the ids of the token before an image, of its placeholder and of the token after it.

    tokens: the ids of these three, or texts of the first and the last. Raises DataError if the tokenizer lacks one.
    """
    ids = [tokenizer.convert_tokens_to_ids(token) if isinstance(token, str) else token for token in tokens]
    for id, token in zip(ids, tokens, strict=True):
        if id is None or (isinstance(token, str) and id == tokenizer.unk_token_id):
            raise DataError(f"the tokenizer has no token {token!r}, which the model has around images")
    before, placeholder, after = ids
    return before, placeholder, after


def tokenised(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    guard: Guard,
    cuts: Sequence[tuple[int, ...]] | None = None,
    has_offsets: bool = False,
) -> list[Encoded]:
    """Return the tokens of every text, without special tokens around it.

    cuts: the indices at which each text is cut (None: at the control tokens that it spells, which thus stay text).
    has_offsets: return the characters of every token, too, which needs a fast tokenizer. Raises the tokenizer's error
    for a text that it cannot encode, and DataError for one that the guard refuses.
    """
    all_cuts = [guard.cuts(text) for text in texts] if cuts is None else cuts
    pieces = [piece for text, text_cuts in zip(texts, all_cuts, strict=True) for piece in cut(text, text_cuts)]
    encodings = iter(_encode(pieces, tokenizer, has_offsets) if pieces else ())
    encoded = []
    for text, text_cuts in zip(texts, all_cuts, strict=True):
        parts = list(islice(encodings, len(text_cuts) + 1))
        encoded.append(_joined(parts, text_cuts, has_offsets))
        firsts = tokenizer.convert_ids_to_tokens([part.ids[0] for part in parts[1:] if part.ids])
        guard.check(text, text_cuts, encoded[-1].ids, firsts)
    return encoded


def text_tokens(
    text: str, tokenizer: PreTrainedTokenizerBase, control_tokens: ControlTokens = "text", name: str = "the text"
) -> list[int]:
    """Return the tokens of a text that people wrote. Raises DataError with `name` if it cannot be tokenised."""
    return _ids(text, tokenizer, _guard(tokenizer, control_tokens), name=name)


def token_prompt(tokens: Sequence[int], images: Sequence[ImageSource], reader: ImageReader | None) -> Prompt:
    """Return a prompt given as tokens, without a text. Images must have their placeholders there, else DataError."""
    if not images:
        return Prompt("", list(tokens), [])
    if reader is None:
        raise DataError(NO_IMAGES)
    read = [reader.read(image) for image in images]
    columns = [column for column, token in enumerate(tokens) if token == reader.tokens[1]]
    if len(columns) != (taken := sum(image.tokens for image in read)):
        raise DataError(f"the tokens have {len(columns)} placeholders of images, but the images take {taken}")
    placed, first = list[PlacedImage](), 0
    for number, image in enumerate(read):
        if columns[first + image.tokens - 1] - columns[first] >= image.tokens:
            raise DataError(f"the {image.tokens} placeholders of images[{number}] do not stand side by side")
        placed.append(PlacedImage(image, columns[first]))
        first += image.tokens
    return Prompt("", list(tokens), placed)


def raw_prompt(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    control_tokens: ControlTokens = "text",
    images: Sequence[ImageSource] = (),
    reader: ImageReader | None = None,
) -> Prompt:
    """Return a raw prompt with bos before it. It warns if the text spells a control token.

    images: at the markers `<image>` of the text, or before the text. Raises DataError if the text cannot be tokenised
    or an image cannot be read.
    """
    guard = _guard(tokenizer, control_tokens)
    if guard.cuts(text):
        warnings.warn(
            f"a prompt spells the control token {guard.spelt(text)}, which is read as text; --allow-control-tokens "
            "(Request.allow_control_tokens) makes it the token",
            stacklevel=2,
        )
    try:
        parts: list[Part] = text_with_images(text, images) if images else [{"type": "text", "text": text}]
    except BadRow as error:
        raise DataError(str(error)) from None
    tokens: list[int] = []
    for part in parts:
        tokens += _ids(part["text"], tokenizer, guard) if part["type"] == "text" else [_placeholder(reader)]
    bos = tokenizer.bos_token_id
    tokens = tokens if bos is None or tokens[:1] == [bos] else [bos, *tokens]
    shown = "".join(part.get("text", SHOWN) for part in parts)
    return Prompt(shown, *_with_images(tokens, images, tokenizer, reader))


def _placeholder(reader: ImageReader | None) -> int:
    if reader is None:
        raise DataError(NO_IMAGES)
    return reader.tokens[1]


def _with_images(
    tokens: list[int], sources: Sequence[ImageSource], tokenizer: PreTrainedTokenizerBase, reader: ImageReader | None
) -> tuple[list[int], list[PlacedImage]]:
    """Expand a prompt with one placeholder per image as the model reads it. Returns it with the placed images."""
    if reader is None or not (sources or reader.tokens[1] in tokens):
        return tokens, []
    images: list[ImageInput] = []
    for number, outcome in enumerate(reader.read_all(sources), start=1):
        if isinstance(outcome, DataError):
            raise DataError(f"image {number}: {outcome}")
        images.append(outcome)
    row = expanded(tokens, [image.tokens for image in images], ids_around(reader.tokens, tokenizer))
    return row.ids, [PlacedImage(image, column) for image, column in zip(images, row.columns, strict=True)]


def conversation(messages: Any, tools: Any = None) -> tuple[list[Message], list[Message] | None]:
    """Check messages to be answered and their tools, and return them as chat templates read them. Raises DataError."""
    try:
        checked, declared = checked_messages(messages, "messages", is_prompt=True), checked_tools(tools)
    except BadRow as error:
        raise DataError(str(error)) from None
    if not checked:
        raise DataError("messages must be a list of {role, content} objects with at least one entry")
    if checked[-1]["role"] == "assistant" and (len(checked) == 1 or {*checked[-1]} & {*OF_ASSISTANT}):
        what = "reasoning or calls of tools" if len(checked) > 1 else "nothing before it"
        raise DataError(f"the last message is the assistant's, which is continued, but it has {what}; leave it out")
    if any("image" not in part for message in checked for part in image_parts(message)):
        raise DataError("a part of type image has no image; give a path, a data URI or the bytes of a file")
    return list(checked), None if declared is None else list(declared)


def chat_prompt(
    messages: Any,
    tools: Any,
    tokenizer: PreTrainedTokenizerBase,
    control_tokens: ControlTokens = "text",
    thinking: bool = False,
    options: Mapping[str, Any] | None = None,
    reader: ImageReader | None = None,
) -> Prompt:
    """Return a conversation as the tokenizer's chat template writes it, up to the assistant's turn, and its tokens.

    If the last message is the assistant's, it is continued: the prompt ends with its text.

    thinking: ask the template for reasoning. options: further variables, which the template must use. Raises DataError
    if the conversation cannot be written or tokenised, or an image cannot be read.
    """
    guard = _guard(tokenizer, control_tokens)
    checked, declared = conversation(messages, tools)
    continued = str(checked.pop()["content"]) if checked[-1]["role"] == "assistant" else ""
    template = own_template(tokenizer, declared)
    if template is None:
        raise DataError("the tokenizer has no chat template; give a raw prompt instead of messages")
    # False is passed, too, as in training: without it some templates think
    says_thinking = thinking or is_variable("enable_thinking", template)
    options = {**({"enable_thinking": thinking} if says_thinking else {}), **(options or {})}
    for name in options:
        if not is_variable(name, template):
            raise DataError(f"the chat template of this model has no variable {name!r:.60}; leave it out")
    sources = images_in(checked)
    marker = str(tokenizer.convert_ids_to_tokens(_placeholder(reader))) if sources else ""
    try:
        text, _, cuts, *_ = render(tokenizer, template, checked, options, declared, guard, is_prompt=True)
    except RefusedByTemplate as error:
        raise DataError(f"the chat template refuses these messages: {error}") from None
    tokens, images = _with_images(_ids(text, tokenizer, guard, cuts), sources, tokenizer, reader)
    shown = "".join(piece.replace(marker, SHOWN) for piece in cut(text, cuts)) if marker else text
    return Prompt(shown + continued, tokens + _ids(continued, tokenizer, guard), images)


def rust_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the Rust part of a fast tokenizer, set as transformers sets it to encode one text."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend


class _Part(NamedTuple):
    """The encoding of a piece by a tokenizer without a Rust part."""

    ids: list[int]


def _encode(pieces: list[str], tokenizer: PreTrainedTokenizerBase, has_offsets: bool) -> list[Any]:
    if tokenizer.is_fast:
        backend = rust_tokenizer(tokenizer)
        encode = backend.encode_batch if has_offsets else backend.encode_batch_fast
        try:
            return list(encode(pieces, add_special_tokens=False))
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # Rust's panics are no Exception
                raise
            file = Path(str(tokenizer.name_or_path), "tokenizer.json")
            why = " ".join(str(error).split())
            raise DataError(f"{file}: its normalizer or pre_tokenizer fails ({why}); take another tokenizer") from None
    return [_Part(list(tokenizer(piece, add_special_tokens=False)["input_ids"])) for piece in pieces]


def _joined(parts: Sequence[Any], cuts: tuple[int, ...], has_offsets: bool) -> Encoded:
    """Join the encodings of a text's pieces."""
    if not cuts:
        return Encoded(parts[0].ids, parts[0].offsets if has_offsets else [], ())
    ids = [token for part in parts for token in part.ids]
    starts = zip((0, *cuts), parts, strict=True)
    offsets = [(first + start, first + end) for first, part in starts for start, end in part.offsets]
    return Encoded(ids, offsets if has_offsets else [], cuts)


def _ids(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    guard: Guard,
    cuts: tuple[int, ...] | None = None,
    name: str = "the prompt",
) -> list[int]:
    """Return the tokens of one text. Raises DataError with `name` if it cannot be tokenised."""
    try:
        return tokenised([text], tokenizer, guard, None if cuts is None else [cuts])[0].ids
    except DataError as error:
        raise DataError(f"{name} cannot be tokenised: {error}") from None
    except Exception as error:  # tokenizers raises plain Exceptions, for example on a character it lacks
        raise DataError(f"{name} cannot be tokenised: {why_not_encoded(error, text, tokenizer)}") from error


def _guard(tokenizer: PreTrainedTokenizerBase, control_tokens: ControlTokens) -> Guard:
    return _guard_of(tokenizer, len(tokenizer), str(tokenizer.chat_template or ""), control_tokens)


# The number of tokens is in the key because tokens can be added to a tokenizer later.
_guard_of = lru_cache(maxsize=4)(lambda tokenizer, size, template, control: make_guard(tokenizer, template, control))
