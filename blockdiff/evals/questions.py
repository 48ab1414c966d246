"""Tasks: rows as questions, the test of an answer, and the largest length of an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from blockdiff.data.control_tokens import why_not_encoded
from blockdiff.data.messages import ImageSource
from blockdiff.data.rows import Row
from blockdiff.errors import DataError
from blockdiff.sampling.request import Request

if TYPE_CHECKING:
    from blockdiff.data.chat import Encoder
    from blockdiff.sampling.sampler import Sampler

Message = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """A row's last response and everything before it.

    place: the index among the rows; it keys the draws. tokens: the prompt as training lays it out; length: the number
    of tokens of the reference and its end in that layout; both are None without an encoder. images: the images of a
    prompt that is text or tokens.
    """

    place: int
    where: str
    id: str | int
    prompt: str | tuple[Message, ...]
    reference: str
    has_reasoning: bool = False
    tokens: tuple[int, ...] | None = None
    length: int | None = None
    tools: tuple[Message, ...] | None = None
    images: tuple[ImageSource, ...] = ()

    @property
    def last_message(self) -> str:
        """The prompt if it is text, else the text of the conversation's last message."""
        if isinstance(self.prompt, str):
            return self.prompt
        content = self.prompt[-1]["content"]
        return "".join(part.get("text", "") for part in content) if isinstance(content, list) else str(content)

    def request(self, thinking: bool = False, best_of: int = 1, allow_control_tokens: bool = False) -> Request:
        """Return the sampler's request.

        If `tokens` are known they are sent. They already settle `thinking` and `allow_control_tokens`, which then have
        no effect.
        """
        if self.tokens is not None:
            return Request(self.place, tokens=self.tokens, images=self.images, best_of=best_of)
        request = Request(self.place, thinking=thinking, best_of=best_of, allow_control_tokens=allow_control_tokens)
        if isinstance(self.prompt, str):
            return replace(request, prompt=self.prompt, images=self.images)
        return replace(request, messages=self.prompt, tools=self.tools)


@dataclass(frozen=True)
class Task:
    """A task: the test of its rows, and of texts that answer them.

    name: used by the command line and recipes; is_solved: whether a text answers a question; check: raises DataError if
    a question does not belong to this task; facts: further entries of an answer's record (booleans are counted, numbers
    averaged); group: the fact by whose values results are also reported; is_open: whether a text longer than the
    reference can be right.
    """

    name: str
    is_solved: Callable[[Question, str], bool]
    check: Callable[[Question], object] = lambda question: None
    facts: Callable[[Question, str], dict[str, Any]] = lambda question, text: {}
    group: str | None = None
    is_open: bool = False

    def solves(self, question: Question, text: str) -> bool:
        """Return whether a text answers a question; DataError if `is_solved` returns anything but a boolean."""
        result: Any = self.is_solved(question, text)
        is_solved = result.item() if hasattr(result, "item") else result  # numpy and torch have booleans of their own
        if not isinstance(is_solved, bool):
            raise DataError(
                f"task {self.name}: is_solved gave {result!r:.60}, and it has to be True or False; give shares as "
                "`facts`, or train on them as a reward"
            )
        return is_solved


def check_solved(name: str, is_solved: Callable[[Question, str], bool], question: Question) -> None:
    """Raise DataError if the row's response does not solve its prompt. name: the task, for the message."""
    try:
        fits = is_solved(question, question.reference)
    except DataError as error:
        raise DataError(f"{question.where}: {error}") from None
    if not fits:
        raise DataError(
            f"{question.where}: not a {name} row; its response has to solve its prompt (blockdiff data {name})"
        )


def questions_of(rows: Sequence[Row | Question], task: Task, encoder: Encoder | None = None) -> list[Question]:
    """Return the rows as questions; with `encoder` they have their tokens.

    Raises DataError if there are no rows, or if one does not belong to the task.
    """
    if not rows:
        raise DataError("no rows to evaluate; name a file with at least one")
    questions = [row if isinstance(row, Question) else _question(row, index) for index, row in enumerate(rows)]
    for question in questions:
        task.check(question)
    raw_rows = [row for row in rows if isinstance(row, Row)]
    return questions if encoder is None else _laid_out(questions, raw_rows, encoder)


def longest_response(sampler: Sampler, questions: Sequence[Question], task: Task, thinking: bool = False) -> int:
    """Return the number of new tokens to allow: the longest reference with its end.

    At least the sampler's `max_new_tokens` if the task `is_open` or reasoning (`thinking`) is written, whose length no
    reference shows.
    """
    lengths = [question.length for question in questions if question.length is not None]
    if len(lengths) < len(questions):
        lengths = [_tokens(sampler, question) + 1 for question in questions]
    # Without an encoder the tokens that the chat template puts around reasoning are unknown.
    thinks = thinking or any(question.has_reasoning and question.length is None for question in questions)
    is_open = task.is_open or thinks
    return max(*lengths, sampler.generation.max_new_tokens) if is_open else max(lengths)


def _question(row: Row, index: int) -> Question:
    name = row.id if row.id is not None else index
    if row.messages is None:
        return Question(index, row.where, name, row.prompt or "", row.response or "", images=row.images)
    roles = [message["role"] for message in row.messages]
    end = len(roles) - roles[::-1].index("assistant")
    start = end - 1
    while start and roles[start - 1] == "assistant":  # one turn in several messages
        start -= 1
    if not start:
        raise DataError(
            f"{row.where}: nothing comes before the assistant's message, so nothing is asked; put the question first"
        )
    response = row.messages[start:end]
    if any("tool_calls" in message for message in response):
        raise DataError(f"{row.where}: the last response calls a tool, and no task compares calls; leave the row out")
    reference = "".join(message["content"].strip() for message in response)
    has_reasoning = any("reasoning" in message for message in response)
    return Question(index, row.where, name, tuple(row.messages[:start]), reference, has_reasoning, tools=row.tools)


def _laid_out(questions: list[Question], rows: Sequence[Row], encoder: Encoder) -> list[Question]:
    examples, _ = replace(encoder, max_length=None).encode(rows)
    laid_out = []
    for question, row, example in zip(questions, rows, examples, strict=True):
        start, end = example.responses[-1]
        images = tuple(encoder.reader.located(source, row.where) for source in row.sources) if encoder.reader else ()
        laid_out.append(replace(question, tokens=tuple(example.tokens[:start]), length=end - start, images=images))
    return laid_out


def _tokens(sampler: Sampler, question: Question) -> int:
    """Return the number of tokens of a reference; without a tokenizer the number of characters, an upper bound."""
    if sampler.tokenizer is None:
        return len(question.reference)
    try:
        return len(sampler.tokenizer(question.reference, add_special_tokens=False)["input_ids"])
    except Exception as error:  # tokenizers raises plain Exceptions, for example on a character it lacks
        why = why_not_encoded(error, question.reference, sampler.tokenizer)
        raise DataError(f"{question.where}: the tokenizer cannot encode the response ({why})") from None
