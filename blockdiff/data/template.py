"""Conversations as text, with the spans of the assistant's turns, by the tokenizer's chat template."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import date
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from blockdiff.data.assistant_spans import (
    STAND_INS,
    Turns,
    UnprovedError,
    assistant_turns,
    behind_prompts,
    span_owners,
)
from blockdiff.data.control_tokens import OPEN, Guard
from blockdiff.data.image_parts import for_template
from blockdiff.data.left_out import Probe
from blockdiff.data.messages import Message, with_text_arguments
from blockdiff.errors import DataError
from blockdiff.time_limit import TEMPLATE_BYTES, TEMPLATE_SECONDS, memory_limit, time_limit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]

TURN_EDGES = ("<|turn>", "<turn|>")
TURN_TOKENS = (*TURN_EDGES, "<|channel>", "<channel|>", "<|think|>")  # the Gemma 4 turn format
TOOL_TOKENS = (
    *("<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'),
)
TEMPLATES_REASONING = ("reasoning_content", "thinking")  # names of a message's reasoning in templates
NOTHING: Mapping[str, int] = MappingProxyType({})
VERBATIM = "{%- set verbatim = true -%}"  # the first line of the template that changes nothing
NO_THINKING = {"enable_thinking": False}
# The variables that `render` sets, in addition to special tokens.
OWN_VARIABLES = ("messages", "conversations", "tools", "documents", "chat_template", "add_generation_prompt")
DIRECTIVE = re.compile(r"%[-_0^#]?[A-Za-z]")  # of strftime
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Conversations that are rendered to find out if a template writes the Gemma 4 turn format.
PROBES: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": " a\n"}, {"role": "assistant", "content": " b\n"}],
    [
        {"role": "system", "content": " s "},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ],
)
QUESTION: Message = {"role": "user", "content": "a"}
# Turns whose last control token ends a turn.
ENDED: tuple[Message, ...] = (
    {"role": "assistant", "content": "b"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "c", "arguments": {}}}]},
)


class RefusedByTemplate(DataError):
    """A chat template refuses a conversation, fails, or leaves out its tools."""


class EndlessTemplate(RefusedByTemplate):
    """A chat template exceeds the limits of time or memory for a conversation."""


class Rendered(NamedTuple):
    """A rendered conversation: its text, and the character spans of the assistant's turns.

    cuts: the characters at which the text is cut before it is tokenised.
    excluded: the spans of turns that the row marks as not to be learnt.
    changes: the number of messages that the template changed, by the keys of `alterations.WORDS`.
    """

    text: str
    spans: list[Span]
    cuts: tuple[int, ...] = ()
    excluded: tuple[Span, ...] = ()
    changes: Mapping[str, int] = NOTHING


@lru_cache(maxsize=1)
def _packaged_file() -> str:
    return (files("blockdiff.data") / "templates" / "gemma4.jinja").read_text(encoding="utf-8")


@lru_cache(maxsize=16)
def has_tags(template: str) -> bool:
    """Whether a template has generation tags around the assistant's text."""
    return GENERATION_TAG.search(template) is not None


def packaged_template(*, verbatim: bool = False) -> str:
    """The chat template of the Gemma 4 turn format, with generation tags.

    verbatim: write every message unchanged, as a separate turn.
    """
    return f"{VERBATIM}\n{_packaged_file()}" if verbatim else _packaged_file()


def is_template_file(source: str) -> bool:
    """Return True if `data.template` is the path of a file, with a dot or a slash, and not a name."""
    return bool(Path(source).suffix) or "/" in source


def give_template(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Set a tokenizer's chat template to that of a file, or to one of its named templates.

    source: `data.template`. With "tokenizer" and "verbatim" (see `training_template`) nothing changes. Raises DataError
    if there is no such template, or it cannot render a question.
    """
    if source in ("tokenizer", "verbatim"):
        return
    named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    if is_template_file(source):
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"data.template: {source}: {error}; name a text file with a chat template") from None
    elif source in named:
        text = named[source]
    else:
        listed = ", ".join(["tokenizer", "verbatim", *named])
        raise DataError(f"data.template: {source!r} is neither a file nor a template; choose a file or one of {listed}")
    try:
        render(tokenizer, text, [QUESTION], is_prompt=True)
    except RefusedByTemplate as error:
        raise DataError(f"data.template: {source}: cannot render a question ({error}); correct it") from None
    tokenizer.chat_template = text


def own_template(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Message] | None = None) -> str | None:
    """The chat template of a tokenizer for conversations with these tools; None if it has none.

    Raises DataError if it has several and none is the default.
    """
    if not tokenizer.chat_template:
        return None
    try:
        return str(tokenizer.get_chat_template(tools=list(tools) if tools else None))
    except ValueError:
        names = ", ".join(tokenizer.chat_template)
        raise DataError(
            f"none of the tokenizer's chat templates ({names}) is the default; set data.template to one, or save it as "
            "chat_template.jinja in the model's directory"
        ) from None


def training_template(
    tokenizer: PreTrainedTokenizerBase, tools: Sequence[Message] | None = None, *, verbatim: bool = False
) -> str:
    """The template that renders training conversations with these tools: the tokenizer's or the packaged one.

    The packaged one replaces a template that writes the Gemma 4 turn format without tags, like the released one, and a
    missing template if the vocabulary has the turn tokens. verbatim: use the packaged one, which needs the turn tokens.
    Raises DataError if there is no template.
    """
    template = own_template(tokenizer, tools)
    has_turns = all(token in tokenizer.get_vocab() for token in TURN_EDGES)
    if verbatim:
        if not has_turns:
            raise DataError(
                f"data.template: verbatim writes turns with {' and '.join(TURN_EDGES)}, which the tokenizer lacks; "
                "leave it out"
            )
        return packaged_template(verbatim=True)
    if template is None:
        if has_turns:
            return packaged_template()
        raise DataError(
            "the tokenizer has no chat template for conversations; set data.template to a file with one, or write rows "
            "of prompt and response and leave data.chat out"
        )
    return packaged_template() if not has_tags(template) and _is_turn_format(tokenizer, template) else template


def dated(template: str, day: date) -> str:
    """Add a `strftime_now` that writes `day` instead of today to a template that uses it."""
    if not asks_date(template):
        return template
    directives = sorted({*DIRECTIVE.findall(template)}, key=len, reverse=True)
    values = "".join(f" | replace({mark!r}, {json.dumps(day.strftime(mark))})" for mark in directives)
    return f"{{% macro strftime_now(format) %}}{{{{ format{values} }}}}{{% endmacro %}}\n{template}"


def asks_date(template: str) -> bool:
    """Whether a template writes the date, like Llama 3.2's."""
    return "strftime_now" in template


def turn_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids of control tokens that end the assistant's turn, or after which it waits for a tool's answer.

    Returns () if no template marks the assistant's turns, or it ends them in plain text.
    """
    learnt = []
    for turn in ENDED:
        try:
            text, spans, *_ = marked(tokenizer, training_template(tokenizer), [QUESTION, turn])
        except EndlessTemplate:
            raise
        except DataError:  # no such template, or one that refuses tools
            continue
        learnt += [text[slice(*span)] for span in spans[-1:]]
    if not learnt:
        return ()
    ids = {str(token.content): id for id, token in tokenizer.added_tokens_decoder.items()}
    control = re.compile("|".join(map(re.escape, sorted(ids, key=len, reverse=True))))
    return tuple(dict.fromkeys(ids[token] for text in learnt for token in control.findall(text)[-1:] if token))


def turn_closing(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that the chat template of training writes after an answer; () if it marks no answer."""
    try:
        return _closing(tokenizer, training_template(tokenizer))
    except EndlessTemplate:
        raise
    except DataError:
        return ()


@lru_cache(maxsize=4)
def _closing(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[int, ...]:
    text, spans, *_ = marked(tokenizer, template, [QUESTION, ENDED[0]])
    answer = text[slice(*spans[-1])]
    closing = answer[answer.rindex(ENDED[0]["content"]) + 1 :]
    return tuple(tokenizer(closing, add_special_tokens=False)["input_ids"]) if closing else ()


def render(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    messages: Sequence[Message],
    variables: Mapping[str, Any] = NO_THINKING,
    tools: Sequence[Message] | None = None,
    guard: Guard = OPEN,
    is_prompt: bool = False,
) -> Rendered:
    """Render a conversation, with the character spans that the template's tags mark, in order.

    variables: further variables of the template. guard: keeps texts from becoming control tokens. is_prompt: end where
    the assistant begins, without spans. Raises RefusedByTemplate, also if the template leaves out tools, calls or
    answers.
    """
    rendered = _written(tokenizer, template, messages, variables, tools, guard, is_prompt)
    if template.endswith(_packaged_file()):  # its omissions are known; a probe would double the time
        return rendered._replace(changes={} if template.startswith(VERBATIM) else _unreasoned(messages))
    probe = Probe(messages, tools, is_prompt)
    if not probe.may_tell(rendered.text):
        return rendered
    try:
        lost = probe.left_out(
            _written(tokenizer, template, probe.messages, variables, probe.tools, OPEN, is_prompt).text
        )
    except RefusedByTemplate:  # the template only accepts names that it knows
        lost = probe.unseen(rendered.text)
    for part in lost:
        if part.key is None:
            raise RefusedByTemplate(f"it does not write {part.name}")
    return rendered._replace(changes=Counter(part.key for part in lost if part.key))


def _unreasoned(messages: Sequence[Message]) -> dict[str, int]:
    """Count the messages before the last question that have reasoning, which the packaged template leaves out.

    Returns {"unreasoned": count}, or {} if there are none.
    """
    last = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=0)
    count = sum(bool(message.get("reasoning", "").strip()) for message in messages[:last])
    return {"unreasoned": count} if count else {}


def _written(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    messages: Sequence[Message],
    variables: Mapping[str, Any],
    tools: Sequence[Message] | None,
    guard: Guard = OPEN,
    is_prompt: bool = False,
) -> Rendered:
    """`render` without a check for omissions. Arguments of calls become JSON text if the template needs texts."""
    from transformers.utils.chat_template_utils import render_jinja_template

    written = for_template(messages)
    names = [name for name in TEMPLATES_REASONING if name in template]
    written = [each | dict.fromkeys(names, each["reasoning"]) if "reasoning" in each else each for each in written]
    inputs = [written, None if tools is None else list(tools), dict(variables)]
    (shown, declared, options), hidden = guard.hide(inputs)
    try:
        with time_limit(TEMPLATE_SECONDS, TEMPLATE_BYTES), _bounded(is_prompt):
            texts, spans = render_jinja_template(
                conversations=[shown],
                tools=declared,
                chat_template=template,
                # Finding spans is not thread-safe; prompts, which a server renders in threads, need none.
                return_assistant_tokens_mask=not is_prompt and has_tags(template),
                add_generation_prompt=is_prompt,
                **options,
                **tokenizer.special_tokens_map,
            )
    except (TimeoutError, MemoryError) as error:
        reason = str(error) or f"it takes more than {TEMPLATE_BYTES / 2**30:g} GiB of memory"
        file = f"chat_template of {tokenizer.name_or_path}: " if tokenizer.name_or_path else ""
        raise EndlessTemplate(f"{file}{reason}") from None
    except TypeError as error:
        in_text = [with_text_arguments(message) for message in messages]
        if in_text == list(messages):
            raise RefusedByTemplate(str(error)) from None
        return _written(tokenizer, template, in_text, variables, tools, guard, is_prompt)
    except Exception as error:  # a template is a stranger's program: it may raise anything
        raise RefusedByTemplate(str(error) or type(error).__name__) from None
    text, cuts = guard.show(texts[0], hidden)
    return Rendered(text, list(spans[0]) if spans else [], cuts)


def marked(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    messages: Sequence[Message],
    variables: Mapping[str, Any] = NO_THINKING,
    tools: Sequence[Message] | None = None,
    guard: Guard = OPEN,
    only_last: bool = False,
) -> Rendered:
    """Render a conversation with the spans of the assistant's turns, whether or not the template has tags.

    only_last: without tags, find only the last assistant message and those that are not to be learnt. Raises
    RefusedByTemplate if the spans cannot be proved.
    """
    rendered = render(tokenizer, template, messages, variables, tools, guard)

    def written(some: Sequence[Message], is_prompt: bool = False) -> Rendered:
        return _written(tokenizer, template, some, variables, tools, guard, is_prompt)

    try:
        if has_tags(template):
            turns, owners = _tagged(written, template, messages, rendered)
        else:
            owners = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
            if only_last:
                owners = [each for each in owners if each == owners[-1] or not messages[each].get("is_learnt", True)]
            turns = assistant_turns(lambda some, is_prompt: written(some, is_prompt).text, messages, owners)
    except UnprovedError as error:
        remedies = [error.remedy]
        may_think = is_variable("enable_thinking", template) and not variables.get("enable_thinking")
        if may_think and any("reasoning" in message for message in messages):
            remedies.insert(0, "set data.thinking: true, because it has reasoning")
        if not only_last and error.is_past:
            remedies.append("set data.turns: last")
        raise RefusedByTemplate(f"{error}; {', or '.join(remedies)}") from None
    learnt = [messages[owner].get("is_learnt", True) for owner in owners]
    inserted = turns.inserted
    start = inserted.start
    changes = Counter(rendered.changes) + Counter(bare=turns.bare, endless=turns.endless, misplaced=turns.misplaced)
    changes["unreasoned"] -= bool(inserted.reasoning)
    cuts = [cut + len(inserted.text) * (cut > start) for cut in rendered.cuts]
    cuts += [start + len(inserted.before) + cut for cut in guard.cuts(inserted.reasoning)]
    return Rendered(
        rendered.text[:start] + inserted.text + rendered.text[start:],
        merged([span for span, is_learnt in zip(turns.spans, learnt, strict=True) if is_learnt]),
        tuple(sorted(cuts)),
        tuple(merged([span for span, is_learnt in zip(turns.spans, learnt, strict=True) if not is_learnt])),
        +changes,
    )


def _tagged(
    written: Callable[..., Rendered], template: str, messages: Sequence[Message], rendered: Rendered
) -> tuple[Turns, list[int]]:
    """Return the turns that a template's tags mark, and the index of each turn's message (0 if none is excluded)."""
    turns, last = Turns(rendered.spans), len(messages) - 1
    if not template.endswith(_packaged_file()):
        plain = [*messages[:-1], {"role": "assistant", "content": STAND_INS[0]}]
        if _has_no_end(rendered, messages[-1]) and _has_no_end(written(plain), plain[-1]):
            reason = "the template's {% generation %} tags end before the turn does, so answers would not end"
            raise UnprovedError(last, reason, "move them in the file of data.template", is_past=False)
        turns = behind_prompts(
            lambda some, is_prompt: written(some, is_prompt).text, messages, rendered.text, rendered.spans
        )
    excluding = next((index for index, message in enumerate(messages) if not message.get("is_learnt", True)), None)
    if excluding is None:
        return turns, [0] * len(turns.spans)
    owners = span_owners(lambda some: len(written(some).spans), messages)
    if len(owners) != len(turns.spans):
        raise UnprovedError(excluding, "the parts that the row excludes from learning cannot be determined")
    return turns, owners


def _bounded(is_prompt: bool) -> AbstractContextManager[None]:
    """Limit the memory of a block; not for prompts, because a server's other threads use memory, too."""
    return nullcontext() if is_prompt else memory_limit(TEMPLATE_BYTES)


def reads_thoughts(template: str) -> bool:
    """Whether a template has no tags and parses reasoning between <think> and </think>."""
    return "</think>" in template and not has_tags(template)


def _has_no_end(rendered: Rendered, last: Message) -> bool:
    """Return True if the last turn that a template marks ends with the content of the last message."""
    content = str(last["content"]).strip()
    learnt = rendered.text[slice(*rendered.spans[-1])] if rendered.spans else ""
    return last["role"] == "assistant" and bool(content) and learnt.rstrip().endswith(content)


@lru_cache(maxsize=64)
def is_variable(name: str, template: str) -> bool:
    """Return True if a template uses a variable of this name that users may set."""
    is_own = name in OWN_VARIABLES or name.endswith(("_token", "_tokens", "_tokens_mask"))
    return name.isidentifier() and not is_own and re.search(rf"\b{name}\b", template) is not None


def merged(spans: Sequence[Span]) -> list[Span]:
    """Sort spans, merge touching ones and drop empty ones."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        elif end > start:
            result.append((start, end))
    return result


def token_spans(offsets: Sequence[Span], spans: Sequence[Span]) -> list[Span]:
    """Convert character spans to token columns. offsets: the characters of each token.

    Raises ValueError if a token crosses the edge of a span.
    """
    starts = [start for start, _ in offsets]
    result = []
    for start, end in spans:
        first, last = bisect_left(starts, start), bisect_left(starts, end)
        if any(column and offsets[column - 1][1] > edge for column, edge in ((first, start), (last, end))):
            raise ValueError("a token crosses the edge of an assistant turn")
        if last > first:
            result.append((first, last))
    return result


def _is_turn_format(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Whether a template renders probes like the packaged one."""
    packaged = packaged_template()
    try:
        return all(render(tokenizer, template, probe)[0] == render(tokenizer, packaged, probe)[0] for probe in PROBES)
    except RefusedByTemplate:
        return False
