"""The text of a regular expression itself: how long the texts are that it spells out, and where it is wrong."""

from __future__ import annotations

import re

_PIECE = re.compile(
    r"(?P<escape>\\[pPx]\{[^}]*\}|\\.)|(?P<set>\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\])"
    r"|(?P<around>\(\?<?[=!])|(?P<group>\(\?(?:>|P=|\())|(?P<open>\()|(?P<close>\))|(?P<or>\|)"
    r"|\{(?P<least>\d+)(?:,(?P<most>\d*))?\}|(?P<sign>[*+?^$])|(?P<other>.)",
    re.DOTALL,
)
# Python would take these for a mistake, or warn of them
_RUST_ONLY = re.compile(r"\\[pPx]\{[^}]*\}|\\[pP][A-Z]|\\z|\[:\w+:\]|&&|--|~~")


def characters_written(regex: str) -> int:
    """The most characters that one way through an expression spells out, repetitions by their count."""
    # of each open group: the longest alternative so far, this one, and its last part, which a repetition multiplies
    groups = [[0, 0, 0]]
    for piece in _PIECE.finditer(regex):
        group = groups[-1]
        if piece["open"] or piece["around"] or piece["group"]:
            groups.append([0, 0, 0])
        elif piece["close"]:
            if len(groups) > 1:
                groups.pop()
                inner = max(group[0], group[1])
                groups[-1][1] += inner
                groups[-1][2] = inner
        elif piece["or"]:
            group[:] = [max(group[0], group[1]), 0, 0]
        elif piece["least"]:
            times = max(int(piece["most"] or 0), int(piece["least"]))
            added = group[2] * times - group[2]
            group[1] += added
            group[2] += added
        elif not piece["sign"]:
            group[1] += 1
            group[2] = 1
    return max(max(group[0], group[1]) for group in groups)


def trouble(regex: str) -> str | None:
    """The mistake in an expression that was refused, and its place; None where the text does not tell."""
    try:
        re.compile(_RUST_ONLY.sub(lambda found: "." * len(found[0]), regex))
    except re.error as error:
        at = error.pos or 0
        return f"{error.msg} at character {at}{_there(regex, at)}"
    except (OverflowError, RecursionError):
        return None
    for piece in _PIECE.finditer(regex):
        escape = piece["escape"] or ""
        if piece["around"]:
            name = "look-around"
        elif piece["group"] or escape[1:] in tuple("123456789"):
            name = "a back reference or a group that depends on what was matched"
        elif escape in ("\\b", "\\B"):
            name = "a word boundary"
        elif escape[:2] in ("\\p", "\\P", "\\x"):
            name = "a character class or code that may be unknown"
        elif piece["other"] == "{":
            name = "a repetition that is not closed"
        else:
            continue
        return f"it has {name} at character {piece.start()}{_there(regex, piece.start())}"
    return None


def _there(regex: str, at: int) -> str:
    return f" ({regex[at : at + 12]!r})" if at < len(regex) else " (its end)"
