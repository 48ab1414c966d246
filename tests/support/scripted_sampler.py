"""Stands in for a sampler: answers with prepared texts and step counts, and keeps what it was asked."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from torch import nn

from blockdiff.checkpoint.generation import Generation
from blockdiff.sampling.request import Forwards, Request, Result
from blockdiff.sampling.response import parse


class ScriptedSampler:
    """`answers` by the place of the question: (text, steps of each canvas), or (None, []) for an error."""

    def __init__(self, tokenizer: Any, answers: list[tuple[str | None, list[int]]], max_new_tokens: int = 5):
        self.tokenizer, self.answers = tokenizer, answers
        self.generation = Generation(max_new_tokens=max_new_tokens)
        self.model = nn.Linear(1, 1)
        self.asked: dict[str, Any] = {}
        self.requests: list[Any] = []
        self.was_training: bool | None = None

    def stream(self, prompts: list[Any], **options: Any) -> Iterator[tuple[int, Result]]:
        """The prepared results of the requests, by their ids, after their places."""
        self.requests, self.asked = list(prompts), options
        self.was_training = self.model.training
        for place, request in enumerate(prompts):
            text, steps = self.answers[request.id]
            if text is None:
                yield place, Result.failed(request.id, "no")
                continue
            tokens = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], 1]
            settings = SimpleNamespace(
                tokenizer=self.tokenizer,
                text=lambda some: self.tokenizer.decode(some, skip_special_tokens=True),
            )
            said = parse(tokens, Request(0), settings)
            forwards = Forwards(sum(steps))
            yield (
                place,
                Result(request.id, said.text, tokens, "eos", steps, reasoning=said.reasoning, forwards=forwards),
            )
