"""The calls of tools in a response, in the Gemma 4 format: `<|tool_call>call:NAME{key:value,...}<tool_call|>`.

Strings stand between two `<|"|>` tokens. Only tokens count: a text that spells them calls nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blockdiff.sampling.xml_calls import EDGE, xml_called

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPENS, CLOSES, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
ENDS = ",:]}"  # of a value or key without quotes


class _NoCallError(ValueError):
    """The text between the tokens of a call is no call."""


@dataclass(frozen=True)
class _Quoted:
    text: str


def called(
    tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[list[dict[str, Any]] | None, list[int]]:
    """The calls in a response (None: there is none), in the form that messages have them, and the other tokens.

    What is no whole call stays among the other tokens. tools: declarations, which say the types of values where the
    format does not (that of MiniMax M3, `xml_calls.py`).
    """
    rest = list(tokens)
    if (edge := tokenizer.convert_tokens_to_ids(EDGE)) not in (None, tokenizer.unk_token_id):
        return xml_called(rest, int(edge), tokenizer, tools)
    marks = [tokenizer.convert_tokens_to_ids(mark) for mark in (OPENS, CLOSES, QUOTE)]
    if None in marks or tokenizer.unk_token_id in marks or marks[0] not in rest:
        return None, rest
    opens, closes, quote = marks
    calls: list[dict[str, Any]] = []
    at = 0
    while opens in rest[at:] and closes in rest[rest.index(opens, at) :]:
        start = rest.index(opens, at)
        end = rest.index(closes, start)
        try:
            calls.append(_call(_atoms(rest[start + 1 : end], quote, tokenizer)))
        except (_NoCallError, RecursionError):
            at = end + 1
        else:
            rest[start : end + 1] = []
            at = start
    return calls or None, rest


def begin(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> int:
    """The place of the first token with which a call begins; the number of tokens where there is none."""
    marks = {tokenizer.convert_tokens_to_ids(mark) for mark in (OPENS, EDGE)} - {None, tokenizer.unk_token_id}
    return next((place for place, token in enumerate(tokens) if token in marks), len(tokens))


def _atoms(tokens: Sequence[int], quote: int, tokenizer: PreTrainedTokenizerBase) -> list[str | _Quoted]:
    """The characters of a call from the last to the first, with each string as one of them."""
    atoms: list[str | _Quoted] = []
    is_quoted, start = False, 0
    for place, token in enumerate((*tokens, quote)):
        if token == quote:
            text = str(tokenizer.decode(list(tokens[start:place])))
            atoms += [_Quoted(text)] if is_quoted else text
            is_quoted, start = not is_quoted, place + 1
    if not is_quoted:  # the quote added at the end closed a string that the model left open
        raise _NoCallError
    return atoms[::-1]


def _call(atoms: list[str | _Quoted]) -> dict[str, Any]:
    head = _bare(atoms, "{")
    if not head.startswith("call:") or not head.removeprefix("call:").strip():
        raise _NoCallError
    arguments = _value(atoms)
    if any(atom != " " for atom in atoms):
        raise _NoCallError
    return {"type": "function", "function": {"name": head.removeprefix("call:").strip(), "arguments": arguments}}


def _value(atoms: list[str | _Quoted]) -> Any:
    """The value at the end of `atoms`, which is taken from them."""
    atom = atoms[-1] if atoms else _fail()
    if isinstance(atom, _Quoted):
        atoms.pop()
        return atom.text
    if atom in "{[":
        return _object(atoms) if atoms.pop() == "{" else _list(atoms)
    text = _bare(atoms, ENDS)
    try:
        return json.loads(text, parse_constant=_no_number)
    except ValueError:
        return text


def _no_number(text: str) -> Any:
    """NaN and Infinity are no JSON; they stay the text they are."""
    raise ValueError(text)


def _object(atoms: list[str | _Quoted]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    while not _taken(atoms, "}"):
        if found and not _taken(atoms, ","):
            raise _NoCallError
        key = atoms.pop() if atoms and isinstance(atoms[-1], _Quoted) else _Quoted(_bare(atoms, ENDS))
        if not _taken(atoms, ":"):
            raise _NoCallError
        assert isinstance(key, _Quoted)
        found[key.text] = _value(atoms)
    return found


def _list(atoms: list[str | _Quoted]) -> list[Any]:
    found: list[Any] = []
    while not _taken(atoms, "]"):
        if found and not _taken(atoms, ","):
            raise _NoCallError
        found.append(_value(atoms))
    return found


def _bare(atoms: list[str | _Quoted], ends: str) -> str:
    """The characters before the next one of `ends`."""
    text = ""
    while atoms and isinstance(atoms[-1], str) and atoms[-1] not in ends:
        text += str(atoms.pop())
    return text.strip() or _fail()


def _taken(atoms: list[str | _Quoted], character: str) -> bool:
    """True where a character comes next; it is taken then."""
    if not atoms:
        raise _NoCallError
    return atoms[-1] == character and bool(atoms.pop())


def _fail() -> Any:
    raise _NoCallError
