"""Texts that are told apart by their beginnings, for arrays of different items."""

from __future__ import annotations

from blockdiff.errors import NoText
from blockdiff.sampling.constraints.byte_automaton import ByteAutomaton
from blockdiff.sampling.constraints.ecma import expression_automaton

LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_WHOLE = [*map(str, range(100)), *(f"{digit}[0-9]{{2}}" for digit in range(1, 10))]
_WHOLE += [f"{digit}[0-9]{{3,}}" for digit in range(1, 10)]


def distinct_texts(texts: ByteAutomaton, beginnings: int) -> list[ByteAutomaton]:
    """Parts of a language in a fixed order, such that texts of different parts are different values.

    beginnings: into so many sets ASCII's letters and digits are divided, one of which has the first character of a
    string; those of one more part have another one or none. 0: the texts are numbers, which differ in what is before
    the point: up to 99 in all of it, above in its first digit, as negative ones do.
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
