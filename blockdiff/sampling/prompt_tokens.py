"""From what a request asks, in words or messages, to the tokens of its prompt."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from blockdiff.data.control_tokens import Guard, cut, guard_of, why_not_encoded
from blockdiff.data.messages import BadRow, checked_messages, checked_tools, left_out_tool
from blockdiff.errors import DataError, RequestError
from blockdiff.time_limit import TEMPLATE_SECONDS, time_limit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from blockdiff.sampling.request import Request

Message = Mapping[str, Any]


def prompt_of(request: Request, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> tuple[str, list[int]]:
    """The prompt of a request as text ("" where it came as tokens) and tokens; RequestError where it is none."""
    request.check()
    if request.tokens is not None:
        text, tokens = "", list(request.tokens)
    elif tokenizer is None:
        raise RequestError("a prompt in words needs a tokenizer, and the sampler has none")
    elif request.messages is not None:
        text, tokens = chat_tokens(request, tokenizer)
    else:
        text, tokens = raw_tokens(request, tokenizer)
        bos = tokenizer.bos_token_id
        if bos is not None and tokens[:1] != [bos]:
            tokens = [bos, *tokens]
    if not tokens:
        raise RequestError("the prompt is empty")
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise RequestError(f"token {token!r} is not one of the model's {vocab_size} ids")
    return text, tokens


def conversation_of(request: Request) -> tuple[list[Message], list[Message] | None]:
    """The messages and tools of a request in the form that chat templates read; RequestError says what is wrong."""
    try:
        messages = checked_messages(request.messages, "messages")
        tools = checked_tools(request.tools)
    except BadRow as error:
        raise RequestError(str(error)) from None
    if not messages:
        raise RequestError("messages must be a list of {role, content} objects with at least one entry")
    if messages[-1]["role"] == "assistant":
        raise RequestError("the last message is the assistant's, so nothing is left to answer; leave it out")
    return list(messages), None if tools is None else list(tools)


def chat_tokens(request: Request, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int]]:
    """A request's conversation as the chat template writes it, and its tokens; RequestError where there are none."""
    if not tokenizer.chat_template:
        raise RequestError("the tokenizer has no chat template; give a raw prompt instead of messages")
    guard = _guard(tokenizer, request)
    (messages, tools), hidden = guard.hide(conversation_of(request))
    options: dict[str, Any] = {"tools": tools} if tools else {}
    if request.thinking:  # not every template knows the word; one that does writes the same without it as with False
        options["enable_thinking"] = True
    try:
        with time_limit(TEMPLATE_SECONDS):
            text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options))
    except Exception as error:  # a template is somebody's program: it may raise anything
        raise RequestError(f"the chat template refuses these messages: {str(error) or type(error).__name__}") from error
    if name := left_out_tool(text, messages, tools):
        raise RequestError(f"the chat template does not write the tool {name!r}; leave tools out, or use another one")
    try:
        return _tokens(*guard.show(text, hidden), tokenizer, guard)
    except DataError as error:
        raise RequestError(f"the prompt cannot be tokenised: {error}") from None


def raw_tokens(request: Request, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int]]:
    """A request's raw prompt and its tokens, without bos; it warns where the prompt spells a control token."""
    text, guard = str(request.prompt), _guard(tokenizer, request)
    try:
        cuts = guard.cuts(text)
        if cuts:
            warnings.warn(
                f"a prompt spells the control token {guard.spelt(text)}, which is read as text; --allow-control-tokens "
                "(Request.allow_control_tokens) makes it the token",
                stacklevel=2,
            )
        return _tokens(text, cuts, tokenizer, guard)
    except DataError as error:
        raise RequestError(f"the prompt cannot be tokenised: {error}") from None


def text_tokens(text: str, request: Request, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of another text of a request, read as its prompt is; DataError where there are none."""
    guard = _guard(tokenizer, request)
    return _tokens(text, guard.cuts(text), tokenizer, guard)[1]


def _guard(tokenizer: PreTrainedTokenizerBase, request: Request) -> Guard:
    template = str(tokenizer.chat_template or "")
    return _guard_of(tokenizer, len(tokenizer), template, "allow" if request.allow_control_tokens else "text")


# The number of tokens is there because tokens can be added to a tokenizer later.
_guard_of = lru_cache(maxsize=4)(lambda tokenizer, size, template, control: guard_of(tokenizer, template, control))


def _tokens(text: str, cuts: Sequence[int], tokenizer: PreTrainedTokenizerBase, guard: Guard) -> tuple[str, list[int]]:
    """A text and its tokens, in pieces where it is cut."""
    try:
        pieces = [list(tokenizer(piece, add_special_tokens=False)["input_ids"]) for piece in cut(text, cuts)]
    except Exception as error:  # tokenizers raises plain Exceptions, for example on a character it lacks
        raise DataError(why_not_encoded(error, text, tokenizer)) from error
    tokens = [token for piece in pieces for token in piece]
    guard.check(text, cuts, tokens, tokenizer.convert_ids_to_tokens([piece[0] for piece in pieces[1:] if piece]))
    return text, tokens
