"""The limits of a server: what a request may cost before it is refused, and who may ask."""

from __future__ import annotations

from dataclasses import dataclass

HEAD_BYTES, HEADERS = 1 << 16, 100  # of a request: its line and headers, and the trailers of its body; 431 beyond
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Limits:
    """The most that one request may ask for; the rest is refused with a 4xx that names the limit.

    body_bytes: of its JSON; bodies_bytes: of all whose answers have not ended; prompt_tokens, max_tokens: of its prompt
    and of each answer (None: as many as the model's positions and the memory of the pages hold); images, pixels: the
    images of its messages, and the pixels of them all; images_bytes: of the images of all requests whose answers have
    not ended, as the model takes them; answers: `n`, for all prompts together, and `best_of`;
    answers_each: that are under way for one key, or one address; answer_seconds: for an answer, or a read; steps: of a
    canvas; draws: of a read; form_characters: of a regex, schema, template, draft or the tools; prepare_seconds: for
    which its constraint may wait for others, and for which it may then compile; read_seconds: for which a client may
    keep a body unsent, or a stream unread; stall_seconds: after which a step that has not ended makes the server not
    ready.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  (where a file says them)

    body_bytes: int = 16 << 20
    bodies_bytes: int = 256 << 20
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    images: int = 16
    images_bytes: int = 1 << 30
    pixels: int = 1 << 25
    answers: int = 16
    answers_each: int | None = None
    answer_seconds: float | None = None
    steps: int = 1000
    draws: int = 64
    form_characters: int = 100_000
    prepare_seconds: float = 10.0
    read_seconds: float = 60.0
    stall_seconds: float = 60.0

    @property
    def most_answers(self) -> int:
        """The most answers to one request."""
        return self.answers if self.answers_each is None else min(self.answers, self.answers_each)

    def seconds(self, asked: float | None) -> float | None:
        """The seconds that an answer may take where a request asks for so many (None: it does not say)."""
        return min((each for each in (asked, self.answer_seconds) if each), default=None)


@dataclass(frozen=True)
class Access:
    """The right to ask: with one of the keys, if there are any, under one of the hosts, and from no other site's page.

    hosts: the names under which the server may be asked, in the Host header (None: any); origins: sites whose pages may
    ask, beside the server's own.
    """

    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = LOOPBACK
    origins: tuple[str, ...] = ()
