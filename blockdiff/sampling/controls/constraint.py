"""Constraints: a response whose whole text matches a regular expression, or is JSON of a schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blockdiff.errors import RequestError
from blockdiff.sampling.constraints.byte_automaton import of_regex
from blockdiff.sampling.constraints.json_object import any_object
from blockdiff.sampling.constraints.json_schema import regex_of_schema
from blockdiff.sampling.controls.restriction import Restriction, require_no_thinking, tokenizer_for

if TYPE_CHECKING:
    from blockdiff.sampling.request import Request
    from blockdiff.sampling.settings import SamplingSettings

ANY_OBJECT = {"type": "object"}  # the schema of all JSON objects


@dataclass(frozen=True)
class Constraint:
    """A regular expression or a JSON schema that the text of a response satisfies."""

    regex: str | None
    json_schema: str | Mapping[str, Any] | None

    @classmethod
    def of(cls, request: Request) -> Constraint | None:
        """The `regex` or `json_schema` of a request."""
        regex, schema = request.regex, request.json_schema
        if regex is not None and not isinstance(regex, str):
            raise RequestError(f"regex must be text, got {regex!r:.80}")
        if schema is not None and not isinstance(schema, str | Mapping):
            raise RequestError(f"json_schema must be an object or its JSON, got {schema!r:.80}")
        if regex is None and schema is None:
            return None
        for name, value in (("regex", regex), ("json_schema", schema)):
            if isinstance(value, str) and not value.strip():
                raise RequestError(f"{name} is empty; leave it out, or say what the whole response is")
        if regex is not None and schema is not None:
            raise RequestError("give one of regex and json_schema, not both")
        require_no_thinking(request, "regex" if schema is None else "json_schema")
        return cls(regex, schema)

    def __str__(self) -> str:
        return f"regex {self.regex!r}" if self.json_schema is None else f"JSON schema {self.json_schema}"

    def restriction(self, request: Request, settings: SamplingSettings, canvases: int) -> Restriction:
        """The language of the expression, without special tokens."""
        tokenizer_for("a constraint", settings)
        if self.json_schema == ANY_OBJECT:
            return Restriction(languages=(any_object(),), is_text=True)
        regex = str(self.regex) if self.json_schema is None else regex_of_schema(self.json_schema)
        return Restriction(languages=(of_regex(regex),), is_text=True)
