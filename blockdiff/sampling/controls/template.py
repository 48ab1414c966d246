"""Templates: text that stands as it is written, and holes that the model fills with text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockdiff.errors import RequestError
from blockdiff.sampling.controls.restriction import FREE, Restriction, require_no_thinking, tokenizer_for

if TYPE_CHECKING:
    from blockdiff.sampling.request import Request
    from blockdiff.sampling.settings import SamplingSettings

_HOLE = re.compile(r"<\?(?:(\?)|(?:(\d{1,9})|([^\W\d]\w*)(?::(\d{1,9}))?)>)?")
MOST_TOKENS = 1 << 20  # of a hole


@dataclass(frozen=True)
class Hole:
    """A hole of so many tokens; None where only its name is given, for a read that has choices for it."""

    tokens: int | None
    name: str | None = None


@dataclass(frozen=True)
class Template:
    """The form of a response: `<?16>` is a hole of 16 tokens."""

    text: str

    @classmethod
    def of(cls, request: Request) -> Template | None:
        """The `template` of a request."""
        if request.template is None:
            return None
        if not isinstance(request.template, str):
            raise RequestError(f"template must be text, got {request.template!r:.80}")
        require_no_thinking(request, "template")
        return cls(request.template)

    def __str__(self) -> str:
        return f"template {self.text!r}"

    def restriction(self, request: Request, settings: SamplingSettings, canvases: int) -> Restriction:
        """Its texts, each tokenised alone, as pins over as many canvases as it needs, with eos after its end."""
        tokenizer, eos_ids = tokenizer_for("a template", settings), settings.generation.eos_ids
        pins: list[int] = []
        for part in parse_template(self.text):
            if isinstance(part, str):
                pins += request.spelt(part, tokenizer, "the template's text")
            elif part.tokens is None:
                raise RequestError(f"the template's hole <?{part.name}> has no size; one of 16 tokens is <?16>")
            else:
                pins += [FREE] * part.tokens
        if any(token in eos_ids for token in pins):
            raise RequestError("the template has the token that ends a response; leave it out, it comes by itself")
        if settings.diffusion.mask_id in pins:
            raise RequestError("the template has the mask token of the model's noise; write a hole instead")
        missing = -len(pins) % settings.canvas_length
        if missing and not eos_ids:
            raise RequestError(
                f"the template has {len(pins)} tokens, and no eos is known that could follow them; "
                f"make it fill canvases of {settings.canvas_length}"
            )
        return Restriction(pins=pins + ([eos_ids[0]] * missing if missing else []))


def parse_template(template: str) -> list[str | Hole]:
    """Texts and holes in their order: `<?16>` is a hole of 16 tokens, `<?name:16>` one with a name, `<?name>` one whose
    size its choices say, and `<??` stands for `<?`.

    RequestError for any other `<?`, a hole of no tokens or more than a million, and a template without a hole.
    """
    parts: list[str | Hole] = []
    literal, end = "", 0
    for found in _HOLE.finditer(template):
        literal += template[end : found.start()]
        end = found.end()
        if found[1]:
            literal += "<?"
            continue
        size = found[2] or found[4]
        if not (size or found[3]) or (size and not int(size)):
            around = template[found.start() : found.start() + 12]
            raise RequestError(
                f"the template has {around!r} at character {found.start()}; a hole of 16 tokens is <?16>, and <? "
                "itself is written <??"
            )
        if size and int(size) > MOST_TOKENS:
            raise RequestError(f"the template has a hole of {int(size):,} tokens; {MOST_TOKENS:,} are the most")
        parts += [literal] if literal else []
        parts.append(Hole(int(size) if size else None, found[3]))
        literal = ""
    literal += template[end:]
    parts += [literal] if literal else []
    if not any(isinstance(part, Hole) for part in parts):
        raise RequestError("the template has no hole to fill; write one of 16 tokens as <?16>")
    return parts
