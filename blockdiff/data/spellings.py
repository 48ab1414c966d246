"""The forms of messages in other tools: names of roles and keys, parts for tool calls, answers and reasoning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockdiff.data.strict_json import BadRow, from_json, type_in_words

# Names of roles in rows, and our names.
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
# Keys that decide whether a message is learnt (OpenAI and Mistral, axolotl, AgentInstruct and ms-swift, verl).
MARKS = ("weight", "train", "loss", "trainable")
# Keys that mark a row's answer as good or bad (TRL and ms-swift, LLaMA-Factory).
JUDGEMENTS = ("label", "kto_tag")
# The keys of messages, and of a tool's answers.
MESSAGE_KEYS = frozenset(("role", "content", "from", "value", "tool_calls", "function_call", *REASONING_KEYS, *MARKS))
ANSWER_KEYS = MESSAGE_KEYS | {"name", "tool_call_id"}
# The parts of Anthropic's messages for calls, answers and reasoning.
BLOCKS = ("tool_use", "tool_result", "thinking", "redacted_thinking")


def is_learnt(message: Mapping[str, Any], role: str, name: str) -> bool:
    """Return True if an assistant message is learnt; its author may exclude it.

    Raises BadRow for a mark that is neither yes nor no, and for one that asks to learn another role's message.
    """
    if "train_detail" in message:
        raise BadRow(f"{name} has train_detail, but turns are learnt as a whole; write train, or several messages")
    is_marked = True
    for key in (key for key in MARKS if key in message):
        mark = message[key]
        if not isinstance(mark, bool | int | float | None) or mark not in (None, 0, 1):
            raise BadRow(f"{name}.{key} is {mark!r:.40}; write 1 or true if it is learnt, else 0 or false")
        if mark and role != "assistant":
            raise BadRow(f"{name}.{key} asks to learn a message of role {role}; only the assistant's are learnt")
        if mark is not None or key == "loss":  # AgentInstruct's null means no
            is_marked = is_marked and bool(mark)
    return is_marked


def calls_of(message: Mapping[str, Any], role: str, content: Any, name: str) -> Any:
    """The unchecked calls of a message: its `tool_calls`, `function_call`, or content if its role is one of CALLERS."""
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
    """Convert a message with Anthropic's parts to messages: the answers of tools in it, then the rest of it."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    kinds = [part.get("type") if isinstance(part, Mapping) else None for part in parts]
    if not any(kind in BLOCKS for kind in kinds):
        return [message]
    if "redacted_thinking" in kinds:
        raise BadRow(f"{name} has a part redacted_thinking, which cannot be read; remove the part")
    blocks = {block: [part for part, kind in zip(parts, kinds, strict=True) if kind == block] for block in BLOCKS}
    others = [part for part, kind in zip(parts, kinds, strict=True) if kind not in BLOCKS]
    rest = {**message, "content": others}
    if blocks["tool_use"]:
        if kinds[kinds.index("tool_use") :] != ["tool_use"] * len(blocks["tool_use"]):
            raise BadRow(f"{name} has a part after a tool_use; move other parts before the calls")
        rest["tool_calls"] = [
            {"id": part.get("id"), "name": part.get("name"), "arguments": part.get("input")}
            for part in blocks["tool_use"]
        ]
    if blocks["thinking"]:
        rest["reasoning"] = "".join(str(part.get("thinking") or "") for part in blocks["thinking"])
    answers = [
        {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": part.get("content") or ""}
        for part in blocks["tool_result"]
    ]
    return [*answers, *([rest] if others or blocks["tool_use"] or not answers else [])]


def declared_function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a declaration in the form {"type": "function", "function": {...}}. One in that form stays.

    The keys of a bare one keep their order; Anthropic's `input_schema` becomes `parameters`.
    """
    if "function" in tool:
        return dict(tool)
    keys = {"input_schema": "parameters"} if "parameters" not in tool else {}
    bare = {keys.get(key, key): value for key, value in tool.items() if (key, value) != ("type", "function")}
    return {"type": "function", "function": bare}
