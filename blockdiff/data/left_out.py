"""Parts of a conversation that a chat template leaves out: each gets a word of its own, which is then looked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from blockdiff.data.messages import Message


class Part(NamedTuple):
    """A part of a conversation: its text, what it is, and the key of `alterations.WORDS` that counts its loss.

    Without a key a conversation that lacks the part is refused.
    """

    text: str
    name: str
    key: str | None = None


class Probe:
    """A conversation and its tools with a word in the place of every part that a template could leave out.

    For a prompt those parts are declarations and calls only: of earlier turns a template may leave out what it likes.
    """

    def __init__(self, messages: Sequence[Message], tools: Sequence[Message] | None, is_prompt: bool) -> None:
        self._parts: dict[str, Part] = {}
        self._texts: list[str] = []
        self._is_prompt = is_prompt
        self.tools = None if tools is None else [self._declared(tool) for tool in tools]
        self.messages = [self._message(message, f"messages[{index}]") for index, message in enumerate(messages)]

    def may_tell(self, text: str) -> bool:
        """True unless there are only texts of the assistant, all in what the template writes of the original."""
        return len(self._parts) > len(self._texts) or any(each not in text for each in self._texts)

    def left_out(self, text: str) -> list[Part]:
        """The parts whose word is not in what the template writes of this conversation, or is there as in Python."""
        lost = [part for word, part in self._parts.items() if word not in text]
        odd = [part for word, part in self._parts.items() if f"'{word}': '{word}'" in text]
        return lost + [part._replace(name=f"{part.name} as JSON, but as Python does") for part in odd]

    def unseen(self, text: str) -> list[Part]:
        """The parts that are not in what the template writes of the original conversation."""
        return [part for part in self._parts.values() if part.text not in text]

    def _word(self, text: str, name: str, key: str | None = None) -> str:
        word = f"aApart{len(self._parts)}Bb"
        self._parts[word] = Part(text, name, key)
        return word

    def _declared(self, tool: Message) -> Message:
        function = tool["function"]
        return {
            **tool,
            "function": {**function, "name": self._word(function["name"], f"the tool {function['name']!r}")},
        }

    def _message(self, message: Message, place: str) -> Message:
        changed, calls = dict(message), message.get("tool_calls") or ()
        if calls:
            changed["tool_calls"] = [self._call(call, place) for call in calls]
        if message["role"] == "assistant" and not self._is_prompt:
            content, reasoning = str(message["content"]).strip(), message.get("reasoning", "").strip()
            if content:
                self._texts.append(content)
                changed["content"] = self._word(content, f"the text of {place}", "untold" if calls else None)
            if reasoning:
                changed["reasoning"] = self._word(reasoning, f"the reasoning of {place}", "unreasoned")
        return changed

    def _call(self, call: Message, place: str) -> Message:
        function = call["function"]
        name, arguments = function["name"], function["arguments"]
        changed = {**function, "name": self._word(name, f"the call of {name!r} in {place}")}
        if isinstance(arguments, Mapping) and arguments:  # a text is what a client could not finish
            word = self._word(name, f"the arguments of the call of {name!r} in {place}")
            changed["arguments"] = {**arguments, word: word}
        return {**call, "function": changed}
