"""The text of a conversation and where the assistant speaks in it, by the tokenizer's chat template."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from blockdiff.data.assistant_spans import UnprovedError, assistant_spans, span_owners
from blockdiff.data.control_tokens import OPEN, Guard
from blockdiff.data.image_parts import for_template
from blockdiff.data.messages import Message, left_out_tool
from blockdiff.errors import DataError
from blockdiff.time_limit import TEMPLATE_SECONDS, time_limit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]

TURN_EDGES = ("<|turn>", "<turn|>")
TURN_TOKENS = (*TURN_EDGES, "<|channel>", "<channel|>", "<|think|>")  # the Gemma 4 turn format
TOOL_TOKENS = (
    *("<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'),
)
VERBATIM = "{%- set verbatim = true -%}"  # the first line of a template that alters nothing
NO_THINKING = {"enable_thinking": False}
# What `render` says itself; special tokens come beside them.
OWN_VARIABLES = ("messages", "conversations", "tools", "documents", "chat_template", "add_generation_prompt")
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


class Rendered(NamedTuple):
    """The text of a conversation, the character spans of its assistant, and where it is cut for the tokenizer.

    `excluded` are the spans of turns that the row marks as not to be learnt.
    """

    text: str
    spans: list[Span]
    cuts: tuple[int, ...] = ()
    excluded: tuple[Span, ...] = ()


def packaged_template(*, verbatim: bool = False) -> str:
    """The chat template of the Gemma 4 turn format, with generation tags.

    With `verbatim` it writes every message as it is, as a turn of its own.
    """
    text = (files("blockdiff.data") / "templates" / "gemma4.jinja").read_text(encoding="utf-8")
    return f"{VERBATIM}\n{text}" if verbatim else text


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


def own_template(tokenizer: PreTrainedTokenizerBase, tools: list[Message] | None = None) -> str | None:
    """The chat template of a tokenizer, of several the one for conversations with these tools; None where it has none.

    Raises DataError where it has several and none is the default.
    """
    if not tokenizer.chat_template:
        return None
    try:
        return str(tokenizer.get_chat_template(tools=tools))
    except ValueError:
        names = ", ".join(tokenizer.chat_template)
        raise DataError(
            f"none of the tokenizer's chat templates ({names}) is the default; name one as data.template, or make it "
            "chat_template.jinja beside the weights"
        ) from None


def training_template(tokenizer: PreTrainedTokenizerBase, *, verbatim: bool = False) -> str:
    """The template that writes conversations of training: the tokenizer's own, or the packaged one.

    The packaged one is used where the tokenizer's own writes the Gemma 4 turn format without tags, as the released one
    does, and where there is none but the vocabulary has the turn tokens. `verbatim` always takes the packaged one, and
    needs the turn tokens. Raises DataError where there is no template.
    """
    template = own_template(tokenizer)
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
    has_tags = GENERATION_TAG.search(template) is not None
    return packaged_template() if not has_tags and _is_turn_format(tokenizer, template) else template


def turn_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The control tokens that end what the assistant writes: a turn, and a turn that waits for the answer of a tool.

    Empty where no template marks the assistant's turns, or where it ends them in plain text.
    """
    ends = []
    for turn in ENDED:
        try:
            text, spans, *_ = marked(tokenizer, training_template(tokenizer), [QUESTION, turn])
        except DataError:  # no such template, or one that refuses tools
            continue
        written = tokenizer.encode(text[slice(*spans[-1])] if spans else "", add_special_tokens=False)
        ends += [token for token in written if token in tokenizer.added_tokens_decoder][-1:]
    return tuple(dict.fromkeys(ends))


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
    Raises RefusedByTemplate.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    written = for_template(messages)
    if "reasoning_content" in template:  # the name that Qwen3 and others have for it
        written = [each | {"reasoning_content": each["reasoning"]} if "reasoning" in each else each for each in written]
    asked = [written, None if tools is None else list(tools), dict(variables)]
    (shown, declared, told), hidden = guard.hide(asked)
    try:
        with time_limit(TEMPLATE_SECONDS):
            texts, spans = render_jinja_template(
                conversations=[shown],
                tools=declared,
                chat_template=template,
                # Two threads cannot ask for spans at once, and prompts, which a server makes in threads, need none.
                return_assistant_tokens_mask=not is_prompt and bool(GENERATION_TAG.search(template)),
                add_generation_prompt=is_prompt,
                **told,
                **tokenizer.special_tokens_map,
            )
    except Exception as error:  # a template is somebody's program: it may raise anything
        raise RefusedByTemplate(str(error) or type(error).__name__) from None
    text, cuts = guard.show(texts[0], hidden)
    if name := left_out_tool(text, messages, tools):
        raise RefusedByTemplate(f"it does not write the tool {name!r}")
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

    only_last: the last of the assistant's messages has to be found, and the others are left out without tags.
    """

    def of(some: Sequence[Message], is_prompt: bool = False) -> Rendered:
        return render(tokenizer, template, some, variables, tools, guard, is_prompt)

    rendered = of(messages)
    assistants = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    is_whole = all(message.get("is_learnt", True) for message in messages)
    try:
        if not GENERATION_TAG.search(template):
            only_last = only_last and is_whole
            spans = assistant_spans(lambda some, is_prompt: of(some, is_prompt).text, messages, only_last)
            owners = assistants[-1:] if only_last else assistants
        else:
            spans = rendered.spans
            owners = [0] * len(spans) if is_whole else span_owners(lambda some: len(of(some).spans), messages)
            if len(owners) != len(spans):
                raise UnprovedError("it cannot be said which of its parts the row excludes from learning")
    except UnprovedError as error:
        remedies = ["name a file as data.template that is the same with {% generation %} tags around what is learnt"]
        if any("reasoning" in message for message in messages) and not variables.get("enable_thinking"):
            remedies.insert(0, "set data.thinking: true, as it has reasoning")
        if not only_last:
            remedies.append("train on data.turns: last")
        raise RefusedByTemplate(f"{error}; {', or '.join(remedies)}") from None
    learnt = [messages[owner].get("is_learnt", True) for owner in owners]
    return rendered._replace(
        spans=merged([span for span, kept in zip(spans, learnt, strict=True) if kept]),
        excluded=tuple(merged([span for span, kept in zip(spans, learnt, strict=True) if not kept])),
    )


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
