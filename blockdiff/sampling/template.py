"""The form of a response in words: text that stands as it is written, and holes that the model fills."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from blockdiff.errors import DataError, RequestError
from blockdiff.sampling.prompt_tokens import text_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from blockdiff.sampling.request import Request

_HOLE = re.compile(r"<\?(?:(\?)|(\d{1,9})>)?")
FREE = -1
MOST_TOKENS = 1 << 20  # of a hole


def parse_template(template: str) -> list[str | int]:
    """Texts and sizes of holes in their order: `<?16>` is a hole of 16 tokens, and `<??` stands for `<?`.

    RequestError for any other `<?`, a hole of no tokens or more than a million, and a template without a hole.
    """
    if not isinstance(template, str):
        raise RequestError(f"template must be text, got {template!r:.80}")
    parts: list[str | int] = []
    literal, end = "", 0
    for found in _HOLE.finditer(template):
        literal += template[end : found.start()]
        end = found.end()
        if found[1]:
            literal += "<?"
            continue
        if not found[2] or not int(found[2]):
            around = template[found.start() : found.start() + 12]
            raise RequestError(
                f"the template has {around!r} at character {found.start()}; a hole of 16 tokens is <?16>, and <? "
                "itself is written <??"
            )
        if int(found[2]) > MOST_TOKENS:
            raise RequestError(f"the template has a hole of {int(found[2]):,} tokens; {MOST_TOKENS:,} are the most")
        parts += [literal, int(found[2])] if literal else [int(found[2])]
        literal = ""
    literal += template[end:]
    parts += [literal] if literal else []
    if not any(isinstance(part, int) for part in parts):
        raise RequestError("the template has no hole to fill; write one of 16 tokens as <?16>")
    return parts


def template_tokens(request: Request, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of the request's template: its texts, each tokenised alone, and FREE at every token of a hole.

    RequestError for a text that its tokens do not spell as it is written.
    """
    tokens: list[int] = []
    for part in parse_template(str(request.template)):
        tokens += [FREE] * part if isinstance(part, int) else spelt(part, request, tokenizer, "the template's text")
    return tokens


def spelt(text: str, request: Request, tokenizer: PreTrainedTokenizerBase, what: str) -> list[int]:
    """The tokens of a text; RequestError where they are not decoded as it is written."""
    try:
        tokens = text_tokens(text, request, tokenizer)
    except DataError as error:
        raise RequestError(f"{what} {text!r:.60} cannot be tokenised: {error}") from None
    said = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if said != text:
        raise RequestError(f"{what} {text!r:.60} becomes {said!r:.60} in the model's tokens; write it otherwise")
    return tokens
