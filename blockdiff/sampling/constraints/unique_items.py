"""Parts of a language that differ in the beginnings of their texts, for arrays of different items."""

from __future__ import annotations

from blockdiff.errors import NoText
from blockdiff.sampling.constraints.byte_automaton import ByteAutomaton
from blockdiff.sampling.constraints.ecma import expression_automaton

LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_WHOLE = [*map(str, range(100)), *(f"{digit}[0-9]{{2}}" for digit in range(1, 10))]
_WHOLE += [f"{digit}[0-9]{{3,}}" for digit in range(1, 10)]


def distinct_texts(texts: ByteAutomaton, beginnings: int) -> list[ByteAutomaton]:
    """Return parts of a language, in a fixed order, such that texts of different parts are different values.

    beginnings: the number of sets into which ASCII letters and digits are divided; the first character of a string
    decides its part. All other strings, the empty one included, are one more part. With 0 the texts are numbers,
    divided by the digits before the point: each value up to 99 is a part; larger numbers are divided by their first
    digit and by whether they have three digits or more; negative ones by their first digit. Empty parts are left out.
    """
    if beginnings:
        size = -(-len(LETTERS) // beginnings)
        parts = [f"[{LETTERS[index : index + size]}].*" for index in range(0, len(LETTERS), size)]
        parts.append(f"(?:[^{LETTERS}].*)?")
    else:
        parts = [f"-{digit}[0-9]*" for digit in range(9, 0, -1)] + _WHOLE
        parts = [rf"(?:{part})(?:\.[0-9]+)?" for part in parts]
    automata = []
    for part in parts:
        try:
            automata.append(texts.both(expression_automaton(part)))
        except NoText:
            continue
    return automata
