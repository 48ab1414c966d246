"""The strings of a JSON schema, with its patterns, formats and lengths, as they are written between quotes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce

from blockdiff.sampling.constraints.byte_automaton import ByteAutomaton
from blockdiff.sampling.constraints.byte_nfa import EVERY, ByteNfa, Ranges
from blockdiff.sampling.constraints.ecma import expression_automaton, without

# Dates of the years 0001 to 9999, with 29 February only in leap years
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = "(?:0[1-9]|1[0-9]|2[0-8])"
_LONG, _SHORT = "(?:0[13578]|1[02])", "(?:0[469]|11)"  # months of 31 and of 30 days
_DATE = f"(?:{_YEAR}-(?:(?:0[1-9]|1[0-2])-{_DAY}|(?:{_LONG}|{_SHORT})-(?:29|30)|{_LONG}-31)|{_LEAP_YEAR}-02-29)"
_HOUR, _MINUTE = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]"
_TIME = rf"{_HOUR}:{_MINUTE}:{_MINUTE}(?:\.[0-9]+)?(?:Z|[+-]{_HOUR}:{_MINUTE})"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_SHORT_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,29}[A-Za-z0-9])?"
_OCTET = "(?:[0-9]|[1-9][0-9]|1[0-9]{2}|2[0-4][0-9]|25[0-5])"
_HEX = "[0-9a-fA-F]{1,4}"
_IPV6 = ["::", f"(?:{_HEX}:){{7}}{_HEX}", f"(?:{_HEX}:){{1,7}}:", f"::(?:{_HEX}:){{0,6}}{_HEX}"]
_IPV6 += [f"(?:{_HEX}:){{{count}}}(?::{_HEX}){{1,{7 - count}}}" for count in range(1, 7)]
_SIGN = "(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"  # of a path
_AFTER_HOST = rf"(?:/{_SIGN}*)*(?:\?(?:{_SIGN}|[/?])*)?(?:#(?:{_SIGN}|[/?])*)?"
_URI = rf"[A-Za-z][A-Za-z0-9+.-]*://{_LABEL}(?:\.{_LABEL})*(?::[0-9]{{1,4}})?{_AFTER_HOST}"
_N = "[0-9]{1,9}"
_DAYS = f"(?:{_N}D|{_N}M(?:{_N}D)?|{_N}Y(?:{_N}M(?:{_N}D)?)?)"
_HOURS = f"T(?:{_N}S|{_N}M(?:{_N}S)?|{_N}H(?:{_N}M(?:{_N}S)?)?)"
_EMAIL = rf"{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})+"
_HOST = rf"{_SHORT_LABEL}(?:\.{_SHORT_LABEL}){{0,3}}"
_POINTER = r"(?:/(?:[^/~]|~[01])*)*"
_BASE64 = "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"
FORMATS = {  # other formats are annotations and allow any string
    "date": _DATE,  # RFC 3339, as are the next three; no leap seconds
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_N}W|{_DAYS}(?:{_HOURS})?|{_HOURS})",
    "email": _EMAIL,  # lengths are not counted
    "idn-email": _EMAIL,
    "hostname": _HOST,  # at most four labels, of at most 31 characters
    "idn-hostname": _HOST,
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
    "ipv6": "|".join(_IPV6),  # without an address of version 4 at its end
    "uri": _URI,  # with a host, which is a name
    "iri": _URI,
    "uri-reference": rf"(?:{_URI}|{_AFTER_HOST})",
    "iri-reference": rf"(?:{_URI}|{_AFTER_HOST})",
    "uri-template": _URI,
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
    "regex": "[A-Za-z0-9 _-]*",  # only expressions without special characters
    "byte": _BASE64,  # the names in OpenAPI and in pydantic
    "base64": _BASE64,
}
ASCII: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7E))
OTHERS = without(EVERY, ((0x00, 0x9F),))
BLOCK = 8


def any_character(nfa: ByteNfa, start: int, end: int | None = None) -> int:
    """Add one character of a JSON string, or an escape of two characters; return the state after it.

    end: the state that this leads to (None: a new one).
    """
    after = nfa.character(start, (*ASCII, *OTHERS))
    _escape(nfa, start, after)
    return after if end is None else nfa.join(after, end)


def _escape(nfa: ByteNfa, start: int, end: int) -> None:
    behind = nfa.text(start, "\\")
    nfa.edges[behind] += [(ord(sign), ord(sign), end) for sign in '"\\/bfnrt']


def any_string(nfa: ByteNfa, start: int) -> int:
    """Add any string, without its quotes."""
    loop = nfa.join(start, nfa.state())
    any_character(nfa, loop, loop)
    return nfa.join(loop, nfa.state())


@lru_cache(maxsize=32)
def strings(
    patterns: Sequence[str],
    formats: Sequence[str],
    least: int,
    most: int | None,
    in_blocks: bool = False,
    is_open: bool = False,
    is_anywhere: bool = False,
) -> ByteAutomaton:
    """Make the automaton of strings, without quotes, that match all patterns and formats and have an allowed length.

    least, most: the number of characters (None: no maximum). in_blocks: without patterns and formats, a character
    outside ASCII or an escape may count as up to `BLOCK` characters, which needs fewer states. is_open: anything may
    follow a pattern without `$`; is_anywhere: accept every string in which the patterns match in some validator. Raises
    RequestError, which names the part of a pattern that an automaton cannot follow, and NoText if there is no string.
    """
    parts = [expression_automaton(pattern, is_open, is_anywhere, is_anywhere) for pattern in patterns]
    parts += [expression_automaton(FORMATS[name]) for name in formats if name in FORMATS]
    if least or most is not None or not parts:
        parts.append(_of_length(least, most, in_blocks and not patterns and not formats))
    return reduce(ByteAutomaton.both, parts)


def _of_length(least: int, most: int | None, in_blocks: bool) -> ByteAutomaton:
    """Make the automaton of strings with `least` to `most` characters; in_blocks: as in `strings`."""
    nfa = ByteNfa()
    state, end = 0, nfa.state()
    for _ in range(least):
        state = any_character(nfa, state)
    nfa.join(state, end)
    if most is None:
        any_character(nfa, state, state)
    elif not in_blocks:
        for _ in range(most - least):
            state = any_character(nfa, state)
            nfa.join(state, end)
    else:
        for number in range(most - least):
            if number % BLOCK == 0:
                if most - least - number >= BLOCK:
                    other, following = nfa.state(), nfa.state()
                    nfa.join(nfa.character(other, OTHERS), following)
                    _escape(nfa, other, following)
                else:
                    other = following = nfa.state()
            nfa.join(state, other)
            state = nfa.join(nfa.character(state, ASCII), following if number % BLOCK == BLOCK - 1 else nfa.state())
            nfa.join(state, end)
    return nfa.automaton(end)
