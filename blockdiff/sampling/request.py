"""A request to a sampler and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from blockdiff.data.image_parts import images_in
from blockdiff.data.messages import BadRow, ImageSource, image_source
from blockdiff.data.tokenise import Prompt as PromptTokens
from blockdiff.data.tokenise import chat_prompt, conversation, raw_prompt, text_tokens, token_prompt
from blockdiff.errors import DataError, RequestError
from blockdiff.field_rules import Rule, broken_rule
from blockdiff.request_options import OPTIONS, RequestOptions, is_integer, is_list

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from blockdiff.data.control_tokens import ControlTokens
    from blockdiff.data.images import ImageReader
    from blockdiff.sampling.strategy import Strategy

Message = Mapping[str, Any]
SCORES = ("logprobs", "top_logprobs", "score", "draw")
FORMS = ("regex", "json_schema", "template")  # of a whole response
# The check of each field of a `Request` by itself; `Request._contradiction` checks combinations.
RULES = {
    "prompt": Rule(str, "text"),
    "tokens": Rule(Sequence, "a list of token ids", is_list),
    "images": Rule(Sequence, "a list", is_list),
    **{name: option.rule for name, option in OPTIONS.items()},
}


@dataclass(frozen=True)
class Request(RequestOptions):
    """One prompt, given in exactly one of three ways.

    `prompt` is raw text (bos is put before it), `messages` a conversation for the chat template, `tokens` the prompt's
    ids as they are. `images` are paths, the bytes of files, data URIs, images of PIL or `ImageInput`s. They replace
    each `<image>` in `prompt`, else precede its text, or belong to the placeholders in `tokens`; messages contain
    theirs as parts {"type": "image", "image": ...}. A request without `seed` gets one derived from the seed of the call
    and its `id`. `tools` are declarations of functions that the conversation may call: {"type": "function", "function":
    {name, description, parameters}}; with an empty list none may be called, and the text of a call remains text.
    `thinking` requests reasoning from the chat template, and `template_options` are further variables of the template,
    such as {"thinking_mode": "disabled"}. `scores` requests the log-probability of every token of the answer, and
    `top_logprobs` the log-probabilities of that many likeliest tokens at each position; `scores_prompt` requests both
    for the prompt's tokens too. With `best_of`, that many answers are drawn independently, and the result is the one
    with the highest mean log-probability. The first of the texts `stop` ends the response; the result's text ends
    before it.

    Three fields override the settings of the call. max_new_tokens: rounded up to whole canvases; max_steps: the most
    denoising steps of a canvas; strategy: how canvases are denoised.

    The other fields restrict the response (docs/control.md). template: its form, with holes; regex; json_schema;
    banned: texts or token ids; min_tokens: the number of tokens before which no eos is allowed; repetition_penalty: 1
    for none; draft: a text to start from, noised to level `noise` in [0, 1]. Control tokens that the prompt's texts
    spell, such as `<turn|>`, are read as text, unless `allow_control_tokens`.
    """

    id: str | int
    prompt: str | None = None
    messages: Sequence[Message] | None = None
    tokens: Sequence[int] | None = None
    images: Sequence[Any] = ()
    tools: Sequence[Mapping[str, Any]] | None = None
    strategy: Strategy | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.id, str | int):
            raise RequestError(f"the id of a request must be text or an integer, got {self.id!r:.80}")

    def __repr__(self) -> str:
        """The id, and the fields that differ from their defaults."""
        values = {
            each.name: getattr(self, each.name) for each in sorted(fields(self), key=lambda each: bool(each.kw_only))
        }
        arguments = [f"{name}={value!r}" for name, value in values.items() if value is not getattr(Request, name, ...)]
        return f"Request({', '.join(arguments)})"

    @property
    def form(self) -> str | None:
        """The name of the field that determines the form of the whole response; None if none does."""
        return next((name for name in FORMS if getattr(self, name) is not None), None)

    @property
    def control_in_words(self) -> str:
        """The control in words, such as "regex '[0-9]+'"; empty if the response is unrestricted."""
        words = []
        if self.template is not None:
            words.append(f"template {self.template!r}")
        if self.regex is not None:
            words.append(f"regex {self.regex!r}")
        if self.json_schema is not None:
            words.append(f"JSON schema {self.json_schema}")
        if self.banned:
            words.append(f"none of {', '.join(map(repr, sorted(self.banned, key=is_integer)))}")
        if self.min_tokens:
            words.append(f"at least {self.min_tokens} tokens")
        if self.repetition_penalty != 1.0:
            words.append(f"repetition penalty {self.repetition_penalty:g}")
        if self.draft is not None:
            words.append(f"from the draft {self.draft!r}")
        return "; ".join(words)

    @property
    def sources(self) -> list[ImageSource]:
        """The images of the prompt in their order: paths, bytes of files, or `ImageInput`s; DataError for others."""
        if self.messages is not None:
            return images_in(conversation(self.messages, self.tools)[0])
        try:
            return [image_source(image, f"images[{number}]") for number, image in enumerate(self.images)]
        except BadRow as error:
            raise DataError(str(error)) from None

    def check(self) -> None:
        """Raise RequestError, with one line that names the mistake, for fields that cannot be answered."""
        if wrong := broken_rule(self, RULES) or self._contradiction():
            raise RequestError(wrong)
        for name in ("stop", "banned"):
            for text in getattr(self, name):
                _require_whole(name, str(text))
        if self.messages is not None:
            try:
                conversation(self.messages, self.tools)
            except DataError as error:
                raise RequestError(str(error)) from None

    def _contradiction(self) -> str | None:
        """The first fields that contradict each other, in words; None if none do."""
        prompt_fields = [name for name in ("prompt", "messages", "tokens") if getattr(self, name) is not None]
        if len(prompt_fields) != 1:
            return f"give exactly one of prompt, messages and tokens, got {' and '.join(prompt_fields) or 'none'}"
        if self.messages is not None and self.images:
            return "images stand beside a prompt; messages have theirs as parts of type image"
        if self.messages is None:
            if self.tools:
                return "tools are there, but no messages; only a conversation has a place for them"
            for name in ("thinking", "template_options"):
                if getattr(self, name):
                    return f"{name} is asked for in the chat template, so it needs messages"
        for name in ("top_logprobs", "scores_prompt"):
            if getattr(self, name) and not self.scores:
                return f"{name} stand beside scores; ask for both"
        for name in ("regex", "json_schema"):
            if isinstance(form := getattr(self, name), str) and not form.strip():
                return f"{name} is empty; leave it out, or say what the whole response is"
        if self.regex is not None and self.json_schema is not None:
            return "give one of regex and json_schema, not both"
        if self.min_tokens and self.template is not None:
            return "a template says how long the response is, which leaves min_tokens nothing to say; give one"
        if self.max_new_tokens is not None and self.min_tokens > self.max_new_tokens:
            most = f"max_new_tokens, {self.max_new_tokens} (over HTTP, max_tokens)"
            return f"min_tokens {self.min_tokens} is more than {most}; lower it"
        if self.thinking and self.form is not None:
            return f"{self.form} says the form of the whole response and leaves no place for thinking; give one"
        if self.noise is not None and self.draft is None:
            return "noise is the level to which a draft is noised; give a draft with it"
        if self.draft is not None and self.template is not None:
            return "a template says where everything stands, which leaves no place for a draft; give one"
        return None

    def as_tokens(
        self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, reader: ImageReader | None = None
    ) -> PromptTokens:
        """Return the prompt as text ("" if it came as tokens), as tokens and with its images.

        reader: the image reader of a model with images. Raises RequestError for an invalid prompt.
        """
        self.check()
        try:
            if self.tokens is not None:
                prompt = token_prompt(self.tokens, self.sources, reader)
            elif tokenizer is None:
                raise RequestError("a prompt in words needs a tokenizer, and the sampler has none")
            elif self.messages is not None:
                options = self.control_tokens, self.thinking, self.template_options
                prompt = chat_prompt(self.messages, self.tools, tokenizer, *options, reader)
            else:
                prompt = raw_prompt(str(self.prompt), tokenizer, self.control_tokens, self.sources, reader)
        except DataError as error:
            raise RequestError(str(error)) from None
        if not prompt.tokens:
            raise RequestError("the prompt is empty")
        for token in prompt.tokens:
            if not is_integer(token) or not 0 <= token < vocab_size:
                raise RequestError(f"token {token!r} is not one of the model's {vocab_size} ids")
        return prompt

    def spelt(self, text: str, tokenizer: PreTrainedTokenizerBase, name: str) -> list[int]:
        """Return the tokens of a text, called `name` in messages; RequestError if they do not decode to it."""
        try:
            tokens = text_tokens(text, tokenizer, self.control_tokens, f"{name} {text!r:.60}")
        except DataError as error:
            raise RequestError(str(error)) from None
        decoded = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if decoded != text:
            raise RequestError(f"{name} {text!r:.60} becomes {decoded!r:.60} in the model's tokens; write it otherwise")
        return tokens

    @property
    def control_tokens(self) -> ControlTokens:
        """How control tokens that the request's texts spell are read: as control tokens, or as text."""
        return "allow" if self.allow_control_tokens else "text"


@dataclass(frozen=True)
class Forwards:
    """The number of model calls that an answer took part in; other requests may have shared them.

    denoise: steps of its canvases; draft: passes of a drafter over its blocks; encode: chunks of the prompt that no
    other request had encoded, committed canvases that were read by later ones or scored, and under `next_token` every
    token except the last; verify: drafts that the next-token head read, or with a drafter every call after the prompt.
    Calls that were repeated after a preemption count again.
    """

    denoise: int = 0
    encode: int = 0
    verify: int = 0
    draft: int = 0

    @property
    def by_kind(self) -> dict[str, int]:
        """The calls of each kind."""
        return {"denoise": self.denoise, "draft": self.draft, "encode": self.encode, "verify": self.verify}

    @property
    def total(self) -> int:
        """The calls of all kinds."""
        return sum(self.by_kind.values())


@dataclass(frozen=True)
class PromptScores:
    """A prompt's tokens, the log-probabilities of all except the first, and the likeliest tokens at their positions."""

    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]


@dataclass(frozen=True)
class Result:
    """The answer to a request.

    `tokens` ends with the first eos if there is one. `text` has no special tokens, no `reasoning` and no `tool_calls`,
    which are separate fields, the calls in the form of messages. `steps` are the denoising steps of each canvas, and
    `forwards` all model calls (with `best_of`, of all draws). `finish_reason` is "eos", "length", "stop", "cancelled"
    or, with the reason in `error`, "error". If requested, `logprobs` are the log-probabilities of `tokens` by
    next-token prediction, in nats, `top_logprobs` has the likeliest tokens at each position with theirs, and
    `prompt_scores` has both for the prompt. With `best_of`, `draw` is the index of the chosen answer. `prompt_tokens`
    counts the prompt's tokens, and `cached_tokens` the ones among them that other requests had encoded. `places` has,
    for each position of a drafter's blocks from the first drafted one on, how often a token was drafted there and how
    often it was accepted.
    """

    id: str | int
    text: str
    tokens: list[int]
    finish_reason: str
    steps: list[int]
    error: str | None = None
    reasoning: str | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    draw: int | None = None
    tool_calls: list[dict[str, Any]] | None = None
    forwards: Forwards = field(default=Forwards(), compare=False)
    prompt_scores: PromptScores | None = None
    prompt_tokens: int = field(default=0, compare=False)
    cached_tokens: int = field(default=0, compare=False)
    places: list[tuple[int, int]] = field(default_factory=list, compare=False)

    @property
    def tokens_per_forward(self) -> float:
        """The number of tokens per model call; denoising steps, encodes (the prompt's too) and verifications count."""
        return len(self.tokens) / max(1, self.forwards.total)

    @property
    def score(self) -> float | None:
        """The mean log-probability per token, in nats; None if it was not requested."""
        return None if self.logprobs is None else sum(self.logprobs) / max(1, len(self.logprobs))

    @classmethod
    def failed(cls, id: str | int, error: object) -> Result:
        """Return the result of a request that could not be answered, with the reason."""
        return cls(id, "", [], "error", [], error=str(error))

    def to_record(self) -> dict[str, Any]:
        """Return the fields of an output line."""
        names = ("id", "text", "tokens", "finish_reason", "steps")
        optional = {name: getattr(self, name) for name in ("reasoning", "tool_calls", *SCORES, "error")}
        record = {name: getattr(self, name) for name in names} | {"forwards": asdict(self.forwards)}
        optional["places"] = self.places or None
        return record | {k: v for k, v in optional.items() if v is not None}


Prompt = str | Sequence[Message] | Request


def as_request(prompt: Prompt, place: int) -> Request:
    """Convert a prompt in any accepted form to a request; the id defaults to its index `place` in the list."""
    if isinstance(prompt, Request):
        return prompt
    if isinstance(prompt, str):
        return Request(place, prompt=prompt)
    if isinstance(prompt, Mapping) or not hasattr(prompt, "__getitem__"):
        raise RequestError(
            f"{prompt!r:.60} is no prompt; give text, a list of messages, or Request({place}, prompt=...)"
        )
    return Request(place, messages=prompt)


def require_seed(seed: object) -> None:
    """Raise RequestError for a seed that is not a 64-bit integer."""
    if not is_integer(seed) or not RULES["seed"].is_met(seed):
        raise RequestError(f"seed must be {RULES['seed'].words}, got {seed!r:.80}")


def _require_whole(name: str, text: str) -> None:
    """Raise RequestError for a text with half of a surrogate pair, which no token spells."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{name} has half of a surrogate pair in {text!r:.60}; repair the escape") from None
