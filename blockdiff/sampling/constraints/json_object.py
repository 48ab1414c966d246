"""The automaton of any JSON object up to a depth, made state by state: an expression would repeat every level."""

from __future__ import annotations

from functools import lru_cache

import torch

from blockdiff.sampling.constraints.byte_automaton import ByteAutomaton

ANY_OBJECT = {"type": "object"}  # the schema of all JSON objects
DEPTH = 4  # the most levels of objects and arrays, the outermost object included
State = tuple[str, str]  # the open containers ("o" or "a" each), and the place in the innermost one
HEX = b"0123456789abcdefABCDEF"
DIGITS = b"0123456789"
# The first byte of a character, the range of its second byte, and the number of bytes after those (RFC 3629).
FIRST_BYTES = (
    *((byte, (0x80, 0xBF), 0) for byte in range(0xC2, 0xE0)),
    (0xE0, (0xA0, 0xBF), 1),
    *((byte, (0x80, 0xBF), 1) for byte in (*range(0xE1, 0xED), 0xEE, 0xEF)),
    (0xED, (0x80, 0x9F), 1),
    (0xF0, (0x90, 0xBF), 2),
    *((byte, (0x80, 0xBF), 2) for byte in range(0xF1, 0xF4)),
    (0xF4, (0x80, 0x8F), 2),
)
CHARACTERS = {byte: (low, high, more) for byte, (low, high), more in FIRST_BYTES}
NUMBERS = {  # place: (bytes, the next place) pairs
    "-": ((b"0", "zero"), (b"123456789", "int")),
    "zero": ((b".", "."), (b"eE", "e")),
    "int": ((DIGITS, "int"), (b".", "."), (b"eE", "e")),
    ".": ((DIGITS, "fraction"),),
    "fraction": ((DIGITS, "fraction"), (b"eE", "e")),
    "e": ((b"+-", "sign"), (DIGITS, "exponent")),
    "sign": ((DIGITS, "exponent"),),
    "exponent": ((DIGITS, "exponent"),),
}
WHOLE_NUMBERS = ("zero", "int", "fraction", "exponent")


@lru_cache(maxsize=1)
def any_object() -> ByteAutomaton:
    """Make the automaton of JSON objects with at most `DEPTH` levels of objects and arrays.

    Between their parts there is nothing, one space or one line break.
    """
    first: State = ("", "start")
    places, order, rows = {first: 0}, [first], []
    for state in order:  # which grows
        row = []
        for byte in range(256):
            following = _after(*state, byte)
            if following is not None and following not in places:
                places[following] = len(order)
                order.append(following)
            row.append(-1 if following is None else places[following])
        rows.append(row)
    next_SB = torch.tensor([*rows, [-1] * 256], dtype=torch.int32)
    next_SB[next_SB < 0] = len(order)
    return ByteAutomaton(next_SB, torch.tensor([*(state == ("", "end") for state in order), False]))


def _after(stack: str, position: str, byte: int) -> State | None:
    """Return the state after a byte; None if the byte is not allowed."""
    kind, _, rest = position.partition(":")
    if kind in ("key", "text"):
        return _in_string(stack, kind, rest, byte)
    if kind == "word":
        if byte != ord(rest[0]):
            return None
        return (stack, "comma") if len(rest) == 1 else (stack, f"word:{rest[1:]}")
    for bytes_, following in NUMBERS.get(position, ()):
        if byte in bytes_:
            return stack, following
    if position in WHOLE_NUMBERS:
        position = "comma"
    if byte in b" \n" and not position.endswith("_") and position not in ("start", "end", *NUMBERS):
        return stack, f"{position}_"
    return _between(stack, position.rstrip("_"), byte)


def _between(stack: str, position: str, byte: int) -> State | None:
    """Return the state after a byte that begins or ends a part; None if the byte is not allowed."""
    if position == "start":
        return ("o", "first key") if byte == ord("{") else None
    if position in ("first key", "next key"):
        if byte == ord('"'):
            return stack, "key:"
        return _closed(stack) if position == "first key" and byte == ord("}") else None
    if position == "colon":
        return (stack, "value") if byte == ord(":") else None
    if position == "comma":
        if byte == ord(","):
            return stack, "next key" if stack[-1] == "o" else "value"
        return _closed(stack) if byte == ord("}" if stack[-1] == "o" else "]") else None
    if position in ("value", "first value"):
        if position == "first value" and byte == ord("]"):
            return _closed(stack)
        if byte in b"{[":
            opened = ("o", "first key") if byte == ord("{") else ("a", "first value")
            return (stack + opened[0], opened[1]) if len(stack) < DEPTH else None
        words = {word[0]: f"word:{word[1:]}" for word in ("true", "false", "null")}
        places = words | {'"': "text:", "-": "-", "0": "zero"} | dict.fromkeys("123456789", "int")
        return (stack, places[chr(byte)]) if chr(byte) in places else None
    return None


def _closed(stack: str) -> State:
    return (stack[:-1], "comma") if len(stack) > 1 else ("", "end")


def _in_string(stack: str, kind: str, rest: str, byte: int) -> State | None:
    """Return the state after a byte of a string; None if the byte is not allowed.

    rest: the bytes that an escape or a character still needs, as text.
    """
    if not rest:
        if byte == ord('"'):
            return stack, "colon" if kind == "key" else "comma"
        if byte == ord("\\"):
            return stack, f"{kind}:\\"
        if byte in CHARACTERS:
            low, high, more = CHARACTERS[byte]
            return stack, f"{kind}:{low}-{high}-{more}"
        return (stack, position) if 0x20 <= byte < 0x80 and (position := f"{kind}:") else None
    if rest == "\\":
        return (stack, f"{kind}:") if byte in b'"\\/bfnrt' else (stack, f"{kind}:hhhh") if byte == ord("u") else None
    if rest[0] == "h":
        return (stack, f"{kind}:{rest[1:]}") if byte in HEX else None
    low, high, more = map(int, rest.split("-"))
    if not low <= byte <= high:
        return None
    return stack, f"{kind}:128-191-{more - 1}" if more else f"{kind}:"
