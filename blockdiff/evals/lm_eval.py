"""The adapter for lm-evaluation-harness: importing this module registers the model "blockdiff" there.

Texts are written by the sampler; log-likelihoods are exact, by next-token prediction of the encode pass (see
`sampling/scores.py`), and as good as the model's next-token loss. The harness is an optional package:
`pip install 'lm_eval>=0.4.13'`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from blockdiff.checkpoint.files import first_line
from blockdiff.data.control_tokens import why_not_encoded
from blockdiff.errors import RequestError
from blockdiff.evals.summary import costs
from blockdiff.sampling.request import Request, Result
from blockdiff.sampling.scores import score

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from blockdiff.sampling.sampler import Sampler

logger = logging.getLogger(__name__)
UNBOUNDED = 1 << 20  # tokens of a text that a model without a limit scores together
IGNORED = ("temperature", "top_p", "top_k", "do_sample", "num_beams")


@register_model("blockdiff")
class BlockdiffLM(TemplateLM):
    """A checkpoint behind the harness's interface: `generate_until`, `loglikelihood`, `loglikelihood_rolling`.

    pretrained: a checkpoint directory or hub id, unless `sampler` is given; seed: of the draws. `costs` has the cost of
    all generated texts.
    """

    def __init__(
        self,
        pretrained: str = "",
        dtype: str = "auto",
        device: str = "auto",
        kernels: str = "auto",
        batch_size: int | str = 32,
        seed: int = 0,
        steps: int | None = None,
        max_gen_toks: int | None = None,
        thinking: bool = False,
        max_batch_size: int | None = None,
        sampler: Sampler | None = None,
    ):
        super().__init__()
        if sampler is None:
            from blockdiff.sampling.sampler import Sampler

            sampler = Sampler.from_pretrained(pretrained, dtype=dtype, device=device, kernels=kernels)
        if sampler.tokenizer is None:
            raise RequestError("the harness asks in words, so the model needs a tokenizer beside its weights")
        self.sampler, self.tokenizer, self.pretrained = sampler, sampler.tokenizer, pretrained
        self.batch_size = 32 if batch_size == "auto" else int(batch_size)
        self.seed, self.steps, self.max_gen_toks, self.thinking = seed, steps, max_gen_toks, thinking
        self.answers: list[Result] = []  # to all requests so far, not cut at stop strings
        self._said: set[str] = set()

    @property
    def eot_token_id(self) -> int:
        """The first of the tokens that end a text; the padding token or 0 if there is none."""
        ids = self.sampler.generation.eos_ids
        return ids[0] if ids else int(self.sampler.generation.pad_id or 0)

    @property
    def prefix_token_id(self) -> int:
        """The token that stands in for an empty context: bos if the tokenizer has one, else `eot_token_id`."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def max_length(self) -> int:
        """The number of positions of the model, `UNBOUNDED` if it has no limit."""
        return self.sampler.settings.positions or UNBOUNDED

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name, a key in the harness's cache of requests."""
        return str(Path(str(self.tokenizer.name_or_path)).name)

    @property
    def costs(self) -> dict[str, Any]:
        """Steps, endings and empty answers of all texts generated so far, as in an evaluation of our own tasks."""
        return costs(
            [
                {
                    "text": answer.text,
                    "steps": answer.steps,
                    "forwards": asdict(answer.forwards),
                    "length": len(answer.tokens),
                    "finish_reason": answer.finish_reason,
                }
                for answer in self.answers
            ]
        )

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Write a conversation as the text of a prompt."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                enable_thinking=self.thinking,
            )
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the tokens of a text, after bos if the tokenizer has one and `add_special_tokens` is not False."""
        try:
            tokens = list(self.tokenizer(string, add_special_tokens=False)["input_ids"])
        except Exception as error:  # tokenizers raises plain Exceptions, for example on a character it lacks
            why = why_not_encoded(error, string, self.tokenizer)
            raise RequestError(f"the tokenizer cannot encode {string!r:.80}: {why}") from error
        bos = self.tokenizer.bos_token_id
        return tokens if bos is None or add_special_tokens is False or tokens[:1] == [bos] else [bos, *tokens]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the answer to each context, cut at the first of its stop strings (`until`).

        Seed and request number key the draws. Settings of token-by-token sampling (temperature and the like) do not
        apply here; they are ignored with a warning. A context that is too long is cut at its beginning.
        """
        prompts, ends = [], []
        for number, (context, settings) in enumerate(request.args for request in requests):
            for name in sorted(set(IGNORED) & {name for name, value in settings.items() if value}):
                self._warn(f"{name} is a setting of other samplers and is not used")
            most = settings.get("max_gen_toks") or self.max_gen_toks or self.sampler.generation.max_new_tokens
            until = settings.get("until") or []
            ends.append([until] if isinstance(until, str) else list(until))
            length = self.sampler.model.canvas_length
            room = self.max_length - -(-int(most) // length) * length
            tokens = self.tok_encode(context) or [self.prefix_token_id]
            prompts.append(Request(number, tokens=self._last(tokens, room), max_new_tokens=int(most)))
        stream = self.sampler.stream(prompts, seed=self.seed, max_steps=self.steps, batch_size=self.batch_size)
        answers = [answer for _, answer in sorted(stream, key=lambda each: each[0])]
        self.answers += answers
        texts = []
        for request, answer, until in zip(requests, answers, ends, strict=True):
            if answer.error is not None:
                self._warn(f"an answer is empty because of an error: {answer.error}")
            text = answer.text
            for end in filter(None, until):
                text = text.split(end)[0]
            self.cache_hook.add_partial("generate_until", request.args, text)
            texts.append(text)
        return texts

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return for each continuation its log-probability, and whether each of its tokens is the likeliest one."""
        rows = [self._fitting(context, continuation) for _, context, continuation in requests]
        scores = score(self.sampler.model, [a for a, _ in rows], [b for _, b in rows], self.batch_size)
        results = [(each.total, each.is_greedy) for each in scores]
        for request, answer in zip(requests, results, strict=True):
            if request[0] is not None:  # None for the windows of a rolling text
                self.cache_hook.add_partial("loglikelihood", request[0], answer)
        return results

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text after the prefix token; long texts in disjoint windows."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for (text,) in (request.args for request in requests):
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            text_windows = [(None, *make_disjoint_window(pair)) for pair in pairs]
            windows += text_windows
            counts.append(len(text_windows))
        scores = iter(self._loglikelihood_tokens(windows))
        totals = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _fitting(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """Cut the beginning of context and continuation, so that at most `max_length` tokens pass through the model."""
        room = self.max_length + 1 - len(continuation)  # the last token is only predicted
        return self._last(context, max(1, room)), continuation[-self.max_length :]

    def _last(self, tokens: list[int], room: int) -> list[int]:
        if len(tokens) > room:
            self._warn(f"a context is longer than the model's {self.max_length} positions; its beginning is left out")
        return tokens[-room:] if room > 0 else tokens

    def _warn(self, message: str) -> None:
        """Log a message the first time only."""
        if message not in self._said:
            self._said.add(message)
            logger.warning(message)


def evaluate(
    sampler: Sampler, names: Sequence[str], directory: str | Path | None = None, chat: bool = False, **settings: Any
) -> dict[str, Any]:
    """Return the harness's results for tasks by name, and the `costs` of generated texts (None without any).

    directory: of further tasks' YAML files; then only these tasks are found (reading the harness's own takes seconds).
    chat: contexts pass through the chat template. settings: `limit`, `num_fewshot` and other arguments of
    `lm_eval.simple_evaluate`, and `seed`, `steps`, `batch_size`, `max_gen_toks`, `thinking` of the model. Raises
    RequestError if a task does not exist or its rows cannot be read.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    overrides = {name: settings.pop(name, None) for name in ("seed", "steps", "batch_size", "max_gen_toks", "thinking")}
    model = BlockdiffLM(sampler=sampler, **{name: value for name, value in overrides.items() if value is not None})
    if directory is not None and not Path(directory).is_dir():
        raise RequestError(f"{directory}: no such directory; name that of the tasks' YAML files")
    where = {} if directory is None else {"include_path": str(directory), "include_defaults": False}
    manager = TaskManager(**where)
    missing = [name for name in names if not manager.match_tasks([name])]
    if missing:
        source = "lm-evaluation-harness" if directory is None else str(directory)
        raise RequestError(f"{source} has no task {missing[0]!r}; `lm-eval ls tasks` lists those of the harness")
    try:
        results = simple_evaluate(
            model, tasks=list(names), task_manager=manager, apply_chat_template=chat, bootstrap_iters=0, **settings
        )
    except OSError as error:  # of `datasets`: no network, no such file
        raise RequestError(
            f"the rows of {', '.join(names)} cannot be read ({first_line(error)}); be online once, or name files of "
            "yours in a task's YAML (--data)"
        ) from error
    assert results is not None  # it is None only on ranks other than the first
    return {**results, "costs": model.costs if model.answers else None}
