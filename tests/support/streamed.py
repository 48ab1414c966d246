"""The results of a sampler's stream, in the order of the prompts: of one that cannot be answered its error."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from blockdiff.sampling.request import Result
from blockdiff.sampling.sampler import Sampler


def streamed(sampler: Sampler, prompts: Iterable[Any], **options: Any) -> list[Result]:
    """One result for each prompt."""
    return [result for _, result in sorted(sampler.stream(prompts, **options), key=lambda each: each[0])]
