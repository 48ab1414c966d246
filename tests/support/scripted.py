"""A model without weights for the sampling tests: it answers with the logits of a script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from blockdiff.kernels import IN_TORCH
from blockdiff.kernels.vocabulary import Classes, ClassStats, Penalty, Shaping, Stats, pack_allowed
from blockdiff.kernels.vocabulary.torch import class_stats, token_stats
from blockdiff.sampling.sampler import Sampler

Script = Callable[[int, int, int], Tensor]  # (last prompt token, canvas, step) -> logits [L, V]


class ScriptedPrefix:
    """The encoded rows: each row's last prompt token, its canvas, and the denoising steps of that canvas."""

    def __init__(self, last_B: Tensor, canvas: int, step: int = 0):
        self.last_B, self.canvas, self.step = last_B, canvas, step

    def select(self, rows: Tensor) -> ScriptedPrefix:
        """Some rows."""
        return ScriptedPrefix(self.last_B[rows], self.canvas, self.step)


class ScriptedModel:
    """Speaks like `DiffusionGemma` to the sampler; its hidden states are logits, its table the identity."""

    def __init__(self, script: Script, canvas_length: int, vocab_size: int):
        self.script, self.canvas_length, self.vocab_size = script, canvas_length, vocab_size
        self.device, self.dtype, self.table = torch.device("cpu"), torch.float32, torch.eye(vocab_size)
        self.signal_width = vocab_size
        self.vocabulary = self.denoiser = self
        self.kernels = IN_TORCH
        self.encoded: list[tuple[int, int]] = []  # shape of every encode
        self.denoised: list[int] = []  # rows of every denoise
        self.signals: dict[tuple[int, int, int], Tensor | None] = {}

    def encode(
        self, tokens_BS: Tensor, lengths: Tensor | None = None, prefix: ScriptedPrefix | None = None
    ) -> ScriptedPrefix:
        """Remember the rows."""
        B, S = tokens_BS.shape
        self.encoded.append((B, S))
        if prefix is not None:
            assert lengths is None and (B, S) == (len(prefix.last_B), self.canvas_length)
            return ScriptedPrefix(prefix.last_B, prefix.canvas + 1)
        last_B = torch.full((B,), S) - 1 if lengths is None else lengths - 1
        return ScriptedPrefix(tokens_BS[torch.arange(B), last_B], 0)

    def denoise(self, canvas_BL: Tensor, prefix: ScriptedPrefix, soft_embedding: Tensor | None = None) -> Tensor:
        """The next logits of every row's script."""
        assert canvas_BL.shape == (len(prefix.last_B), self.canvas_length)
        self.denoised.append(len(canvas_BL))
        last = prefix.last_B.tolist()
        for row, token in enumerate(last):
            signal = None if soft_embedding is None else soft_embedding[row]
            self.signals[token, prefix.canvas, prefix.step] = signal
        logits_BLV = torch.stack([self.script(token, prefix.canvas, prefix.step) for token in last])
        prefix.step += 1
        return logits_BLV

    def stats(
        self,
        hidden_BLV: Tensor,
        temperature: Tensor | float,
        uniform_BL: Tensor,
        allowed_BLW: Tensor | None = None,
        shaping: Shaping | None = None,
    ) -> Stats:
        """Statistics as of `Vocabulary.stats`, with softmax(z / T) itself as the soft embedding."""
        B, L, V = hidden_BLV.shape
        flat = token_stats(
            hidden_BLV.reshape(-1, V),
            torch.eye(V),
            None,
            _of_tokens(temperature, L),
            uniform_BL.reshape(-1),
            None if allowed_BLW is None else allowed_BLW.flatten(0, 1),
            shaping,
        )
        return Stats(*(column.view(B, L, *column.shape[1:]) for column in flat))

    def all_but(self, token: int, device: torch.device) -> Tensor:
        """The packed set as of `Vocabulary.all_but`."""
        return pack_allowed((torch.arange(self.vocab_size, device=device) != token)[None])

    def class_stats(
        self,
        hidden_BLV: Tensor,
        temperature: Tensor | float,
        uniform_BL: Tensor,
        classes: Classes,
        penalty: Penalty | None = None,
        excluded: int | None = None,
    ) -> ClassStats:
        """Statistics as of `Vocabulary.class_stats`, with softmax(z / T) itself as the soft embedding."""
        B, L, V = hidden_BLV.shape
        inputs = hidden_BLV.reshape(-1, V), torch.eye(V), None, _of_tokens(temperature, L), uniform_BL.reshape(-1)
        flat = class_stats(*inputs, classes, penalty, excluded)
        return ClassStats(*(column.view(B, L, *column.shape[1:]) for column in flat))


def _of_tokens(temperature: Tensor | float, length: int) -> Tensor | float:
    """One temperature, or one per row as one per token."""
    return temperature.repeat_interleave(length) if isinstance(temperature, Tensor) else temperature


def random_script(
    canvas_length: int, vocab_size: int, targets: dict[tuple[int, int], list[int]], calm: dict[int, int]
) -> Script:
    """Logits that wander, then settle on a target.

    targets: (last prompt token, canvas) -> tokens to settle on (random where absent);
    calm: last prompt token -> the step from which its logits are sharp and still (absent: never).
    """

    def script(last: int, canvas: int, step: int) -> Tensor:
        wander = torch.Generator().manual_seed(last * 10_000 + canvas * 100 + step)
        own = torch.Generator().manual_seed(last * 10_000 + canvas * 100 + 99)
        target = targets.get((last, canvas))
        if target is None:
            target = torch.randint(2, vocab_size, (canvas_length,), generator=own).tolist()
        peak = torch.nn.functional.one_hot(torch.tensor(target), vocab_size).float()
        noise = torch.randn(canvas_length, vocab_size, generator=wander)
        if step >= calm.get(last, 10**9):
            return noise * 0.1 + 15 * peak
        # Some positions settle earlier than others, so that acceptance has something to choose from.
        pace = torch.rand(canvas_length, 1, generator=own) * 14
        return noise * 1.5 + peak * (pace + step)

    return script


class ScriptedRow:
    """A row of `ScriptedPages`: its last prompt token, its canvas, and the steps of that."""

    def __init__(self) -> None:
        self.length, self.accepted, self.last, self.canvas, self.step = 0, 0, -1, -1, 0


class ScriptedPages:
    """Stands in for the pages of a `ScriptedModel`. A row's first tokens are its prompt, the later ones canvases."""

    page_tokens, capacity, weight_addresses = 128, 1 << 40, None

    def __init__(self, model: ScriptedModel):
        self.model, self.rows, self.empty = model, set[ScriptedRow](), ScriptedRow()

    def follow_weights(self) -> None:
        """There are none."""

    def open(self) -> ScriptedRow:
        """An empty row."""
        self.rows.add(row := ScriptedRow())
        return row

    def reuse(self, row: ScriptedRow, tokens: list[int], multiple: int = 1) -> int:
        """Nothing is shared."""
        return 0

    def reserve(self, row: ScriptedRow, tokens: int) -> bool:
        """There is always room."""
        return True

    def has_room(self, row: ScriptedRow, tokens: int) -> bool:
        """There is always room."""
        return True

    def holds(self, tokens: int, added: int) -> bool:
        """A row may be of any length."""
        return True

    def release(self, row: ScriptedRow) -> None:
        """Forget a row."""
        self.rows.remove(row)

    def encode(self, rows: list[ScriptedRow], tokens_BT: Tensor, lengths: list[int], **_: object) -> Tensor:
        """Remember the shape, and what the rows are."""
        self.model.encoded.append(tuple(tokens_BT.shape))
        for row, tokens, length in zip(rows, tokens_BT.tolist(), lengths, strict=True):
            row.last = tokens[length - 1] if row.canvas < 0 else row.last
            row.length, row.canvas, row.step = row.length + length, row.canvas + 1, 0
        return torch.zeros(*tokens_BT.shape, 1)

    def accept(self, row: ScriptedRow) -> None:
        """Nothing is published."""
        row.accepted = row.length

    def step_buffers(self, most: int, canvas_length: int, keeps: bool = True) -> ScriptedSteps:
        """Buffers by which rows are denoised."""
        return ScriptedSteps(self.model)


class ScriptedSteps:
    """Stands in for `StepBuffers`."""

    def __init__(self, model: ScriptedModel):
        self.model, self.rows = model, list[ScriptedRow]()

    def load(self, rows: list[ScriptedRow]) -> None:
        """Take rows."""
        self.rows = list(rows)

    def denoise(self, canvas_BT: Tensor, soft_BTD: Tensor | None = None) -> Tensor:
        """The next logits of every row's script."""
        assert canvas_BT.shape[1] == self.model.canvas_length
        self.model.denoised.append(len(canvas_BT))
        logits = []
        for number, row in enumerate(self.rows[: len(canvas_BT)]):
            signal = None if soft_BTD is None else soft_BTD[number].clone()
            self.model.signals[row.last, row.canvas, row.step] = signal
            logits.append(self.model.script(row.last, row.canvas, row.step))
            row.step += 1
        return torch.stack(logits)


def sampler_for(model: ScriptedModel, *settings: Any, **options: Any) -> Sampler:
    """A sampler with a scripted model."""
    return Sampler(model, *settings, **options, pages=ScriptedPages(model))
