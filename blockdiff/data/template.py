"""The text of a conversation and where the assistant speaks in it, by the tokenizer's chat template."""

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
TEMPLATES_REASONING = ("reasoning_content", "thinking")  # what templates call the reasoning of a message
NOTHING: Mapping[str, int] = MappingProxyType({})
VERBATIM = "{%- set verbatim = true -%}"  # the first line of a template that alters nothing
NO_THINKING = {"enable_thinking": False}
# What `render` says itself; special tokens come beside them.
OWN_VARIABLES = ("messages", "conversations", "tools", "documents", "chat_template", "add_generation_prompt")
DIRECTIVE = re.compile(r"%[-_0^#]?[A-Za-z]")  # of strftime
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Rendered by a template to see whether it writes the Gemma 4 turn format.
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
# Turns whose last control token is the end of a turn.
ENDED: tuple[Message, ...] = (
    {"role": "assistant", "content": "b"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "c", "arguments": {}}}]},
)


class RefusedByTemplate(DataError):
    """A chat template refuses a conversation, cannot be computed, or leaves out its tools."""


class EndlessTemplate(RefusedByTemplate):
    """A chat template takes more time or memory than one conversation may."""


class Rendered(NamedTuple):
    """The text of a conversation, the character spans of its assistant, and where it is cut for the tokenizer.

    excluded: the spans of turns that the row marks as not to be learnt;
    changes: the number of messages by what the template left out of them (`blockdiff.data.alterations.WORDS`).
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
    """True for a template that marks what the assistant writes."""
    return GENERATION_TAG.search(template) is not None


def packaged_template(*, verbatim: bool = False) -> str:
    """The chat template of the Gemma 4 turn format, with generation tags.

    With `verbatim` it writes every message as it is, as a turn of its own.
    """
    return f"{VERBATIM}\n{_packaged_file()}" if verbatim else _packaged_file()


def is_template_file(source: str) -> bool:
    """True where `data.template` is the path of a file, which has a dot or a slash, and not a name."""
    return bool(Path(source).suffix) or "/" in source


def give_template(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Give a tokenizer the chat template of a file, or the one that it keeps under a name beside others.

    `tokenizer` leaves it as it is, and so does `verbatim`, which `training_template` takes. Raises DataError where
    there is no such template, and where it cannot write a question.
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
        raise DataError(f"data.template: {source!r} is no file and no template here (there are: {listed})")
    try:
        render(tokenizer, text, [QUESTION], is_prompt=True)
    except RefusedByTemplate as error:
        raise DataError(f"data.template: {source}: it cannot write a question ({error}); correct it") from None
    tokenizer.chat_template = text


def own_template(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Message] | None = None) -> str | None:
    """The chat template of a tokenizer, of several the one for conversations with these tools; None where it has none.

    Raises DataError where it has several and none is the default.
    """
    if not tokenizer.chat_template:
        return None
    try:
        return str(tokenizer.get_chat_template(tools=list(tools) if tools else None))
    except ValueError:
        names = ", ".join(tokenizer.chat_template)
        raise DataError(
            f"none of the tokenizer's chat templates ({names}) is the default; name one as data.template, or make it "
            "chat_template.jinja beside the weights"
        ) from None


def training_template(
    tokenizer: PreTrainedTokenizerBase, tools: Sequence[Message] | None = None, *, verbatim: bool = False
) -> str:
    """The template that writes conversations of training with these tools: the tokenizer's own, or the packaged one.

    The packaged one is used where the tokenizer's own writes the Gemma 4 turn format without tags, as the released one
    does, and where there is none but the vocabulary has the turn tokens. `verbatim` always takes the packaged one, and
    needs the turn tokens. Raises DataError where there is no template.
    """
    template = own_template(tokenizer, tools)
    has_turns = all(token in tokenizer.get_vocab() for token in TURN_EDGES)
    if verbatim:
        if not has_turns:
            raise DataError(
                f"data.template: verbatim writes turns with {' and '.join(TURN_EDGES)}, which the tokenizer does not "
                "have; leave it out"
            )
        return packaged_template(verbatim=True)
    if template is None:
        if has_turns:
            return packaged_template()
        raise DataError(
            "the tokenizer has no chat template, so conversations cannot be written; name a file with one as "
            "data.template, or write rows of prompt and response and leave data.chat out"
        )
    return packaged_template() if not has_tags(template) and _is_turn_format(tokenizer, template) else template


def dated(template: str, day: date) -> str:
    """The template with a `strftime_now` of its own, which writes this day and not today's; others stay as they are."""
    if not asks_date(template):
        return template
    directives = sorted({*DIRECTIVE.findall(template)}, key=len, reverse=True)
    values = "".join(f" | replace({mark!r}, {json.dumps(day.strftime(mark))})" for mark in directives)
    return f"{{% macro strftime_now(format) %}}{{{{ format{values} }}}}{{% endmacro %}}\n{template}"


def asks_date(template: str) -> bool:
    """True for a template that writes the date, as Llama 3.2's."""
    return "strftime_now" in template


def turn_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The control tokens that end what the assistant writes: a turn, and a turn that waits for the answer of a tool.

    Empty where no template marks the assistant's turns, or where it ends them in plain text.
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
    """Return the tokens that the chat template of training writes behind an answer; none if it marks no answer."""
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
    """The text of a conversation, and the character spans the template marks, in their order.

    variables: what else the template is told; is_prompt: it ends where the assistant begins, and no spans are found.
    Raises RefusedByTemplate, also for tools, calls and answers that the template leaves out.
    """
    rendered = _written(tokenizer, template, messages, variables, tools, guard, is_prompt)
    if template.endswith(_packaged_file()):  # what it leaves out is known, and a probe takes as long as the rendering
        return rendered._replace(changes={} if template.startswith(VERBATIM) else _unreasoned(messages))
    probe = Probe(messages, tools, is_prompt)
    if not probe.may_tell(rendered.text):
        return rendered
    try:
        lost = probe.left_out(
            _written(tokenizer, template, probe.messages, variables, probe.tools, OPEN, is_prompt).text
        )
    except RefusedByTemplate:  # it wants names that it knows
        lost = probe.unseen(rendered.text)
    for part in lost:
        if part.key is None:
            raise RefusedByTemplate(f"it does not write {part.name}")
    return rendered._replace(changes=Counter(part.key for part in lost if part.key))


def _unreasoned(messages: Sequence[Message]) -> dict[str, int]:
    """The count of the reasoning before the last question, which the packaged template leaves out."""
    last = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=0)
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
    """`render`, whatever the template leaves out; arguments of calls are JSON text for a template that wants texts."""
    from transformers.utils.chat_template_utils import render_jinja_template

    written = for_template(messages)
    names = [name for name in TEMPLATES_REASONING if name in template]
    written = [each | dict.fromkeys(names, each["reasoning"]) if "reasoning" in each else each for each in written]
    asked = [written, None if tools is None else list(tools), dict(variables)]
    (shown, declared, told), hidden = guard.hide(asked)
    try:
        with time_limit(TEMPLATE_SECONDS, TEMPLATE_BYTES), _bounded(is_prompt):
            texts, spans = render_jinja_template(
                conversations=[shown],
                tools=declared,
                chat_template=template,
                # Two threads cannot ask for spans at once, and prompts, which a server makes in threads, need none.
                return_assistant_tokens_mask=not is_prompt and has_tags(template),
                add_generation_prompt=is_prompt,
                **told,
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
    except Exception as error:  # a template is somebody's program: it may raise anything
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
    """`render` with the spans of the assistant whether or not the template has tags; RefusedByTemplate without proof.

    only_last: without tags the last of the assistant's messages has to be found, and those that are not to be learnt.
    """
    rendered = render(tokenizer, template, messages, variables, tools, guard)

    def written(some: Sequence[Message], is_prompt: bool = False) -> Rendered:
        return _written(tokenizer, template, some, variables, tools, guard, is_prompt)

    try:
        if has_tags(template):
            found, owners = _tagged(written, template, messages, rendered)
        else:
            owners = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
            if only_last:
                owners = [each for each in owners if each == owners[-1] or not messages[each].get("is_learnt", True)]
            found = assistant_turns(lambda some, is_prompt: written(some, is_prompt).text, messages, owners)
    except UnprovedError as error:
        remedies = [error.remedy]
        is_told = is_variable("enable_thinking", template) and not variables.get("enable_thinking")
        if is_told and any("reasoning" in message for message in messages):
            remedies.insert(0, "set data.thinking: true, as it has reasoning")
        if not only_last and error.is_past:
            remedies.append("train on data.turns: last")
        raise RefusedByTemplate(f"{error}; {', or '.join(remedies)}") from None
    learnt = [messages[owner].get("is_learnt", True) for owner in owners]
    place, inserted = found.inserted.place, found.inserted
    changes = Counter(rendered.changes) + Counter(bare=found.bare, endless=found.endless, misplaced=found.misplaced)
    changes["unreasoned"] -= bool(inserted.reasoning)
    cuts = [at + len(inserted.text) * (at > place) for at in rendered.cuts]
    cuts += [place + len(inserted.before) + at for at in guard.cuts(inserted.reasoning)]
    return Rendered(
        rendered.text[:place] + inserted.text + rendered.text[place:],
        merged([span for span, kept in zip(found.spans, learnt, strict=True) if kept]),
        tuple(sorted(cuts)),
        tuple(merged([span for span, kept in zip(found.spans, learnt, strict=True) if not kept])),
        +changes,
    )


def _tagged(
    written: Callable[..., Rendered], template: str, messages: Sequence[Message], rendered: Rendered
) -> tuple[Turns, list[int]]:
    """The turns that a template marks with tags, and the place of each one's message (0 if the row excludes none)."""
    found, last = Turns(rendered.spans), len(messages) - 1
    if not template.endswith(_packaged_file()):
        plain = [*messages[:-1], {"role": "assistant", "content": STAND_INS[0]}]
        if _has_no_end(rendered, messages[-1]) and _has_no_end(written(plain), plain[-1]):
            reason = "the template's {% generation %} tags end before the turn does, so answers would not end"
            raise UnprovedError(last, reason, "move them in the file that data.template names", is_past=False)
        found = behind_prompts(
            lambda some, is_prompt: written(some, is_prompt).text, messages, rendered.text, rendered.spans
        )
    excluding = next((index for index, message in enumerate(messages) if not message.get("is_learnt", True)), None)
    if excluding is None:
        return found, [0] * len(found.spans)
    owners = span_owners(lambda some: len(written(some).spans), messages)
    if len(owners) != len(found.spans):
        raise UnprovedError(excluding, "it cannot be said which of its parts the row excludes from learning")
    return found, owners


def _bounded(is_prompt: bool) -> AbstractContextManager[None]:
    """A bound on memory in one operation: not for prompts, which a server makes beside threads that use much."""
    return nullcontext() if is_prompt else memory_limit(TEMPLATE_BYTES)


def reads_thoughts(template: str) -> bool:
    """True for a template without tags that knows reasoning between <think> and </think>."""
    return "</think>" in template and not has_tags(template)


def _has_no_end(rendered: Rendered, last: Message) -> bool:
    """True if the last turn that a template marks ends with the content of the last message."""
    content = str(last["content"]).strip()
    learnt = rendered.text[slice(*rendered.spans[-1])] if rendered.spans else ""
    return last["role"] == "assistant" and bool(content) and learnt.rstrip().endswith(content)


@lru_cache(maxsize=64)
def is_variable(name: str, template: str) -> bool:
    """True where a template uses a variable of this name, and it is one that a person may set."""
    is_own = name in OWN_VARIABLES or name.endswith(("_token", "_tokens", "_tokens_mask"))
    return name.isidentifier() and not is_own and re.search(rf"\b{name}\b", template) is not None


def merged(spans: Sequence[Span]) -> list[Span]:
    """Spans in order, those that touch made one and empty ones left out."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        elif end > start:
            result.append((start, end))
    return result


def token_spans(offsets: Sequence[Span], spans: Sequence[Span]) -> list[Span]:
    """Character spans as token columns, given every token's character offsets.

    Raises ValueError when a token reaches over the edge of a span, for then no column is exact.
    """
    starts = [start for start, _ in offsets]
    result = []
    for start, end in spans:
        first, last = bisect_left(starts, start), bisect_left(starts, end)
        if any(column and offsets[column - 1][1] > edge for column, edge in ((first, start), (last, end))):
            raise ValueError("a token reaches over the edge of an assistant turn")
        if last > first:
            result.append((first, last))
    return result


def _is_turn_format(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """True for a template that writes what the packaged one writes."""
    packaged = packaged_template()
    try:
        return all(render(tokenizer, template, probe)[0] == render(tokenizer, packaged, probe)[0] for probe in PROBES)
    except RefusedByTemplate:
        return False
