"""The spellings that other tools have for the messages of a conversation, each read as ours.

Tables of names; and parts and keys that stand for calls of tools, their answers and reasoning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockdiff.data.strict_json import BadRow, from_json, type_in_words

# What rows call the roles, and what they are called here.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "tool_response": "tool",  # ms-swift
    "function": "tool",  # OpenAI, before tools
    "tool_call": "assistant",  # ms-swift
}
# Further names, in conversations of the ShareGPT form.
SPEAKERS = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "observation": "tool",  # LLaMA-Factory
    "function_call": "assistant",  # LLaMA-Factory
}
CALLERS = ("tool_call", "function_call")  # roles whose content is the JSON of calls
REASONING_KEYS = ("reasoning", "reasoning_content")
# Keys by which a message says whether it is learnt (OpenAI and Mistral, axolotl, AgentInstruct and ms-swift, verl).
MARKS = ("weight", "train", "loss", "trainable")
# Keys by which a row says that its answer is a good one (TRL and ms-swift, LLaMA-Factory).
JUDGEMENTS = ("label", "kto_tag")
# What a message may have, and one of a tool.
MESSAGE_KEYS = frozenset(("role", "content", "from", "value", "tool_calls", "function_call", *REASONING_KEYS, *MARKS))
ANSWER_KEYS = MESSAGE_KEYS | {"name", "tool_call_id"}
# Parts in which Anthropic's messages have calls, answers and reasoning.
BLOCKS = ("tool_use", "tool_result", "thinking", "redacted_thinking")


def is_learnt(message: Mapping[str, Any], role: str, name: str) -> bool:
    """False for a message of the assistant that its author excludes from what is learnt.

    BadRow for a mark that is neither yes nor no, or that asks for what others say.
    """
    if "train_detail" in message:
        raise BadRow(f"{name} has train_detail, and a turn is learnt as a whole; write train, or several messages")
    found = True
    for key in (key for key in MARKS if key in message):
        mark = message[key]
        if not isinstance(mark, bool | int | float | None) or mark not in (None, 0, 1):
            raise BadRow(f"{name}.{key} is {mark!r:.40}; write 1 or true where it is learnt, else 0 or false")
        if mark and role != "assistant":
            raise BadRow(f"{name}.{key} asks to learn a message of role {role}; only the assistant's are learnt")
        if mark is not None or key == "loss":  # whose null is AgentInstruct's no
            found = found and bool(mark)
    return found


def calls_of(message: Mapping[str, Any], role: str, content: Any, name: str) -> Any:
    """The calls of a message as they stand there: in `tool_calls`, in `function_call`, or as a content of that role."""
    if role in CALLERS:
        calls = from_json(content, name, "{[")
        if not isinstance(calls, Mapping | list):
            raise BadRow(f"{name} has role {role}, but its content is {type_in_words(calls)}; write the call as JSON")
        return [calls] if isinstance(calls, Mapping) else calls
    calls = from_json(message.get("tool_calls"), f"{name}.tool_calls", "[")
    former = from_json(message.get("function_call"), f"{name}.function_call", "{")
    calls = calls or ([former] if former else None)
    return None if isinstance(calls, str) and not calls.strip() else calls


def without_blocks(message: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """A message whose parts are Anthropic's as ours: the answers of tools in it, then what else it says."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    kinds = [part.get("type") if isinstance(part, Mapping) else None for part in parts]
    if not any(kind in BLOCKS for kind in kinds):
        return [message]
    if "redacted_thinking" in kinds:
        raise BadRow(f"{name} has a part redacted_thinking, which cannot be read; remove the part")
    of = {kind: [part for part, its in zip(parts, kinds, strict=True) if its == kind] for kind in BLOCKS}
    others = [part for part, kind in zip(parts, kinds, strict=True) if kind not in BLOCKS]
    rest = {**message, "content": others}
    if of["tool_use"]:
        if kinds[kinds.index("tool_use") :] != ["tool_use"] * len(of["tool_use"]):
            raise BadRow(f"{name} has a part behind a tool_use; write what is said before the calls")
        rest["tool_calls"] = [
            {"id": part.get("id"), "name": part.get("name"), "arguments": part.get("input")} for part in of["tool_use"]
        ]
    if of["thinking"]:
        rest["reasoning"] = "".join(str(part.get("thinking") or "") for part in of["thinking"])
    answers = [
        {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": part.get("content") or ""}
        for part in of["tool_result"]
    ]
    return [*answers, *([rest] if others or of["tool_use"] or not answers else [])]


def declared_function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A declaration in the form {"type": "function", "function": {...}}: one that is wrapped already as it came.

    Of a bare one the keys keep their order; Anthropic's `input_schema` is called `parameters`.
    """
    if "function" in tool:
        return dict(tool)
    keys = {"input_schema": "parameters"} if "parameters" not in tool else {}
    bare = {keys.get(key, key): value for key, value in tool.items() if (key, value) != ("type", "function")}
    return {"type": "function", "function": bare}
