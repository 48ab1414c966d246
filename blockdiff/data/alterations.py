"""The changes that a chat template makes to messages, and their counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from blockdiff.data.messages import Message
from blockdiff.data.template import RefusedByTemplate

CALL = {"type": "function", "id": "1", "function": {"name": "probe", "arguments": {}}}
# The kinds of changes, and the words that report their counts.
WORDS = {
    "stripped": "{:,} texts stripped of white space",
    "glued": "{:,} assistant messages glued to the one before",
    "moved": "{:,} texts moved behind the tool's answer",
    "thought": "{:,} texts in <think> read as reasoning",
    "untold": "{:,} texts beside calls left out",
    "unreasoned": "{:,} messages without their reasoning",
    "bare": "{:,} turns without the empty reasoning in which their prompts end",
    "endless": "{:,} turns without the end that the last one has",
    "misplaced": "{:,} turns tagged elsewhere than after their prompts",
    "unanswered": "{:,} conversations end without an answer",
    "spelt": "{:,} rows spell control tokens",
}


@dataclass(frozen=True)
class Alterations:
    """The changes that one template makes."""

    strips: frozenset[str]  # the roles whose texts lose white space at both ends
    glues: bool  # consecutive assistant messages become one
    moves: bool  # a text next to a call is moved behind the tool's answer

    def count(self, messages: Sequence[Message]) -> Counter[str]:
        """Count the changed messages of a conversation by the keys of WORDS."""
        counts: Counter[str] = Counter()
        for message in messages:
            content = message["content"]
            if isinstance(content, str) and message["role"] in self.strips and content != content.strip():
                counts["stripped"] += 1
        for before, after in pairwise(messages):
            if self.glues and before["role"] == after["role"] == "assistant":
                counts["glued"] += 1
            if self.moves and before.get("tool_calls") and before["content"].strip() and after["role"] == "tool":
                counts["moved"] += 1
        counts["unanswered"] += messages[-1]["role"] != "assistant"
        return counts


def find_alterations(written: Callable[[Sequence[Message]], str]) -> Alterations:
    """Find the changes that a template makes by rendering probes. Probes that it refuses are ignored."""

    def has(text: str, *messages: Message) -> bool | None:
        try:
            return text in written(messages)
        except RefusedByTemplate:
            return None

    user, end = {"role": "user", "content": "probe-user"}, {"role": "assistant", "content": "probe-end"}
    first, second = ({"role": "assistant", "content": f"probe-{name}"} for name in ("one", "two"))
    padded = {role: {"role": role, "content": f"\n  probe-{role} \n"} for role in ("system", "user", "assistant")}
    conversations = {
        "system": (padded["system"], user, end),
        "user": (padded["user"], end),
        "assistant": (user, padded["assistant"]),
    }
    calling = {**first, "tool_calls": [CALL]}
    answer = {"role": "tool", "tool_call_id": "1", "name": "probe", "content": "probe-answer"}
    try:
        text = written((user, calling, answer, end))
        moves = text.find("probe-one") > text.find("probe-answer") > 0
    except RefusedByTemplate:
        moves = False
    return Alterations(
        frozenset(role for role, messages in conversations.items() if has(padded[role]["content"], *messages) is False),
        glues=has("probe-oneprobe-two", user, first, second) is True,
        moves=moves,
    )
