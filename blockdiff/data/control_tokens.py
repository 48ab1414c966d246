"""Control tokens come from the chat template alone: a text that spells one, such as `<turn|>`, stays text.

A tokenizer finds the strings of its added tokens anywhere in a text, whoever wrote them. Two steps keep them apart.
Before a chat template sees the contents, one character of each string that spells a control token is hidden behind a
stand-in, so what the rendered text has of such strings is the template's own. Then the characters come back, and the
text is cut inside each string that has one of them; its pieces are encoded one by one, so no string is found over a
cut. A text without such strings is not cut, and its tokens are those of the tokenizer.
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
PRIVATE = range(0xE000, 0xF900)  # characters that stand for nothing, of which stand-ins are taken
WORD_STARTS = ("▁", "Ġ")
NO_UNKNOWN = "Missing [UNK] token"  # what tokenizers says where a character has no token
REMEDY = "change the text, or allow control tokens in it"


@dataclass(frozen=True)
class Guard:
    """The control tokens of a tokenizer, as text -> id; none of them are guarded against where it is empty.

    `is_exact` says that only these very texts are found, and not others that a normaliser makes equal to them.
    """

    ids: Mapping[str, int]
    is_exact: bool = True

    def hide(self, value: Any) -> tuple[Any, dict[str, str]]:
        """A JSON value whose texts spell no control token, alone or joined; and the characters behind the stand-ins.

        Every stand-in takes the place of one character, so lengths stay. Without such a text it is `value` itself.
        """
        if not self.ids:
            return value, {}
        texts = list(_texts(value))
        places = {text: found for text in texts if (found := self._places(text))}
        if not places:
            return value, {}
        used = set("".join(texts))
        free = (chr(code) for code in PRIVATE if chr(code) not in used)
        hidden = {character: next(free) for character in sorted({t[at] for t, found in places.items() for at in found})}

        def changed(text: str) -> str:
            characters = list(text)
            for at in places.get(text, ()):
                characters[at] = hidden[text[at]]
            return "".join(characters)

        return _mapped(value, changed), {stand_in: character for character, stand_in in hidden.items()}

    def show(self, text: str, hidden: Mapping[str, str]) -> tuple[str, tuple[int, ...]]:
        """A rendered text with the characters behind its stand-ins, and where it is to be cut."""
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
        """The places at which a text that people wrote is to be cut."""
        if not self.ids or not self._spelt.search(text):
            return ()
        return tuple(self._inside(*match.span(1)) for match in self._at.finditer(text))

    def check(self, text: str, cuts: Sequence[int], ids: Sequence[int], firsts: Iterable[str]) -> None:
        """Raise DataError where the ids of a cut text have control tokens that its pieces do not spell.

        `firsts` are the tokens with which all pieces but the first begin, as the tokenizer writes them: a tokenizer
        that puts a space before every text would put one into the cut.
        """
        if not self.ids or (self.is_exact and not cuts):
            return
        own = sum(len(self._spelt.findall(piece)) for piece in cut(text, cuts))
        control = set(self.ids.values())
        if sum(token in control for token in ids) != own or any(first.startswith(WORD_STARTS) for first in firsts):
            raise DataError(f"it spells a control token in a way that this tokenizer cannot write as text; {REMEDY}")

    def spelt(self, text: str) -> str | None:
        """The first control token that a text spells."""
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

    def _places(self, text: str) -> set[int]:
        """The characters to hide in a text: one of each control token, and of each part of one at an edge.

        A template may put two texts side by side, after it has stripped them, and so make a token of two parts.
        """
        found = {match.start() for match in self._at.finditer(text)} if self._spelt.search(text) else set()
        end, begin = len(text.rstrip()), len(text) - len(text.lstrip())
        last, first = range(max(begin, end - self._longest), end), range(begin, min(end, begin + self._longest))
        if not self._first.isdisjoint(text[last.start : last.stop]):
            found |= {at for at in last if text[at:end] in self._begins}
        if not self._last.isdisjoint(text[first.start : first.stop]):
            found |= {at for at in first if text[begin : at + 1] in self._ends}
        return found


OPEN = Guard({})  # lets everything through


def make_guard(
    tokenizer: PreTrainedTokenizerBase, template: str | None, control_tokens: ControlTokens = "text"
) -> Guard:
    """The guard for a tokenizer: against its special tokens, and against added ones that the chat template writes."""
    if control_tokens == "allow":
        return OPEN
    unknown = tokenizer.unk_token_id
    found = {
        str(token.content): (id, bool(token.normalized))
        for id, token in tokenizer.added_tokens_decoder.items()
        if str(token.content).strip() and id != unknown and (token.special or str(token.content) in (template or ""))
    }
    is_exact = not any(normalized for _, normalized in found.values())
    return Guard({text: id for text, (id, _) in found.items()}, is_exact)


def why_not_encoded(error: Exception, text: str, tokenizer: Any) -> str:
    """The reason for which a tokenizer raised at a text, in words for the person who wrote the text."""
    if NO_UNKNOWN not in str(error):
        return str(error)
    for character in dict.fromkeys(text):
        try:
            tokenizer(character, add_special_tokens=False)
        except Exception:  # tokenizers raises nothing narrower
            return f"no token stands for {character!r}"
    return "no token stands for one of its characters"


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
