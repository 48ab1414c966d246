"""The limits of a server: what a request may cost before it is refused, and who may ask."""

from __future__ import annotations

from dataclasses import dataclass

HEAD_BYTES, HEADERS = 1 << 16, 100  # of a request's line and headers, and of its body's trailers; beyond: status 431
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Limits:
    """The most that one request may ask for. A request beyond a limit is refused with a 4xx that names the limit.

    body_bytes: size of a request's JSON; bodies_bytes: of the bodies of all unanswered requests together;
    prompt_tokens, max_tokens: tokens of a prompt, and of each answer (None: as many as the model's positions and the
    memory for pages allow); images, pixels: the number of images of a request's messages, and their pixels together;
    images_bytes: the images of all unanswered requests together, as tensors; answers: `n` times the prompts, and
    `best_of`; answers_each: answers under way for one key or one address (None: any number); answer_seconds: for an
    answer or a read (None: any time); steps: of a canvas; draws: of a read; form_characters: of a regex, schema,
    template or draft, and of the tools; prepare_seconds: how long a request's preparation may wait for others, and how
    long its constraint may then compile; read_seconds: how long a client may take to send a body, and leave a stream
    unread; stall_seconds: the length of a step from which `/ready` reports that the server is not ready.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  (pydantic reads them from serve.yaml)

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
        """The most answers to one request: `answers`, or `answers_each` if that is less."""
        return self.answers if self.answers_each is None else min(self.answers, self.answers_each)

    def seconds(self, asked: float | None) -> float | None:
        """Return the time limit of an answer in seconds, the lesser of `asked` and `answer_seconds`; None: no limit."""
        return min((each for each in (asked, self.answer_seconds) if each), default=None)


@dataclass(frozen=True)
class Access:
    """Who may use the server.

    keys: a request needs one of these API keys (none: no key is needed); hosts: the names allowed in the Host header
    (None: any); origins: sites whose pages may ask, in addition to the server's own ("*": any).
    """

    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = LOOPBACK
    origins: tuple[str, ...] = ()
