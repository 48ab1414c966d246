"""The sampling loop by the rules of transformers' `generate`: encode, denoise a canvas, commit it, go on.

Each request draws from its own seed, so its draws do not depend on which other requests share its batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdiff.checkpoint import load
from blockdiff.checkpoint.files import CHOICES, find
from blockdiff.checkpoint.generation import Generation, special_tokens
from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.errors import CheckpointError, RequestError
from blockdiff.models.family import family_of
from blockdiff.sampling.choices import Choices
from blockdiff.sampling.draws import Draws
from blockdiff.sampling.predict import predict
from blockdiff.sampling.reasoning import separated
from blockdiff.sampling.request import Pending, Prompt, Result, as_request, draws_of, tokenised
from blockdiff.sampling.scores import best, score
from blockdiff.sampling.strategies import released
from blockdiff.sampling.strategy import Canvases, Strategy
from blockdiff.sampling.trace import CommittedCanvas, Step, step_records

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from blockdiff.models.family import BlockDiffusionModel
    from blockdiff.models.prefix import Prefix

NOT_FINITE = "the model's logits are not finite; are its weights? a wider --dtype may help"
OnCanvas = Callable[[CommittedCanvas], object]
OnStep = Callable[[Step], object]


class Sampler:
    """Answers prompts with a model.

    `tokenizer` may be None when every request brings its tokens. Without `generation` the settings are those beside
    the weights the model was loaded from, else transformers' defaults. Where they name no eos, the model's config does,
    else the tokenizer; with none, every response runs to its full length. Without `choices` the model is taken for what
    the blockdiff.json beside its weights says, else for a plain denoiser of uniform noise. Without `strategy` canvases
    are denoised by the released model's rules, with the numbers of the settings.
    """

    def __init__(
        self,
        model: BlockDiffusionModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        generation: Generation | None = None,
        choices: Choices | None = None,
        strategy: Strategy | None = None,
    ):
        self.model, self.tokenizer = model, tokenizer
        self._has_warned = False  # of tokens without a text
        origin = _origin(model)
        self.generation = generation or (Generation.from_pretrained(origin) if origin else Generation())
        self.strategy: Strategy = strategy or released(self.generation)
        self.choices = choices or (Choices.from_pretrained(origin) if origin else Choices())
        mask_id = self.choices.mask_id
        if mask_id is not None and mask_id >= model.vocab_size:
            raise CheckpointError(f"{CHOICES}: mask_id {mask_id} is none of the model's {model.vocab_size} tokens")
        if self.choices.prediction == "leave_one_out":
            warnings.warn(
                "this model was trained to predict each token from the others alone (leave_one_out) and is sampled as "
                "a plain denoiser, as transformers and vLLM do",
                stacklevel=2,
            )
        if tokenizer is not None and len(tokenizer) > model.vocab_size:
            warnings.warn(
                f"the tokenizer has {len(tokenizer)} tokens, the model {model.vocab_size}; is it that of the model?",
                stacklevel=2,
            )
        config = getattr(model, "config", None)
        self._positions = None if config is None else family_of(config).outline(config).positions
        special = special_tokens(config, self.generation, tokenizer)
        self.generation = replace(self.generation, eos_ids=special.eos_ids, pad_id=special.pad_id)

    @classmethod
    def from_pretrained(
        cls, path_or_hub_id: str | Path, dtype: str = "bfloat16", device: str = "auto", kernels: str = "auto"
    ) -> Sampler:
        """A sampler from a checkpoint directory or a Hub id, with its tokenizer and settings; the rest as in `load`.

        What cannot be used is refused before the weights are read.
        """
        directory = find(path_or_hub_id)
        generation, tokenizer = Generation.from_pretrained(directory), load_tokenizer(directory)
        return cls(load(directory, dtype=dtype, device=device, kernels=kernels), tokenizer, generation)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt | Result],
        seed: int = 0,
        max_new_tokens: int | None = None,
        max_steps: int | None = None,
        batch_size: int = 32,
        on_canvas: OnCanvas | None = None,
        on_step: OnStep | None = None,
    ) -> list[Result]:
        """Answer prompts: raw texts, message lists or `Request`s; one `Result` each, in the same order.

        `batch_size` rows run together. `max_new_tokens` is rounded up to whole canvases. `on_canvas` is called with
        every committed canvas and `on_step` with every denoising step (which costs a copy to the host each). A prompt
        that cannot be used gives a result with an `error`; the others are answered. A `Result` among the prompts, as
        `read_prompts` has for a line that is none, is returned as it is.
        """
        generation = self.generation
        if max_new_tokens is not None:
            generation = replace(generation, max_new_tokens=max_new_tokens)
        if max_steps is not None:
            generation = replace(generation, max_steps=max_steps)
        canvases = -(-generation.max_new_tokens // self.model.canvas_length)
        room = None if self._positions is None else self._positions - canvases * self.model.canvas_length
        if room is not None and room < 1:
            raise RequestError(
                f"max_new_tokens {generation.max_new_tokens} leaves no room for a prompt in the model's "
                f"{self._positions} positions; ask for fewer"
            )
        results: dict[int, Result] = {}
        pending: list[Pending] = []
        scored: set[int] = set()
        for place, prompt in enumerate(prompts):
            if isinstance(prompt, Result):
                results[place] = prompt
                continue
            request = as_request(prompt, place)
            try:
                asked = tokenised(request, place, seed, self.tokenizer, self.model.vocab_size)
                if room is not None and len(asked.prompt_tokens) > room:
                    raise RequestError(
                        f"the prompt has {len(asked.prompt_tokens)} tokens, but the model's {self._positions} "
                        f"positions leave room for {room} before {canvases} canvases; "
                        "shorten it or lower max_new_tokens"
                    )
                pending += draws_of(asked, request.best_of)
                scored |= {place} if request.scores or request.best_of > 1 else set()
            except RequestError as error:
                results[place] = Result.failed(request.id, error)
        # Prompts of similar length share a batch: less padding.
        pending.sort(key=lambda each: len(each.prompt_tokens))
        for first in range(0, len(pending), batch_size):
            self._answer(pending[first : first + batch_size], generation, on_canvas, on_step)
        self._score([each for each in pending if each.place in scored and each.error is None], batch_size)
        answers: dict[int, list[Result]] = {}
        for each in sorted(pending, key=lambda each: each.draw or 0):
            answers.setdefault(each.place, []).append(self._result(each, generation.eos_ids))
        results |= {place: best(draws) for place, draws in answers.items()}
        return [results[place] for place in range(len(prompts))]

    def _score(self, answered: Sequence[Pending], batch_size: int) -> None:
        """Give each answer its log-probabilities by next-token prediction."""
        if not answered:
            return
        if self.choices.objective.get("ar_loss", "not said") in ("none", None):
            warnings.warn(
                "this model was trained without the next-token loss (objective.ar_loss: none): its scores say nothing",
                stacklevel=2,
            )
        found = score(self.model, [a.prompt_tokens for a in answered], [a.tokens for a in answered], batch_size)
        for each, its in zip(answered, found, strict=True):
            each.logprobs = its.logprobs

    def _result(self, answered: Pending, eos_ids: Sequence[int]) -> Result:
        """The answer as the asker gets it."""
        if answered.error is not None:
            return Result.failed(answered.request_id, answered.error)
        reasoning, text = None, self._text(answered, eos_ids)
        if self.tokenizer is not None:
            reasoning, answer = separated(answered.tokens, self.tokenizer)
            text = text if reasoning is None else self._text(replace(answered, tokens=answer), eos_ids)
        return Result(
            answered.request_id,
            text,
            answered.tokens,
            str(answered.finish_reason),
            answered.steps,
            reasoning=reasoning,
            logprobs=answered.logprobs,
            draw=answered.draw,
        )

    def _answer(
        self, batch: list[Pending], generation: Generation, on_canvas: OnCanvas | None, on_step: OnStep | None
    ) -> None:
        """Fill in the responses of a batch: canvas after canvas, until an eos or the last canvas."""
        canvases = -(-generation.max_new_tokens // self.model.canvas_length)
        prefix = self._encode_prompts(batch, int(generation.pad_id or 0))
        for number in range(canvases):
            canvas_BL, steps = self._denoise(prefix, batch, number, generation, on_step)
            for each, tokens, count in zip(batch, canvas_BL.tolist(), steps, strict=True):
                if each.error is not None:
                    continue
                kept = each.commit(tokens, count, generation.eos_ids, is_last=number + 1 == canvases)
                if on_canvas is not None:
                    text = self._text(each, generation.eos_ids)
                    said = (each.prompt, tokens, kept, text, count, each.finish_reason, generation.max_steps)
                    on_canvas(CommittedCanvas(each.id, number, *said))
            unfinished = [row for row, each in enumerate(batch) if each.finish_reason is None and not each.error]
            if not unfinished:
                return
            if len(unfinished) < len(batch):
                batch = [batch[row] for row in unfinished]
                kept_rows = torch.tensor(unfinished, device=canvas_BL.device)
                prefix, canvas_BL = prefix.select(kept_rows), canvas_BL[kept_rows]
            prefix = self.model.encode(canvas_BL, prefix=prefix)

    def _encode_prompts(self, batch: Sequence[Pending], pad_id: int) -> Prefix:
        lengths = [len(each.prompt_tokens) for each in batch]
        width, device = max(lengths), self.model.device
        tokens = [each.prompt_tokens + [pad_id] * (width - len(each.prompt_tokens)) for each in batch]
        is_unequal = min(lengths) < width
        return self.model.encode(
            torch.tensor(tokens, device=device), torch.tensor(lengths, device=device) if is_unequal else None
        )

    def _denoise(
        self, prefix: Prefix, batch: Sequence[Pending], number: int, generation: Generation, on_step: OnStep | None
    ) -> tuple[Tensor, list[int]]:
        """Denoise canvas `number` of every row: the argmax canvases [B, L] and how many steps each took.

        A row whose logits are not finite gets an `error`, and its canvas means nothing.
        """
        model, device = self.model, self.model.device
        seed_B = torch.tensor([_signed(each.seed) for each in batch], device=device)
        draws = Draws(seed_B, number, model.canvas_length, model.vocab_size)
        strategy, mask_id = self.strategy, self.choices.mask_id
        final_BL = torch.empty(len(batch), model.canvas_length, dtype=torch.int64, device=device)
        steps = [0] * len(batch)

        # From here on B counts the rows whose canvas is not finished; `live` are their places in the batch.
        live = list(range(len(batch)))
        steps_B, unchanged_B = torch.full_like(seed_B, generation.max_steps), torch.zeros_like(seed_B)
        standing_BL = kept_BL = stats = None
        for step in range(generation.max_steps):
            shape = strategy.shape(step, generation.max_steps)
            uniform_BL, canvas_BL = draws.of_step(step)
            if mask_id is not None:
                canvas_BL = torch.full_like(canvas_BL, mask_id)
            if stats is None or standing_BL is None or kept_BL is None:
                previous_BL, soft_BLD = torch.full_like(canvas_BL, -1), None
                kept_BL = torch.zeros_like(canvas_BL, dtype=torch.bool)
            else:
                previous_BL, soft_BLD = stats.argmax, stats.soft_embedding
                canvas_BL = standing_BL.where(kept_BL, canvas_BL)
            hidden_BLD = model.denoise(canvas_BL, prefix, soft_BLD)
            stats = predict(model, hidden_BLD, canvas_BL, shape.temperature, uniform_BL, mask_id=mask_id)
            unchanged_B = (unchanged_B + 1) * (stats.argmax == previous_BL).all(-1)
            canvases = Canvases(
                ids=[batch[place].id for place in live],
                step_B=torch.full_like(steps_B, step),
                steps_B=steps_B,
                temperature_B=torch.full(steps_B.shape, shape.temperature, device=device),
                tokens_BL=canvas_BL,
                stats=stats,
                previous_BL=previous_BL,
                unchanged_B=unchanged_B,
                kept_BL=kept_BL,
                is_pinned_BL=None,
                draw=partial(draws.second, step),
            )
            decision = strategy.decide(canvases)
            kept_BL, standing_BL = decision.kept_BL, decision.standing(canvases)
            if on_step is not None:
                columns = canvas_BL, stats, decision.keep_BL
                for record in step_records(canvases.ids, number, step, shape.temperature, *columns):
                    on_step(record)

            is_last = step + 1 == generation.max_steps
            if decision.stop_B is None and not is_last:
                continue  # no canvas stops here, so the host need not wait for the device
            is_finite_B = stats.entropy.isfinite().all(-1)
            is_stopped_B = is_finite_B if decision.stop_B is None else decision.stop_B
            flags = torch.stack((is_stopped_B, is_finite_B)).tolist()  # the one wait for the device
            stopped: list[int] = []
            staying: list[int] = []
            for row, (is_stopped, is_finite) in enumerate(zip(*flags, strict=True)):
                if not is_finite:
                    batch[live[row]].error = f"{NOT_FINITE} (canvas {number + 1}, step {step + 1})"
                (stopped if is_last or is_stopped or not is_finite else staying).append(row)
            if not stopped:
                continue
            places = [live[row] for row in stopped]
            final_BL[places] = stats.argmax[stopped]
            for place in places:
                steps[place] = step + 1
            if not staying:
                break
            live = [live[row] for row in staying]
            kept = torch.tensor(staying, device=device)
            stats = type(stats)(*(values[kept] for values in stats))
            standing_BL, kept_BL, unchanged_B = standing_BL[kept], kept_BL[kept], unchanged_B[kept]
            steps_B = steps_B[kept]
            prefix = prefix.select(kept)
            draws.select(kept)
        return final_BL, steps

    def _text(self, answered: Pending, eos_ids: Sequence[int]) -> str:
        if self.tokenizer is None:
            return ""
        # Not every eos of every tokenizer is a special token that decoding would leave out.
        size = len(self.tokenizer)
        if not self._has_warned and any(token >= size for token in answered.tokens):
            self._has_warned = True
            warnings.warn(
                f"the model answers with tokens that the tokenizer, which has {size}, has no text for; "
                "is it that of the model?",
                stacklevel=1,
            )
        has_end = bool(answered.tokens) and answered.tokens[-1] in eos_ids
        return str(self.tokenizer.decode(answered.tokens[: -1 if has_end else None], skip_special_tokens=True))


def _origin(model: BlockDiffusionModel) -> Path | None:
    """The directory of the checkpoint that a model came from, if files were carried from one."""
    carried = getattr(model, "carried", None)
    return next((file.parent for file in carried.side_files), None) if carried is not None else None


def _signed(seed: int) -> int:
    """A seed's 64 bits as an int64 holds them."""
    return (seed + 2**63) % 2**64 - 2**63
