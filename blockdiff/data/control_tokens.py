"""`Guard`, with which only the chat template writes control tokens: a text that spells `<turn|>` stays text.

A tokenizer finds the strings of its added tokens anywhere in a text, whoever wrote them. The guard works in two steps.
Before a chat template renders contents, one character of each spelt control token is replaced by a stand-in, so that
such strings in the rendered text are the template's own. Afterwards the characters are restored, and the text is cut
inside each string with one of them. The pieces are encoded separately, so no string is found across a cut. A text
without such strings is not cut.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from blockdiff.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ControlTokens = Literal["text", "allow"]
PRIVATE = range(0xE000, 0xF900)  # private-use characters, from which stand-ins are chosen
WORD_STARTS = ("▁", "Ġ")
NO_UNKNOWN = "Missing [UNK] token"  # the message of tokenizers for a character without a token
REMEDY = "change the text, or allow control tokens in it"


@dataclass(frozen=True)
class Guard:
    """The control tokens that texts must not become.

    ids: text -> id; empty = no guard.
    is_exact: the tokenizer finds only these texts, and not others that a normaliser makes equal to them.
    """

    ids: Mapping[str, int]
    is_exact: bool = True

    def hide(self, value: Any) -> tuple[Any, dict[str, str]]:
        """Replace characters in the texts of a JSON value so that they spell no control token, alone or joined.

        Returns the value and the character of each stand-in. A stand-in replaces one character, so lengths stay. A
        value without spelt control tokens is returned itself.
        """
        if not self.ids:
            return value, {}
        texts = list(_texts(value))
        indices = {text: to_hide for text in texts if (to_hide := self._to_hide(text))}
        if not indices:
            return value, {}
        used = set("".join(texts))
        free = (chr(code) for code in PRIVATE if chr(code) not in used)
        characters = {text[index] for text, to_hide in indices.items() for index in to_hide}
        hidden = {character: next(free) for character in sorted(characters)}

        def changed(text: str) -> str:
            characters = list(text)
            for index in indices.get(text, ()):
                characters[index] = hidden[text[index]]
            return "".join(characters)

        return _mapped(value, changed), {stand_in: character for character, stand_in in hidden.items()}

    def show(self, text: str, hidden: Mapping[str, str]) -> tuple[str, tuple[int, ...]]:
        """Restore the characters of a rendered text. Returns it and the indices at which to cut it."""
        if not hidden:
            return text, ()
        marks = [match.start() for match in re.finditer(f"[{''.join(hidden)}]", text)]
        shown = text.translate({ord(stand_in): character for stand_in, character in hidden.items()})
        cuts = []
        for match in self._at.finditer(shown):
            start, end = match.span(1)
            if bisect_left(marks, start) < bisect_left(marks, end):
                cuts.append(self._inside(start, end))
        return shown, tuple(cuts)

    def cuts(self, text: str) -> tuple[int, ...]:
        """Return the indices at which to cut a text that people wrote, so that it spells no control token."""
        if not self.ids or not self._spelt.search(text):
            return ()
        return tuple(self._inside(*match.span(1)) for match in self._at.finditer(text))

    def check(self, text: str, cuts: Sequence[int], ids: Sequence[int], firsts: Iterable[str]) -> None:
        """Raise DataError if the ids of a cut text have control tokens that its pieces do not spell.

        firsts: the first tokens of all pieces after the first one. A tokenizer that puts a space before every text
        would insert one at each cut, which is an error, too.
        """
        if not self.ids or (self.is_exact and not cuts):
            return
        spelt = sum(len(self._spelt.findall(piece)) for piece in cut(text, cuts))
        control = set(self.ids.values())
        if sum(token in control for token in ids) != spelt or any(first.startswith(WORD_STARTS) for first in firsts):
            raise DataError(f"it spells a control token in a way that this tokenizer cannot write as text; {REMEDY}")

    def spelt(self, text: str) -> str | None:
        """The first control token that a text spells; None if there is none."""
        match = self._spelt.search(text) if self.ids else None
        return match.group() if match else None

    @cached_property
    def _spelt(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, sorted(self.ids, key=len, reverse=True))))

    @cached_property
    def _at(self) -> re.Pattern[str]:
        return re.compile(f"(?=({self._spelt.pattern}))")

    @cached_property
    def _begins(self) -> set[str]:
        return {token[:end] for token in self.ids for end in range(1, len(token))}

    @cached_property
    def _ends(self) -> set[str]:
        return {token[begin:] for token in self.ids for begin in range(1, len(token))}

    @cached_property
    def _first(self) -> set[str]:
        return {token[0] for token in self.ids}

    @cached_property
    def _last(self) -> set[str]:
        return {token[-1] for token in self.ids}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.ids))

    def _inside(self, start: int, end: int) -> int:
        if end - start < 2:
            raise DataError(f"it has a control token of one character, which cannot be written as text; {REMEDY}")
        return start + 1

    def _to_hide(self, text: str) -> set[int]:
        """The indices of the characters to hide: one of each control token, and of each part of one at an edge.

        A template may strip two texts and join them, and so make a token of two parts.
        """
        indices = {match.start() for match in self._at.finditer(text)} if self._spelt.search(text) else set()
        end, begin = len(text.rstrip()), len(text) - len(text.lstrip())
        last, first = range(max(begin, end - self._longest), end), range(begin, min(end, begin + self._longest))
        if not self._first.isdisjoint(text[last.start : last.stop]):
            indices |= {index for index in last if text[index:end] in self._begins}
        if not self._last.isdisjoint(text[first.start : first.stop]):
            indices |= {index for index in first if text[begin : index + 1] in self._ends}
        return indices


OPEN = Guard({})  # guards against nothing


def make_guard(
    tokenizer: PreTrainedTokenizerBase, template: str | None, control_tokens: ControlTokens = "text"
) -> Guard:
    """The guard against a tokenizer's special tokens, and against added tokens that the chat template writes."""
    if control_tokens == "allow":
        return OPEN
    unknown = tokenizer.unk_token_id
    tokens = {
        str(token.content): (id, bool(token.normalized))
        for id, token in tokenizer.added_tokens_decoder.items()
        if str(token.content).strip() and id != unknown and (token.special or str(token.content) in (template or ""))
    }
    is_exact = not any(normalized for _, normalized in tokens.values())
    return Guard({text: id for text, (id, _) in tokens.items()}, is_exact)


def why_not_encoded(error: Exception, text: str, tokenizer: Any) -> str:
    """Explain the tokenizer's error to the author of a text."""
    if NO_UNKNOWN not in str(error):
        return str(error)
    for character in dict.fromkeys(text):
        try:
            tokenizer(character, add_special_tokens=False)
        except Exception:  # tokenizers raises nothing narrower
            return f"the vocabulary has no token for {character!r}"
    return "the vocabulary has no token for one of its characters"


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    """The pieces of a text between its cuts."""
    return [text[start:end] for start, end in pairwise((0, *cuts, len(text)))] if cuts else [text]


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts(key)
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _mapped(value: Any, changed: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return changed(value)
    if isinstance(value, Mapping):
        return {_mapped(key, changed): _mapped(each, changed) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(each, changed) for each in value]
    return value
