"""The form of a response in words: text that stands as it is written, and holes that the model fills."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from blockdiff.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HOLE = re.compile(r"<\?(?:(\?)|(\d{1,9})>)?")
FREE = -1


def parse_template(template: str) -> list[str | int]:
    """Texts and sizes of holes in their order: `<?16>` is a hole of 16 tokens, and `<??` stands for `<?`.

    RequestError for any other `<?`, a hole of no tokens, and a template without a hole.
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
        parts += [literal, int(found[2])] if literal else [int(found[2])]
        literal = ""
    literal += template[end:]
    parts += [literal] if literal else []
    if not any(isinstance(part, int) for part in parts):
        raise RequestError("the template has no hole to fill; write one of 16 tokens as <?16>")
    return parts


def template_tokens(template: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of a template's texts, each tokenised alone, with FREE at every token of a hole.

    RequestError for a text that its tokens do not spell as it is written.
    """
    tokens: list[int] = []
    for part in parse_template(template):
        tokens += [FREE] * part if isinstance(part, int) else spelt(part, tokenizer, "the template's text")
    return tokens


def spelt(text: str, tokenizer: PreTrainedTokenizerBase, what: str) -> list[int]:
    """The tokens of a text; RequestError where they are not decoded as it is written."""
    try:
        tokens = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        said = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    except Exception as error:  # tokenizers raises plain Exceptions, for example on a character it lacks
        raise RequestError(f"{what} {text!r:.60} cannot be tokenised: {error}") from error
    if said != text:
        raise RequestError(f"{what} {text!r:.60} becomes {said!r:.60} in the model's tokens; write it otherwise")
    return tokens
