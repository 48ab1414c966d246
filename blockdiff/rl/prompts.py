"""The rows that reinforcement learning answers: each row's question, and the row as in its file, for rewards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from blockdiff.data.dataset import Watch, prompt_form
from blockdiff.data.rows import Row, check_row
from blockdiff.data.sources import Source, open_source
from blockdiff.errors import DataError
from blockdiff.evals.questions import Question

RESPONSES = ("response", "completion", "output")  # columns in which a row may have a response


@dataclass(frozen=True)
class Prompt:
    """A row: its values by column, which rewards receive, and its question."""

    value: Mapping[str, Any]
    question: Question


class Prompts:
    """The rows of all sources, one source after the other; `fingerprint` identifies rows, sizes and weights.

    sizes: the number of rows of each source (none: a single source); weights: the share of each source in the mixture.
    """

    def __init__(self, rows: Sequence[Prompt], sizes: Sequence[int] = (), weights: Sequence[float] = (1.0,)) -> None:
        self.rows, self.sizes, self.weights = rows, sizes or [len(rows)], weights
        contents = [(row.value, row.question.prompt, row.question.reference, row.question.tools) for row in rows]
        text = json.dumps([contents, self.sizes, self.weights], sort_keys=True, default=str)
        self.fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def summary(self) -> str:
        """The number of prompts, in words."""
        return f"{len(self):,} prompts"

    @property
    def unread_keys(self) -> str:
        """Always empty: a reward may read any key of a row."""
        return ""

    @property
    def has_conversations(self) -> bool:
        """True if the chat template writes some of the prompts."""
        return self.form != "raw"

    @property
    def form(self) -> Literal["raw", "chat"] | None:
        """The form of the prompts: raw text or chat; None if there are both."""
        return prompt_form(sum(not isinstance(row.question.prompt, str) for row in self.rows), len(self.rows))


def read_prompts(
    sources: Sequence[Source], is_chat: bool, system: str | None, watch: Watch = lambda rows: rows
) -> Prompts:
    """Read the rows of sources as prompts.

    Rows need no response; if a row has one, it is the reference for tasks that compare. is_chat: a text prompt becomes
    a user's message; system: a system message for conversations without one; watch: wraps the iteration over rows.
    Raises DataError "file:line: reason; what to do" for a row that asks nothing, a row with images, which rollouts do
    not support, and a source without rows.
    """
    prompts: list[Prompt] = []
    sizes: list[int] = []
    for source in sources:
        before = len(prompts)
        for where, value in watch(open_source(source).values()):
            row = check_row(value, where, source.columns, is_asked=True)
            if row.sources:
                raise DataError(f"{where}: rows with images are not rolled out; leave the row out")
            prompts.append(Prompt(value, _question(row, value, source, len(prompts), is_chat, system)))
        sizes.append(len(prompts) - before)
        if not sizes[-1]:
            raise DataError(f"{source.title}: no prompts; name a file with at least one")
    return Prompts(prompts, sizes, [source.weight for source in sources])


def _question(
    row: Row, value: Mapping[str, Any], source: Source, index: int, is_chat: bool, system: str | None
) -> Question:
    name = row.id if row.id is not None else index
    columns = [(source.columns or {}).get("response", "response"), *RESPONSES]
    reference = next((str(value[each]) for each in columns if value.get(each)), "")
    if row.messages is None and not is_chat:
        return Question(index, row.where, name, row.prompt or "", reference)
    messages = list(row.messages or ({"role": "user", "content": row.prompt or ""},))
    answers = []
    while messages and messages[-1]["role"] == "assistant":
        answers.append(messages.pop()["content"].strip())
    if not messages:
        raise DataError(f"{row.where}: nothing comes before the assistant's message, so nothing is asked")
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return Question(index, row.where, name, tuple(messages), "".join(answers[::-1]) or reference, tools=row.tools)
