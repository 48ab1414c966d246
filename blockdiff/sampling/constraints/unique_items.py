"""Texts that are told apart by their beginnings, for arrays of different items."""

from __future__ import annotations

from blockdiff.errors import NoText
from blockdiff.sampling.constraints.byte_automaton import ByteAutomaton
from blockdiff.sampling.constraints.ecma import expression_automaton

LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_WHOLE = [*map(str, range(100)), *(f"{digit}[0-9]{{2}}" for digit in range(1, 10))]
_WHOLE += [f"{digit}[0-9]{{3,}}" for digit in range(1, 10)]


def distinct_texts(texts: ByteAutomaton, beginnings: int) -> list[ByteAutomaton]:
    """Divide a language into parts, in a fixed order, such that texts of different parts are different values.

    beginnings: the number of sets of ASCII letters and digits, by which strings are divided according to their first
    character; strings that begin otherwise, or are empty, are one more part. 0: the texts are numbers, divided by their
    digits before the point: all of them up to 99, above only the first digit, and the first digit for negative ones.
    """
    if beginnings:
        size = -(-len(LETTERS) // beginnings)
        parts = [f"[{LETTERS[at : at + size]}].*" for at in range(0, len(LETTERS), size)]
        parts.append(f"(?:[^{LETTERS}].*)?")
    else:
        parts = [f"-{digit}[0-9]*" for digit in range(9, 0, -1)] + _WHOLE
        parts = [rf"(?:{part})(?:\.[0-9]+)?" for part in parts]
    found = []
    for part in parts:
        try:
            found.append(texts.both(expression_automaton(part)))
        except NoText:
            continue
    return found
