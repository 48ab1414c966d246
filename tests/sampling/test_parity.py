"""The sampling loop against transformers' `generate`: the same logits and draws give the same everything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers.models.diffusion_gemma import generation_diffusion_gemma as reference

from blockdiff.checkpoint.generation import Generation
from blockdiff.sampling.request import Request, Result
from blockdiff.sampling.sampler import Sampler
from blockdiff.sampling.trace import Recorder
from tests.oracles.lockstep import Draws
from tests.support.oracle import oracle, ours, tiny_config
from tests.support.scripted import ScriptedModel, random_script, sampler_for

L, V, PAD = 16, 384, 0


def tokens_per_step(result: Result) -> float:
    """As transformers counts them: tokens other than pad, per denoising step."""
    return sum(token != PAD for token in result.tokens) / sum(result.steps)


class SameDraws:
    """Stands in for torch's randint and multinomial with the addressed draws of the requests."""

    draws: Draws

    def __init__(self, seeds: list[int], length: int = L, vocabulary: int = V):
        self.seed_B, self.length, self.vocabulary = torch.tensor(seeds), length, vocabulary
        self.canvas, self.step, self.expects_renoise = -1, 0, False

    def randint(self, low: int, high: int, size: tuple[int, int], device: torch.device) -> Tensor:
        """The initial canvas, then after every sample the noise of the next step."""
        assert (low, high, size) == (0, self.vocabulary, (len(self.seed_B), self.length))
        if self.expects_renoise:
            self.step += 1
        else:
            self.canvas, self.step = self.canvas + 1, 0
            self.draws = Draws(self.seed_B, self.canvas, self.length, self.vocabulary)
        self.expects_renoise = False
        return self.draws.of_step(self.step)[1]

    def multinomial(self, probabilities_NV: Tensor, num_samples: int) -> Tensor:
        """Inverse CDF at the addressed uniform numbers."""
        self.expects_renoise = True
        uniform_N1 = self.draws.of_step(self.step)[0].reshape(-1, 1)
        cdf_NV = probabilities_NV.cumsum(-1)
        return torch.searchsorted(cdf_NV, uniform_N1 * cdf_NV[:, -1:], right=True).clamp_(max=self.vocabulary - 1)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """transformers draws from here."""
        fake = SimpleNamespace(**{name: getattr(torch, name) for name in dir(torch) if not name.startswith("__")})
        fake.randint, fake.multinomial = self.randint, self.multinomial
        with mock.patch.object(reference, "torch", fake):
            yield


class Watched(reference.EntropyBoundSampler):
    """transformers' sampler, remembering what it accepted."""

    masks: list[Tensor]

    def accept_canvas(self, *args):
        canvas = super().accept_canvas(*args)
        self.masks.append(self.accepted_token_mask.clone())
        return canvas


class Drafts:
    """Takes transformers' drafts: the argmax canvas of every step."""

    def __init__(self):
        self.drafts = []

    def put(self, value):
        pass

    def put_draft(self, value):
        self.drafts.append(value)

    def end(self):
        pass


def their_config(generation: Generation) -> reference.DiffusionGemmaGenerationConfig:
    config = generation.to_dict()
    return reference.DiffusionGemmaGenerationConfig(**config)


GENERATION = Generation(max_steps=9, max_new_tokens=2 * L + 1, eos_ids=(1, 106, 50), pad_id=PAD)

CANVAS = list(range(10, 10 + L))
TARGETS = {
    (3, 0): [
        *CANVAS[:5],
        106,
        *CANVAS[5:9],
        1,
        0,
        0,
        7,
        7,
        7,
    ],  # the first of two eos counts, in the first canvas
    (4, 1): [PAD, *CANVAS[1:-1], 50],  # eos in the last place of the second canvas; a pad in mid-text stays
    (5, 0): [PAD] * L,  # a canvas of pads does not end a response
    (6, 2): [1, *CANVAS[1:]],  # eos in the first place of the last canvas
}
CALM = {3: 2, 4: 0, 5: 4, 6: 1}  # row 7 never settles


@pytest.mark.quick
@pytest.mark.parametrize("stability", [0, 1, 3])
def test_every_step_equals_transformers_on_scripted_logits(stability):
    script = random_script(L, V, TARGETS, CALM)
    generation = Generation.from_dict({**GENERATION.to_dict(), "stability_threshold": stability})
    requests = [Request(f"row {last}", tokens=[9, 9, last], seed=100 + last) for last in (3, 4, 5, 6, 7)]
    count = len(requests)

    # transformers, its decoder replaced by the script
    theirs = oracle(tiny_config(L), dtype=torch.float32)
    draws, seen, streamer = SameDraws([r.seed for r in requests]), [], Drafts()
    steps_of_canvas: dict[int, int] = {}

    def forward(decoder_input_ids, self_conditioning_logits, decoder_position_ids, past_key_values, **_):
        canvas = (int(decoder_position_ids[0, 0]) - 3) // L
        assert past_key_values.get_seq_length() == 3 + canvas * L
        step = steps_of_canvas.get(canvas, 0)
        steps_of_canvas[canvas] = step + 1
        seen.append((canvas, step, decoder_input_ids.clone(), self_conditioning_logits))
        return SimpleNamespace(logits=torch.stack([script(r.tokens[-1], canvas, step) for r in requests]))

    Watched.masks = []
    with draws.patched(), mock.patch.object(reference, "EntropyBoundSampler", Watched):
        theirs.forward = forward
        output = theirs.generate(
            torch.tensor([r.tokens for r in requests]),
            generation_config=their_config(generation),
            streamer=streamer,
        )

    # this project
    model, recorder = ScriptedModel(script, L, V), Recorder()
    sampler = sampler_for(model, None, generation)
    results = sampler.generate(requests, on_step=recorder.step, on_canvas=recorder.canvas)

    traces = {trace.id: trace for trace in recorder.traces}
    steps_run = 0
    for (canvas, step, tokens_BL, signal), mask, argmax in zip(seen, Watched.masks, streamer.drafts, strict=True):
        for row, request in enumerate(requests):
            record = [s for s in traces[request.id].steps_of(canvas) if s.step == step]
            if not record:
                continue
            steps_run += 1
            assert record[0].tokens == tokens_BL[row].tolist()
            assert record[0].is_accepted == mask[row].tolist()
            assert record[0].argmax == argmax[row].tolist()
            ours_signal = model.signals[request.tokens[-1], canvas, step]
            assert (signal is None) == (step == 0)
            if signal is None:
                assert ours_signal is None or not ours_signal.any()
            else:
                torch.testing.assert_close(ours_signal, signal[row].softmax(-1), rtol=1e-4, atol=1e-6)
    assert steps_run == sum(sum(result.steps) for result in results) == len(model.signals)

    new_tokens = output.sequences[:, 3:]
    for row, result in enumerate(results):
        padded = result.tokens + [PAD] * (new_tokens.shape[1] - len(result.tokens))
        assert padded == new_tokens[row].tolist()
        assert tokens_per_step(result) == pytest.approx(output.tokens_per_forward[row].item(), rel=1e-6)
    assert [r.finish_reason for r in results] == ["eos", "eos", "length", "eos", "length"]
    assert [len(r.tokens) for r in results] == [6, 2 * L, 3 * L, 2 * L + 1, 3 * L]
    assert results[4].steps == [9, 9, 9] and len({tuple(r.steps) for r in results}) == count


@pytest.mark.quick
def test_the_argmax_canvas_is_committed_not_the_renoised_one():
    script = random_script(L, V, {}, {})
    recorder = Recorder()
    sampler = sampler_for(ScriptedModel(script, L, V), None, GENERATION)
    request = Request("a", tokens=[7])
    [result] = sampler.generate([request], max_new_tokens=L, max_steps=3, on_step=recorder.step)
    last = recorder.traces[0].steps[-1]
    assert result.tokens == last.argmax != last.tokens
    assert last.argmax != last.sample  # the case means something: a sampled canvas would differ


@pytest.fixture(scope="module")
def pair():
    """transformers' model in fp64 and ours with its weights.

    Random weights are chaotic: through the soft embedding a rounding error grows fourteenfold with each step.
    A weaker signal keeps runs comparable; its exact strength is tested with the backbone.
    """
    theirs = oracle(tiny_config(L), seed=3)
    with torch.no_grad():
        theirs.model.decoder.self_conditioning.down_proj.weight *= 0.1
        theirs.model.decoder.norm.weight *= 2
    return theirs, ours(theirs)


# Settings under which a random model stops early now and then, and meets an eos now and then.
LIVELY = Generation(
    max_steps=12,
    max_new_tokens=3 * L,
    stability=0,
    confidence=0.8,
    entropy_bound=1.0,
    eos_ids=tuple(range(1, 12)),
    pad_id=PAD,
)


def requests_of(lengths: list[int]) -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    return [
        Request(n, tokens=torch.randint(3, 380, (length,), generator=generator).tolist(), seed=n)
        for n, length in enumerate(lengths)
    ]


PROMPTS = [5, 21, 40, 21, 15, 1]  # shorter and longer than the window of 16


@pytest.mark.quick
def test_whole_runs_equal_transformers_token_for_token(pair):
    theirs, model = pair
    for request in requests_of(PROMPTS):
        draws = SameDraws([request.seed])
        with draws.patched():
            output = theirs.generate(torch.tensor([request.tokens]), generation_config=their_config(LIVELY))
        [result] = Sampler(model, None, LIVELY).generate([request])
        new_tokens = output.sequences[0, len(request.tokens) :].tolist()
        assert result.tokens == new_tokens[: len(result.tokens)]
        assert set(new_tokens[len(result.tokens) :]) <= {PAD}
        assert abs(tokens_per_step(result) - output.tokens_per_forward[0].item()) < 1e-6


def test_a_request_gets_the_same_tokens_alone_and_in_any_batch(pair):
    sampler = Sampler(pair[1], None, LIVELY)
    requests = requests_of(PROMPTS)
    alone = [sampler.generate([request])[0] for request in requests]
    steps = [count for result in alone for count in result.steps]
    assert len(set(steps)) > 3, "rows should leave the batch at different steps"
    assert {result.finish_reason for result in alone} == {"eos", "length"}
    is_equal = sampler.generate(requests) == alone
    assert is_equal
    for batch_size, order in ((3, [0, 1, 2, 3, 4, 5]), (2, [5, 3, 1, 0, 2, 4]), (6, [2, 0])):
        together = sampler.generate([requests[n] for n in order], batch_size=batch_size)
        is_equal = together == [alone[n] for n in order]
        assert is_equal, (batch_size, order)
