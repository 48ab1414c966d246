"""Running a task: rows become questions, a sampler answers them, and what is right is counted with what it cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from blockdiff.data.rows import Row
from blockdiff.errors import DataError
from blockdiff.objective import evaluating
from blockdiff.parallel.ranks import Ranks
from blockdiff.sampling.request import Request, Result

if TYPE_CHECKING:
    from blockdiff.data.chat import Encoder
    from blockdiff.sampling.sampler import Sampler

ALONE = Ranks(torch.device("cpu"))
Message = dict[str, Any]
CLOSES_REASONING = "<channel|>"


@dataclass(frozen=True)
class Question:
    """A row's last response and all that comes before it.

    `place` among the rows addresses the draws. `tokens` is the prompt as training lays it out, and `length` how many
    tokens the reference and its end take there; without an encoder both are unknown.
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

    @property
    def last_message(self) -> str:
        """The prompt, or the last message of the conversation."""
        return self.prompt if isinstance(self.prompt, str) else str(self.prompt[-1]["content"])

    def request(self) -> Request:
        """The request that the sampler answers."""
        if self.tokens is not None:
            return Request(self.place, tokens=self.tokens)
        if isinstance(self.prompt, str):
            return Request(self.place, prompt=self.prompt)
        return Request(self.place, messages=self.prompt, tools=self.tools)


@dataclass(frozen=True)
class Task:
    """Which rows are of a task and which texts are right.

    name: how the command line and recipes call it; is_solved: whether a text answers a question; check: raises
    DataError naming a question that is none of this task; facts: what else the record of an answer says; is_open:
    whether a text longer than the reference can be right.
    """

    name: str
    is_solved: Callable[[Question, str], bool]
    check: Callable[[Question], object] = lambda question: None
    facts: Callable[[Question, str], dict[str, Any]] = lambda question, text: {}
    is_open: bool = False


def evaluate(
    sampler: Sampler,
    rows: Sequence[Row],
    task: Task,
    *,
    ranks: Ranks = ALONE,
    batch_size: int = 100,
    seed: int = 0,
    max_steps: int | None = None,
    max_new_tokens: int | None = None,
    encoder: Encoder | None = None,
) -> dict[str, Any]:
    """Answer the question of every row by sampling and count what is right; the ranks share the rows.

    Every rank gets `task, count, solved, solved_share, errors, steps_per_canvas` (mean over canvases),
    `tokens_per_forward` (tokens up to eos per denoising step of their row), `seconds` (until the last rank is done),
    `seed` and `records` (one per row, in order). Draws are addressed by `seed` and a row's place, so the number of
    ranks changes nothing beyond rounding. The model's modes and gradients stay as they are.

    The longest reference bounds the responses, where longer ones can be right the sampler's own limit, unless
    `max_new_tokens` is given. With `encoder` a prompt has the tokens that training gives it (system prompt, thinking).
    Raises DataError for rows that are not of the task, and Interrupted between canvases when a rank is to stop.
    """
    questions = questions_of(rows, task, encoder)
    started = time.perf_counter()
    mine = questions[ranks.rank :: ranks.world]
    with evaluating(sampler.model), ranks.at_own_pace("the sampling of prompts") as look:
        results = sampler.generate(
            [question.request() for question in mine],
            seed=seed,
            max_new_tokens=max_new_tokens or longest_response(sampler, questions, task),
            max_steps=max_steps,
            batch_size=batch_size,
            on_canvas=lambda _: look(),
        )
        answers = [_record(q, result, task, sampler) for q, result in zip(mine, results, strict=True)]
    dealt = ranks.gather(answers)
    records = [dealt[place % ranks.world][place // ranks.world] for place in range(len(questions))]
    seconds = time.perf_counter() - started
    return {"task": task.name, **_summary(records), "seconds": seconds, "seed": seed, "records": records}


def questions_of(rows: Sequence[Row], task: Task, encoder: Encoder | None = None) -> list[Question]:
    """The question of every row; raises DataError for rows that the task does not take, and for no rows."""
    if not rows:
        raise DataError("no rows to evaluate; name a file with at least one")
    questions = [_question(row, place) for place, row in enumerate(rows)]
    for question in questions:
        task.check(question)
    return questions if encoder is None else _laid_out(questions, rows, encoder)


def longest_response(sampler: Sampler, questions: Sequence[Question], task: Task) -> int:
    """The most new tokens a response needs: those of the longest reference and its end, or more if `is_open`."""
    lengths = [question.length for question in questions if question.length is not None]
    if len(lengths) < len(questions):
        lengths = [_tokens(sampler, question) + 1 for question in questions]
    # Without an encoder it is not known what the chat template puts around reasoning.
    is_open = task.is_open or any(question.has_reasoning and question.length is None for question in questions)
    return max(*lengths, sampler.generation.max_new_tokens) if is_open else max(lengths)


def _summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`count, solved, solved_share, errors, steps_per_canvas, tokens_per_forward` of some records."""
    solved = sum(bool(record["is_solved"]) for record in records)
    steps = [count for record in records for count in record["steps"]]
    return {
        "count": len(records),
        "solved": solved,
        "solved_share": solved / len(records),
        "errors": sum(record["finish_reason"] == "error" for record in records),
        "steps_per_canvas": sum(steps) / max(1, len(steps)),
        "tokens_per_forward": sum(record["length"] for record in records) / max(1, sum(steps)),
    }


def _question(row: Row, place: int) -> Question:
    name = row.id if row.id is not None else place
    if row.messages is None:
        return Question(place, row.where, name, row.prompt or "", row.response or "")
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
    return Question(place, row.where, name, tuple(row.messages[:start]), reference, has_reasoning, tools=row.tools)


def _laid_out(questions: list[Question], rows: Sequence[Row], encoder: Encoder) -> list[Question]:
    examples, _ = replace(encoder, max_length=None).encode(rows)
    laid_out = []
    for question, example in zip(questions, examples, strict=True):
        start, end = example.responses[-1]
        laid_out.append(replace(question, tokens=tuple(example.tokens[:start]), length=end - start))
    return laid_out


def _tokens(sampler: Sampler, question: Question) -> int:
    """How many tokens a reference takes; characters bound them where there is no tokenizer."""
    if sampler.tokenizer is None:
        return len(question.reference)
    try:
        return len(sampler.tokenizer(question.reference, add_special_tokens=False)["input_ids"])
    except Exception as error:  # tokenizers raises plain Exceptions, for example on a character it lacks
        raise DataError(f"{question.where}: the tokenizer cannot encode the response ({error})") from None


def _record(question: Question, result: Result, task: Task, sampler: Sampler) -> dict[str, Any]:
    text = _without_reasoning(result, sampler)
    record = {
        "id": question.id,
        "prompt": question.prompt if isinstance(question.prompt, str) else list(question.prompt),
        "reference": question.reference,
        "text": result.text,
        "is_solved": result.error is None and task.is_solved(question, text),
        **task.facts(question, text),
        "steps": list(result.steps),
        "length": len(result.tokens),
        "finish_reason": result.finish_reason,
    }
    return record if result.error is None else {**record, "error": result.error}


def _without_reasoning(result: Result, sampler: Sampler) -> str:
    """The text without the reasoning before it, which the reference does not have."""
    tokenizer = sampler.tokenizer
    if tokenizer is None or result.error is not None:
        return result.text
    mark = tokenizer.convert_tokens_to_ids(CLOSES_REASONING)
    if mark is None or mark == tokenizer.unk_token_id or mark not in result.tokens:
        return result.text
    after = result.tokens[len(result.tokens) - result.tokens[::-1].index(mark) :]
    return str(tokenizer.decode(after, skip_special_tokens=True))
