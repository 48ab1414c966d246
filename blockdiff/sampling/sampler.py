"""The sampling loop by the rules of transformers' `generate`: encode, denoise a canvas, commit it, go on.

Each request draws from its own seed, so its draws do not depend on which other requests share its batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdiff.checkpoint.files import CHOICES, GENERATION
from blockdiff.checkpoint.generation import Generation, special_tokens
from blockdiff.errors import CheckpointError, RequestError
from blockdiff.kernels.vocabulary import Stats, pack_allowed
from blockdiff.sampling.choices import Choices, carried_over
from blockdiff.sampling.draws import Draws
from blockdiff.sampling.request import Prompt, Result, Row, as_request, as_row
from blockdiff.sampling.trace import Canvas, Step, step_records

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from blockdiff.models.family import BlockDiffusionModel
    from blockdiff.models.prefix import Prefix

OnCanvas = Callable[[Canvas], object]
OnStep = Callable[[Step], object]


class Sampler:
    """Answers prompts with a model.

    `tokenizer` may be None when every request brings its tokens. Without `generation` the settings are those beside
    the weights the model was loaded from, else transformers' defaults. Where they name no eos, the model's config does,
    else the tokenizer; with none, every response runs to its full length. Without `choices` the model is taken for what
    the blockdiff.json beside its weights says, else for a plain denoiser of uniform noise.
    """

    def __init__(
        self,
        model: BlockDiffusionModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        generation: Generation | None = None,
        choices: Choices | None = None,
    ):
        self.model, self.tokenizer = model, tokenizer
        self.generation = generation or _settings_of(model)
        self.choices = choices or _choices_of(model)
        mask_id = self.choices.mask_id
        if mask_id is not None and mask_id >= model.vocab_size:
            raise CheckpointError(f"{CHOICES}: mask_id {mask_id} is none of the model's {model.vocab_size} tokens")
        if self.choices.prediction == "leave_one_out":
            warnings.warn(
                "this model was trained to predict each token from the others alone (leave_one_out) and is sampled as "
                "a plain denoiser, as transformers and vLLM do",
                stacklevel=2,
            )
        special = special_tokens(getattr(model, "config", None), self.generation, tokenizer)
        self.generation = replace(self.generation, eos_ids=special.eos_ids, pad_id=special.pad_id)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        seed: int = 0,
        max_new_tokens: int | None = None,
        max_steps: int | None = None,
        batch_size: int = 32,
        on_canvas: OnCanvas | None = None,
        on_step: OnStep | None = None,
    ) -> list[Result]:
        """Answer prompts: raw texts, message lists or `Request`s; one `Result` each, in the same order.

        `batch_size` rows run together. `max_new_tokens` is rounded up to whole canvases. `on_canvas` hears of
        every committed canvas and `on_step` of every denoising step (which costs a copy to the host each). A
        prompt that cannot be used gives a result with an `error`; the others are answered.
        """
        generation = self.generation
        if max_new_tokens is not None:
            generation = replace(generation, max_new_tokens=max_new_tokens)
        if max_steps is not None:
            generation = replace(generation, max_steps=max_steps)
        results: dict[int, Result] = {}
        rows: list[Row] = []
        for place, prompt in enumerate(prompts):
            request = as_request(prompt, place)
            try:
                rows.append(as_row(request, place, seed, self.tokenizer, self.model.vocab_size))
            except RequestError as error:
                results[place] = Result(request.id, "", [], "error", [], error=str(error))
        # Prompts of similar length share a batch: less padding.
        rows.sort(key=lambda row: len(row.prompt_tokens))
        for first in range(0, len(rows), batch_size):
            batch = rows[first : first + batch_size]
            self._answer(batch, generation, on_canvas, on_step)
            results |= {row.place: self._result(row, generation) for row in batch}
        return [results[place] for place in range(len(prompts))]

    def _answer(
        self, rows: list[Row], generation: Generation, on_canvas: OnCanvas | None, on_step: OnStep | None
    ) -> None:
        """Fill rows with their responses: canvas after canvas, until an eos or the last canvas."""
        canvases = -(-generation.max_new_tokens // self.model.canvas_length)
        prefix = self._encode_prompts(rows, int(generation.pad_id or 0))
        for number in range(canvases):
            canvas_BL, steps = self._denoise(prefix, rows, number, generation, on_step)
            is_last = number + 1 == canvases
            for row, tokens, count in zip(rows, canvas_BL.tolist(), steps, strict=True):
                self._commit(row, tokens, count, is_last, generation.eos_ids, on_canvas)
            unfinished = [place for place, row in enumerate(rows) if row.finish_reason is None]
            if not unfinished:
                return
            if len(unfinished) < len(rows):
                rows = [rows[place] for place in unfinished]
                kept = torch.tensor(unfinished, device=canvas_BL.device)
                prefix, canvas_BL = prefix.select(kept), canvas_BL[kept]
            prefix = self.model.encode(canvas_BL, prefix=prefix)

    def _encode_prompts(self, rows: Sequence[Row], pad_id: int) -> Prefix:
        lengths = [len(row.prompt_tokens) for row in rows]
        width, device = max(lengths), self.model.device
        tokens = [row.prompt_tokens + [pad_id] * (width - len(row.prompt_tokens)) for row in rows]
        is_unequal = min(lengths) < width
        return self.model.encode(
            torch.tensor(tokens, device=device), torch.tensor(lengths, device=device) if is_unequal else None
        )

    def _denoise(
        self, prefix: Prefix, rows: Sequence[Row], number: int, generation: Generation, on_step: OnStep | None
    ) -> tuple[Tensor, list[int]]:
        """Denoise canvas `number` of every row: the argmax canvases [B, L] and how many steps each took."""
        model, device = self.model, self.model.device
        seed_B = torch.tensor([_signed(row.seed) for row in rows], device=device)
        draws = Draws(seed_B, number, model.canvas_length, model.vocab_size)
        acceptance, stopping, mask_id = generation.acceptance, generation.stopping, self.choices.mask_id
        final_BL = torch.empty(len(rows), model.canvas_length, dtype=torch.int64, device=device)
        steps = [0] * len(rows)

        # From here on B counts the rows whose canvas is not finished; `live` are their places in `rows`.
        live = list(range(len(rows)))
        unchanged_B = torch.zeros_like(seed_B)
        is_accepted_BL = stats = None
        for step, temperature in enumerate(generation.temperature.of_steps(generation.max_steps).tolist()):
            uniform_BL, canvas_BL = draws.of_step(step)
            if mask_id is not None:
                canvas_BL = torch.full_like(canvas_BL, mask_id)
            if stats is not None and is_accepted_BL is not None:
                canvas_BL = stats.sample.where(is_accepted_BL, canvas_BL)
            previous_BL, soft_BLD = (None, None) if stats is None else (stats.argmax, stats.soft_embedding)
            hidden_BLD = model.denoise(canvas_BL, prefix, soft_BLD)
            stats = self._stats(hidden_BLD, temperature, uniform_BL, canvas_BL)
            is_accepted_BL = acceptance.accept(stats.entropy)
            is_stopped_B, unchanged_B = stopping.stop(stats.argmax, previous_BL, unchanged_B, stats.entropy)
            if on_step is not None:
                ids = [rows[place].id for place in live]
                for record in step_records(ids, number, step, temperature, canvas_BL, stats, is_accepted_BL):
                    on_step(record)

            is_last = step + 1 == generation.max_steps
            if step < generation.stability and not is_last:
                continue  # no canvas can stop yet, so the host need not wait for the device
            is_stopped = [is_last or flag for flag in is_stopped_B.tolist()]
            if not any(is_stopped):
                continue
            done = [i for i, flag in enumerate(is_stopped) if flag]
            for i in done:
                steps[live[i]] = step + 1
            final_BL[[live[i] for i in done]] = stats.argmax[done]
            if len(done) == len(live):
                break
            staying = [i for i, flag in enumerate(is_stopped) if not flag]
            live = [live[i] for i in staying]
            kept = torch.tensor(staying, device=device)
            stats = type(stats)(*(values[kept] for values in stats))
            is_accepted_BL, unchanged_B = is_accepted_BL[kept], unchanged_B[kept]
            prefix = prefix.select(kept)
            draws.select(kept)
        return final_BL, steps

    def _stats(self, hidden_BLD: Tensor, temperature: float, uniform_BL: Tensor, canvas_BL: Tensor) -> Stats:
        """What a step needs of every position; with mask noise, masks are never predicted and other tokens stay."""
        vocabulary, mask_id = self.model.vocabulary, self.choices.mask_id
        if mask_id is None:
            return vocabulary.stats(hidden_BLD, temperature, uniform_BL)
        tokens_V = torch.arange(self.model.vocab_size, device=canvas_BL.device)
        allowed_1W = pack_allowed((tokens_V != mask_id)[None])
        allowed_BLW = allowed_1W.expand(*canvas_BL.shape, -1)
        return carried_over(
            vocabulary.stats(hidden_BLD, temperature, uniform_BL, allowed_BLW=allowed_BLW), canvas_BL, mask_id
        )

    def _commit(
        self,
        row: Row,
        tokens: list[int],
        steps: int,
        is_last: bool,
        eos_ids: Sequence[int],
        on_canvas: OnCanvas | None,
    ) -> None:
        """Add a canvas to a row's response: up to its first eos, which finishes the row."""
        kept = next((i + 1 for i, token in enumerate(tokens) if token in eos_ids), None)
        row.finish_reason = "eos" if kept is not None else "length" if is_last else None
        kept = len(tokens) if kept is None else kept
        row.tokens += tokens[:kept]
        row.steps.append(steps)
        if on_canvas is not None:
            number, text = len(row.steps) - 1, self._text(row, eos_ids)
            on_canvas(Canvas(row.id, number, row.prompt, tokens, kept, text, steps, row.finish_reason))

    def _text(self, row: Row, eos_ids: Sequence[int]) -> str:
        if self.tokenizer is None:
            return ""
        # Not every eos of every tokenizer is a special token that decoding would leave out.
        ends = bool(row.tokens) and row.tokens[-1] in eos_ids
        return str(self.tokenizer.decode(row.tokens[: -1 if ends else None], skip_special_tokens=True))

    def _result(self, row: Row, generation: Generation) -> Result:
        kept = sum(token != generation.pad_id for token in row.tokens)
        return Result(
            id=row.id,
            text=self._text(row, generation.eos_ids),
            tokens=row.tokens,
            finish_reason=str(row.finish_reason),
            steps=row.steps,
            tokens_per_forward=kept / sum(row.steps),
        )


def _settings_of(model: BlockDiffusionModel) -> Generation:
    """What the generation_config.json of the checkpoint that a model came from says."""
    folder = _folder_of(model, GENERATION)
    return Generation() if folder is None else Generation.from_pretrained(folder)


def _choices_of(model: BlockDiffusionModel) -> Choices:
    """What the blockdiff.json of the checkpoint that a model came from says."""
    folder = _folder_of(model, CHOICES)
    return Choices() if folder is None else Choices.from_pretrained(folder)


def _folder_of(model: BlockDiffusionModel, name: str) -> Path | None:
    """Where the file called `name` lies that the model's checkpoint brought, if it brought one."""
    carried = getattr(model, "carried", None)
    files = () if carried is None else carried.side_files
    return next((file.parent for file in files if file.name == name), None)


def _signed(seed: int) -> int:
    """A seed's 64 bits as an int64 holds them."""
    return (seed + 2**63) % 2**64 - 2**63
