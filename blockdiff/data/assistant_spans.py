"""Where the assistant speaks in a conversation that a chat template writes without generation tags: proved, or refused.

The template is asked again with a shorter conversation, and with other words in a message. A turn begins where the
generation prompt before it ends, and ends where the conversation up to it does. A template may write an earlier turn
otherwise once later messages follow (Qwen3 leaves out its reasoning); the words around two stand-ins for its content
then say where it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blockdiff.data.messages import Message

Span = tuple[int, int]
# Texts that share neither their first character nor their last one.
STAND_INS = ("aAstand-inBb", "cCstand-inDd")


class UnprovedError(ValueError):
    """The reason why it cannot be said where an assistant's message stands, as words after the message's place."""


def assistant_spans(
    written: Callable[[Sequence[Message], bool], str], messages: Sequence[Message], only_last: bool = False
) -> list[Span]:
    """The characters [start, end) of every assistant message, the end of its turn included, in `written(messages)`.

    written: the text of messages by the template, with the generation prompt after them where asked for; only_last:
    leave out all but the last message of the assistant. UnprovedError names a message that cannot be found.
    """
    whole = written(messages, False)
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    return [_span(written, messages, place, whole) for place in (places[-1:] if only_last else places)]


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


def _span(
    written: Callable[[Sequence[Message], bool], str], messages: Sequence[Message], place: int, whole: str
) -> Span:
    asked = written(messages[:place], True)
    if asked == written(messages[:place], False):
        raise UnprovedError(f"messages[{place}]: the template writes nothing where add_generation_prompt asks it to")
    ended = written(messages[: place + 1], False)
    if whole.startswith(asked) and whole.startswith(ended):
        return len(asked), len(ended)
    before, after = _around(written, messages, place, len(messages))
    _, closing = _around(written, messages, place, place + 1)
    is_there = whole.startswith(before) and whole.endswith(after) and len(before) + len(after) <= len(whole)
    start = len(asked) if whole.startswith(asked) else len(before)
    if not (is_there and asked.startswith(whole[:start]) and after.startswith(closing)):
        raise UnprovedError(
            f"messages[{place}]: the template writes this turn otherwise than after its generation prompt"
        )
    return start, len(whole) - len(after) + len(closing)


def _around(
    written: Callable[[Sequence[Message], bool], str], messages: Sequence[Message], place: int, end: int
) -> tuple[str, str]:
    """The texts before and after the content of a message in the conversation of `messages[:end]`."""
    one, other = (
        written([*messages[:place], {**messages[place], "content": content}, *messages[place + 1 : end]], False)
        for content in STAND_INS
    )
    before, after = _shared(one, other), _shared(one[::-1], other[::-1])
    return one[:before], one[len(one) - after :]


def _shared(one: str, other: str) -> int:
    """The number of characters with which both texts begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
