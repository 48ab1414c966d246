"""The spans of the assistant's turns in a conversation whose chat template has no generation tags, proved or refused.

The template renders shorter conversations, and conversations with other words in a message. A turn begins where the
prompt before it ends, and ends where the conversation up to it ends. Some templates write a turn differently if later
messages follow it. Qwen3 leaves out the empty reasoning at the end of its prompts: the turn begins without it. Phi 3
and gpt-oss end the last turn differently: earlier ones end with the text that both ends share, which may be empty.
Prompts of R1 and QwQ open reasoning, which turns do not have: the last turn's reasoning is inserted there.
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
TAGS = "set data.template to a copy of the template with {% generation %} tags around the text to learn"
ENDED = "set data.template to a copy of the template with an end such as {{ eos_token }} after that text"


class UnprovedError(ValueError):
    """Reports why the assistant's turn of a message cannot be learnt, and the remedy.

    is_past: the turn could be learnt if it were the last one.
    """

    def __init__(self, index: int, reason: str, remedy: str = TAGS, is_past: bool = True) -> None:
        super().__init__(f"messages[{index}]: {reason}")
        self.remedy, self.is_past = remedy, is_past


class Inserted(NamedTuple):
    """The reasoning that the last turn lacks, with the text around it, and the character at which to insert it."""

    start: int = 0
    before: str = ""
    reasoning: str = ""
    after: str = ""

    @property
    def text(self) -> str:
        """The whole text to insert."""
        return self.before + self.reasoning + self.after


class Turns(NamedTuple):
    """The characters [start, end) of the assistant's turns, in the text after insertion.

    bare: the number of turns without the empty reasoning at the end of their prompts.
    endless: the number of turns without an end.
    misplaced: the number of tagged turns that do not follow their prompts.
    """

    spans: list[Span]
    inserted: Inserted = Inserted()
    bare: int = 0
    endless: int = 0
    misplaced: int = 0


def assistant_turns(written: Write, messages: Sequence[Message], indices: Sequence[int]) -> Turns:
    """Find the turns of the assistant's messages at some indices, with their ends, in `written(messages, False)`.

    written: renders messages with the template; its second argument adds the generation prompt. Raises UnprovedError
    for a message that cannot be found or has no end.
    """
    whole = written(messages, False)
    spans, inserted, bare, endless = list[Span](), Inserted(), 0, 0
    for index in indices:
        start, inserted, is_bare = _start(written, messages, index, whole)
        end, is_endless = _end(written, messages, index, whole, start)
        spans.append((start, end + len(inserted.text)))
        bare, endless = bare + is_bare, endless + is_endless
    return Turns(spans, inserted, bare, endless)


def span_owners(count: Callable[[Sequence[Message]], int], messages: Sequence[Message]) -> list[int]:
    """Return the index of the message to which each marked span of a conversation belongs.

    count: the number of spans that the template marks in messages. Spans in the answers of tools after a message belong
    to that message.
    """
    owners: list[int] = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            followers = range(index + 1, len(messages))
            end = next((each for each in followers if messages[each]["role"] != "tool"), len(messages))
            owners += [index] * (count(messages[:end]) - len(owners))
    return owners


def behind_prompts(written: Write, messages: Sequence[Message], whole: str, spans: Sequence[Span]) -> Turns:
    """Return the tagged turns without text that is already in the prompt, such as the name of the role."""
    roles = ["", *(message["role"] for message in messages)]
    indices = [index for index, role in enumerate(roles[1:]) if role == "assistant" != roles[index]]
    prompts = [written(messages[:index], True) for index in indices]
    ends = [len(prompt) for prompt in prompts if whole.startswith(prompt)]
    cut = [(max([start, *(each for each in ends if start < each < end)]), end) for start, end in spans]
    return Turns(cut, misplaced=len(prompts) - len(ends))


def _start(written: Write, messages: Sequence[Message], index: int, whole: str) -> tuple[int, Inserted, bool]:
    """Return the character at which a turn begins, the text to insert before it, and whether the turn is bare."""
    prompt = written(messages[:index], True)
    if prompt == written(messages[:index], False):
        plain = written([*messages[:index], {"role": "assistant", "content": STAND_INS[0]}], False)
        if not (plain.startswith(prompt) and plain[len(prompt) :].lstrip().startswith(STAND_INS[0])):
            raise UnprovedError(index, "the template ignores add_generation_prompt")
    if whole.startswith(prompt):
        return len(prompt), Inserted(), False
    is_past = index < len(messages) - 1
    for reasoning in (EMPTY_REASONING.search(prompt), OPEN_REASONING.search(prompt)):
        if reasoning is None or not whole.startswith(prompt[: reasoning.start()]):
            continue
        position, opening = reasoning.start(), reasoning.group()
        tag = opening[: opening.index(">") + 1]
        if whole.startswith((tag, tag.replace("<", "</")), position):  # the turn's reasoning differs from the prompt's
            break
        if is_past and not messages[index].get("is_learnt", True):
            return position, Inserted(), False
        if reasoning.re is EMPTY_REASONING:
            return (position, Inserted(), True) if is_past else (len(prompt), Inserted(position, opening), False)
        if is_past:
            raise UnprovedError(index, f"its prompt ends in {tag}, and the template writes the turn without")
        if not messages[index].get("reasoning"):
            remedy = "write the turn's reasoning as reasoning beside its content, or name another data.template"
            raise UnprovedError(index, f"its prompt ends in {tag}, but it has no reasoning", remedy, is_past=False)
        thought = messages[index]["reasoning"].strip()
        return len(prompt), Inserted(position, opening, thought, f"\n{tag.replace('<', '</')}\n\n"), False
    raise UnprovedError(index, "the template writes this turn differently after its generation prompt")


def _end(written: Write, messages: Sequence[Message], index: int, whole: str, start: int) -> tuple[int, bool]:
    """Return the character at which the turn that begins at `start` ends, and whether it has no end."""
    is_last = not any(message["role"] == "assistant" for message in messages[index + 1 :])
    ended = written(messages[: index + 1], False)
    if is_last and _may_lack_end(ended, messages[index]):
        plain = written([*messages[:index], {"role": "assistant", "content": STAND_INS[0]}], False)
        if not plain.rpartition(STAND_INS[0])[2].strip():
            raise UnprovedError(index, "no end of the turn follows its text, so answers would not end", ENDED, False)
    if whole.startswith(ended):
        return len(ended), False
    after, closing = (_after(written, messages, index, end) for end in (len(messages), index + 1))
    if not whole.endswith(after) or len(after) + start > len(whole):
        raise UnprovedError(index, "the template writes this turn differently after its generation prompt")
    shared = after[: _shared(after, closing)]
    if shared not in (after, closing):
        shared = UNFINISHED.sub("", shared)
    return len(whole) - len(after) + len(shared), not shared.strip()


def _may_lack_end(ended: str, message: Message) -> bool:
    """Return True if a turn may have no end: its text ends with the content of its last message, or with a call."""
    content = str(message["content"]).strip()
    return bool(message.get("tool_calls")) or (bool(content) and ended.rstrip().endswith(content))


def _after(written: Write, messages: Sequence[Message], index: int, end: int) -> str:
    """Return the text of `messages[:end]` after the content of a message, or after the name of its last call."""
    one, other = (
        written([*messages[:index], _in_other_words(messages[index], word), *messages[index + 1 : end]], False)
        for word in STAND_INS
    )
    return one[len(one) - _shared(one[::-1], other[::-1]) :]


def _in_other_words(message: Message, word: str) -> Message:
    if message["content"] or not message.get("tool_calls"):
        return {**message, "content": word}
    *others, last = message["tool_calls"]
    return {**message, "tool_calls": [*others, {**last, "function": {**last["function"], "name": word}}]}


def _shared(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
