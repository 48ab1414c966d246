"""`Probe`, which finds the parts of a conversation that a chat template leaves out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from blockdiff.data.messages import Message


class Part(NamedTuple):
    """A part of a conversation: its text, its name for messages, and the key of `alterations.WORDS` that counts it.

    key: None if a conversation without the part must be refused.
    """

    text: str
    name: str
    key: str | None = None


class Probe:
    """A conversation and its tools in which a unique word replaces every part that a template could leave out.

    In a prompt these are only declarations and calls: a template may leave out other parts of earlier turns.
    """

    def __init__(self, messages: Sequence[Message], tools: Sequence[Message] | None, is_prompt: bool) -> None:
        self._parts: dict[str, Part] = {}
        self._texts: list[str] = []
        self._is_prompt = is_prompt
        self.tools = None if tools is None else [self._declared(tool) for tool in tools]
        self.messages = [self._message(message, f"messages[{index}]") for index, message in enumerate(messages)]

    def may_tell(self, text: str) -> bool:
        """Return True if the probe is worth rendering. text: the rendering of the original conversation.

        It is not if the only parts are texts of the assistant, and all are in `text`.
        """
        return len(self._parts) > len(self._texts) or any(each not in text for each in self._texts)

    def left_out(self, text: str) -> list[Part]:
        """The parts that are missing, or written as a Python dict, in the rendering of the probe, `text`."""
        lost = [part for word, part in self._parts.items() if word not in text]
        odd = [part for word, part in self._parts.items() if f"'{word}': '{word}'" in text]
        return lost + [part._replace(name=f"{part.name} as JSON, but as Python does") for part in odd]

    def unseen(self, text: str) -> list[Part]:
        """The parts that are not in the rendering of the original conversation, `text`."""
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

    def _message(self, message: Message, where: str) -> Message:
        changed, calls = dict(message), message.get("tool_calls") or ()
        if calls:
            changed["tool_calls"] = [self._call(call, where) for call in calls]
        if message["role"] == "assistant" and not self._is_prompt:
            content, reasoning = str(message["content"]).strip(), message.get("reasoning", "").strip()
            if content:
                self._texts.append(content)
                changed["content"] = self._word(content, f"the text of {where}", "untold" if calls else None)
            if reasoning:
                changed["reasoning"] = self._word(reasoning, f"the reasoning of {where}", "unreasoned")
        return changed

    def _call(self, call: Message, where: str) -> Message:
        function = call["function"]
        name, arguments = function["name"], function["arguments"]
        changed = {**function, "name": self._word(name, f"the call of {name!r} in {where}")}
        if isinstance(arguments, Mapping) and arguments:  # a text has incomplete JSON
            word = self._word(name, f"the arguments of the call of {name!r} in {where}")
            changed["arguments"] = {**arguments, word: word}
        return {**call, "function": changed}
