"""Regular expressions: their automata, the length of the texts that they spell out, and the place of a mistake."""

from __future__ import annotations

import re
from functools import lru_cache

import torch

from blockdiff.errors import RequestError
from blockdiff.sampling.constraints.byte_automaton import MOST_STATES, ByteAutomaton
from blockdiff.sampling.constraints.compile_child import END
from blockdiff.sampling.constraints.compile_limit import too_large
from blockdiff.sampling.constraints.outlines import call_outlines

MOST_CHARACTERS = 4096  # of one text that an expression spells out; states over tokens have the same limit
_PIECE = re.compile(
    r"(?P<escape>\\[pPx]\{[^}]*\}|\\.)|(?P<set>\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\])"
    r"|(?P<around>\(\?<?[=!])|(?P<group>\(\?(?:>|P=|\())|(?P<open>\()|(?P<close>\))|(?P<or>\|)"
    r"|\{(?P<least>\d+)(?:,(?P<most>\d*))?\}|(?P<sign>[*+?^$])|(?P<other>.)",
    re.DOTALL,
)
# Syntax that Python refuses or warns of
_RUST_ONLY = re.compile(r"\\[pPx]\{[^}]*\}|\\[pP][A-Z]|\\z|\[:\w+:\]|&&|--|~~")


@lru_cache(maxsize=32)
def regex_automaton(regex: str) -> ByteAutomaton:
    """Make the automaton of the texts that match a whole regular expression, in the syntax of Rust's regex crate.

    `^` at its beginning and `$` at its end are allowed and change nothing. Raises RequestError for text that is no
    regular expression, for look-around, for expressions that match nothing or are too large, and if outlines-core is
    not installed.
    """
    whole = without_ends(regex)
    if (written := characters_written(whole)) > MOST_CHARACTERS:
        raise too_large(written)
    answer, body = call_outlines(regex=whole, states=MOST_STATES)
    if "error" in answer:
        cause = mistake_in(regex) or _cause(answer["error"])
        raise RequestError(f"the regular expression {regex!r:.80} cannot be used: {cause}")
    S = answer["states"]
    if not body:
        raise too_large(S)
    next_SB = torch.full((S + 1, 256), S, dtype=torch.int32)
    next_SB[:S] = torch.frombuffer(bytearray(body), dtype=torch.int32, count=256 * S).view(S, 256)
    next_SB[next_SB < 0] = S
    is_final = torch.zeros(S + 1, dtype=torch.bool)
    is_final[:S] = torch.frombuffer(bytearray(body[-S:]), dtype=torch.bool)
    ended = torch.arange(S + 1)
    for byte in END.encode():
        ended = next_SB[ended, byte].long()
    return ByteAutomaton(next_SB, is_final[ended]).trimmed()


def without_ends(regex: str) -> str:
    """Remove `^` at the beginning and `$` at the end of an expression, which match the whole text anyway."""
    whole = regex.removeprefix("^")
    backslashes = len(whole) - len(whole.removesuffix("$").rstrip("\\")) - 1
    return whole[:-1] if whole.endswith("$") and backslashes % 2 == 0 else whole


def characters_written(regex: str) -> int:
    """Count the characters of the longest text that an expression spells out, with `*` and `+` as one repetition."""
    # for each open group the lengths of its longest alternative so far, of this one, and of its last, repeatable part
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


def mistake_in(regex: str) -> str | None:
    """Return a description of the mistake in a refused expression, with its position; None if it is not found."""
    try:
        re.compile(_RUST_ONLY.sub(lambda match: "." * len(match[0]), regex))
    except re.error as error:
        position = error.pos or 0
        return f"{error.msg} at character {position}{_there(regex, position)}"
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


def _there(regex: str, position: int) -> str:
    return f" ({regex[position : position + 12]!r})" if position < len(regex) else " (its end)"


def _cause(message: str) -> str:
    """Return the cause of a refusal from outlines-core's message."""
    if "anchored universal start state" in message:
        return "it looks around at its beginning; `^` and `$` can only stand at its ends"
    if "vocabulary provided is incompatible" in message:
        return "a part of it matches nothing"
    if "error building NFA" in message:
        return "it is not valid, or has look-around or back references, which automata cannot follow"
    return message[:200]
