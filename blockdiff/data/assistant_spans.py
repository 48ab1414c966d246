"""Where the assistant speaks in a conversation that a chat template writes without generation tags: proved, or refused.

The template is asked again with a shorter conversation, and with other words in a message. A turn begins where the
prompt before it ends, and ends where the conversation up to it does. Some templates write a turn otherwise once later
messages follow. Qwen3 leaves out the empty reasoning in which its prompts end: the turn begins without it. Phi 3 and
gpt-oss end the last turn otherwise: earlier ones end with what both ends share, which may be nothing. Prompts of R1 and
QwQ open reasoning that they write for no turn: the last turn's is put there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from blockdiff.data.messages import Message

Span = tuple[int, int]
Write = Callable[[Sequence[Message], bool], str]
# Texts that share neither their first character nor their last one.
STAND_INS = ("aAstand-inBb", "cCstand-inDd")
EMPTY_REASONING = re.compile(r"<(\w+)>\s*</\1>\s*\Z|<\|(\w+)>\w*\s*<\2\|>\s*\Z")
OPEN_REASONING = re.compile(r"<(\w+)>\s*\Z")
UNFINISHED = re.compile(r"[<\[][^<>\[\]\s]*\Z")  # a part of a control token, with which two of them begin
TAGS = "name a file as data.template that is the same with {% generation %} tags around what is learnt"
ENDED = "name a file as data.template that is the same with an end such as {{ eos_token }} after that text"


class UnprovedError(ValueError):
    """The reason for which an assistant's turn cannot be learnt, and what to do.

    is_past: the turn could be learnt if it were the last one.
    """

    def __init__(self, place: int, reason: str, remedy: str = TAGS, is_past: bool = True) -> None:
        super().__init__(f"messages[{place}]: {reason}")
        self.remedy, self.is_past = remedy, is_past


class Inserted(NamedTuple):
    """The reasoning that the last turn lacks, with what prompt and format have around it, to put in at a character."""

    place: int = 0
    before: str = ""
    reasoning: str = ""
    after: str = ""

    @property
    def text(self) -> str:
        """All of it."""
        return self.before + self.reasoning + self.after


class Turns(NamedTuple):
    """The characters [start, end) of the assistant's turns, once the text has what is to be inserted.

    bare: the number of turns without the empty reasoning in which their prompts end; endless: of those without an end;
    misplaced: of those that do not follow their prompts at all, which only tags can ask for.
    """

    spans: list[Span]
    inserted: Inserted = Inserted()
    bare: int = 0
    endless: int = 0
    misplaced: int = 0


def assistant_turns(written: Write, messages: Sequence[Message], places: Sequence[int]) -> Turns:
    """Find the assistant's messages at these places, the ends of their turns included, in `written(messages, False)`.

    written: the text of messages by the template, with the generation prompt after them if asked for. Raises
    UnprovedError for a message that cannot be found, or has no end.
    """
    whole = written(messages, False)
    spans, inserted, bare, endless = list[Span](), Inserted(), 0, 0
    for place in places:
        start, inserted, is_bare = _start(written, messages, place, whole)
        end, is_endless = _end(written, messages, place, whole, start)
        spans.append((start, end + len(inserted.text)))
        bare, endless = bare + is_bare, endless + is_endless
    return Turns(spans, inserted, bare, endless)


def span_owners(count: Callable[[Sequence[Message]], int], messages: Sequence[Message]) -> list[int]:
    """The place of the message that each marked span of a conversation belongs to.

    count: the number of spans that the template marks in messages. A message has those that come with it and with the
    answers of tools behind it.
    """
    owners: list[int] = []
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            followers = range(place + 1, len(messages))
            end = next((each for each in followers if messages[each]["role"] != "tool"), len(messages))
            owners += [place] * (count(messages[:end]) - len(owners))
    return owners


def behind_prompts(written: Write, messages: Sequence[Message], whole: str, spans: Sequence[Span]) -> Turns:
    """The turns that tags mark without what prompts already have, such as the name of the role."""
    roles = ["", *(message["role"] for message in messages)]
    places = [place for place, role in enumerate(roles[1:]) if role == "assistant" != roles[place]]
    prompts = [written(messages[:place], True) for place in places]
    starts = [len(prompt) for prompt in prompts if whole.startswith(prompt)]
    cut = [(max([start, *(at for at in starts if start < at < end)]), end) for start, end in spans]
    return Turns(cut, misplaced=len(prompts) - len(starts))


def _start(written: Write, messages: Sequence[Message], place: int, whole: str) -> tuple[int, Inserted, bool]:
    """The character at which a turn begins, what is to be inserted before it, and whether it is a bare one."""
    asked = written(messages[:place], True)
    if asked == written(messages[:place], False):
        plain = written([*messages[:place], {"role": "assistant", "content": STAND_INS[0]}], False)
        if not (plain.startswith(asked) and plain[len(asked) :].lstrip().startswith(STAND_INS[0])):
            raise UnprovedError(place, "the template writes nothing where add_generation_prompt asks it to")
    if whole.startswith(asked):
        return len(asked), Inserted(), False
    is_past = place < len(messages) - 1
    for reasoning in (EMPTY_REASONING.search(asked), OPEN_REASONING.search(asked)):
        if reasoning is None or not whole.startswith(asked[: reasoning.start()]):
            continue
        at, opening = reasoning.start(), reasoning.group()
        tag = opening[: opening.index(">") + 1]
        if whole.startswith((tag, tag.replace("<", "</")), at):  # reasoning of its own, unlike the prompt's
            break
        if is_past and not messages[place].get("is_learnt", True):
            return at, Inserted(), False
        if reasoning.re is EMPTY_REASONING:
            return (at, Inserted(), True) if is_past else (len(asked), Inserted(at, opening), False)
        if is_past:
            raise UnprovedError(place, f"its prompt ends in {tag}, and the template writes the turn without")
        if not messages[place].get("reasoning"):
            remedy = "write the turn's reasoning as reasoning beside its content, or name another data.template"
            raise UnprovedError(place, f"its prompt ends in {tag}, but it has no reasoning", remedy, is_past=False)
        thought = messages[place]["reasoning"].strip()
        return len(asked), Inserted(at, opening, thought, f"\n{tag.replace('<', '</')}\n\n"), False
    raise UnprovedError(place, "the template writes this turn otherwise than after its generation prompt")


def _end(written: Write, messages: Sequence[Message], place: int, whole: str, start: int) -> tuple[int, bool]:
    """The character of the conversation at which the turn that begins at `start` ends, and whether it has no end."""
    is_last = not any(message["role"] == "assistant" for message in messages[place + 1 :])
    ended = written(messages[: place + 1], False)
    if is_last and _may_lack_end(ended, messages[place]):
        plain = written([*messages[:place], {"role": "assistant", "content": STAND_INS[0]}], False)
        if not plain.rpartition(STAND_INS[0])[2].strip():
            raise UnprovedError(place, "no end of the turn follows its text, so answers would not end", ENDED, False)
    if whole.startswith(ended):
        return len(ended), False
    after, closing = (_after(written, messages, place, end) for end in (len(messages), place + 1))
    if not whole.endswith(after) or len(after) + start > len(whole):
        raise UnprovedError(place, "the template writes this turn otherwise than after its generation prompt")
    shared = after[: _shared(after, closing)]
    if shared not in (after, closing):
        shared = UNFINISHED.sub("", shared)
    return len(whole) - len(after) + len(shared), not shared.strip()


def _may_lack_end(ended: str, message: Message) -> bool:
    """True for a text after which no end is seen at once: it ends with the content of its last message, or a call."""
    content = str(message["content"]).strip()
    return bool(message.get("tool_calls")) or (bool(content) and ended.rstrip().endswith(content))


def _after(written: Write, messages: Sequence[Message], place: int, end: int) -> str:
    """The text behind the words of a message, or behind the name of its last call, in `messages[:end]`."""
    one, other = (
        written([*messages[:place], _in_other_words(messages[place], word), *messages[place + 1 : end]], False)
        for word in STAND_INS
    )
    return one[len(one) - _shared(one[::-1], other[::-1]) :]


def _in_other_words(message: Message, word: str) -> Message:
    if message["content"] or not message.get("tool_calls"):
        return {**message, "content": word}
    *others, last = message["tool_calls"]
    return {**message, "tool_calls": [*others, {**last, "function": {**last["function"], "name": word}}]}


def _shared(one: str, other: str) -> int:
    """The number of characters with which both texts begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
