"""Templates: fixed text, and holes that the model fills with text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from blockdiff.errors import RequestError

_HOLE = re.compile(r"<\?(?:(\?)|(?:(\d{1,9})|([^\W\d]\w*)(?::(\d{1,9}))?)>)?")
MOST_TOKENS = 1 << 20  # of a hole


@dataclass(frozen=True)
class Hole:
    """A hole of `tokens` tokens; None if it has only a name, and a read provides its choices."""

    tokens: int | None
    name: str | None = None


def parse_template(template: str) -> list[str | Hole]:
    """Split a template into texts and holes, in order.

    `<?16>` is a hole of 16 tokens, `<?name:16>` one with a name, `<?name>` one whose size its choices determine, and
    `<??` is the text `<?`. Raises RequestError for any other `<?`, a hole of no tokens or more than a million, and a
    template without a hole.
    """
    parts: list[str | Hole] = []
    literal, end = "", 0
    for match in _HOLE.finditer(template):
        literal += template[end : match.start()]
        end = match.end()
        if match[1]:
            literal += "<?"
            continue
        size = match[2] or match[4]
        if not (size or match[3]) or (size and not int(size)):
            around = template[match.start() : match.start() + 12]
            raise RequestError(
                f"the template has {around!r} at character {match.start()}; a hole of 16 tokens is <?16>, and <? "
                "itself is written <??"
            )
        if size and int(size) > MOST_TOKENS:
            raise RequestError(f"the template has a hole of {int(size):,} tokens; {MOST_TOKENS:,} are the most")
        parts += [literal] if literal else []
        parts.append(Hole(int(size) if size else None, match[3]))
        literal = ""
    literal += template[end:]
    parts += [literal] if literal else []
    if not any(isinstance(part, Hole) for part in parts):
        raise RequestError("the template has no hole to fill; write one of 16 tokens as <?16>")
    return parts
