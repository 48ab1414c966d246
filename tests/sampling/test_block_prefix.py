"""Sampling over a prefix of blocks: at every length of a prompt modulo the block, alone and together with others."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest
import torch

from blockdiff.checkpoint.diffusion import DiffusionSettings
from blockdiff.checkpoint.generation import Generation
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.errors import RequestError
from blockdiff.models.pages import Pages
from blockdiff.sampling import Engine, Recorder, Request, Sampler
from blockdiff.sampling.prepare import prepare_sequences
from blockdiff.sampling.strategy import Canvases, Decision, Shape
from tests.oracles.block_loop import fill_from_the_left
from tests.oracles.lockstep import generate_in_lockstep
from tests.support.families import small_model

pytestmark = pytest.mark.quick

L, V, EOS, MASK = 4, 96, 2, 95
LETTERS = "abcdefgh"
TOKENIZER = character_tokenizer(LETTERS)  # ids 3 to 10
SETTINGS = Generation(max_steps=L, max_new_tokens=10, eos_ids=(EOS, 40, 41, 42), pad_id=0)
MASKED = DiffusionSettings(corruption="mask", mask_id=MASK)
LENGTHS = range(1, 3 * L + 1)


@dataclass(frozen=True)
class FromTheLeft:
    """A mask is filled in each step, the first one, and a canvas ends when none is left."""

    def shape(self, step: int, steps: int) -> Shape:
        return Shape(1.0)

    def decide(self, canvases: Canvases) -> Decision:
        is_masked_BL = canvases.tokens_BL == MASK
        is_first_BL = is_masked_BL & (is_masked_BL.cumsum(1) == 1)
        stays_BL = ~is_masked_BL
        final_BL = canvases.stats.sample.where(is_first_BL, canvases.tokens_BL)
        return Decision(is_first_BL, is_masked_BL.sum(1) <= 1, stays_BL, final_BL)


@pytest.fixture(scope="module")
def model():
    return small_model("qwen3 sliding, blocks")


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def asked(**options) -> list[Request]:
    return [Request(n, tokens=prompt(n, n), seed=n, **options) for n in LENGTHS]


def answered(engine: Engine, requests: list[Request]) -> dict:
    for request in requests:
        engine.submit(request)
    while engine.step():
        engine.pages.check()
    return {result.id: result for result in engine.events() if hasattr(result, "forwards")}


@pytest.mark.parametrize(
    "options",
    [{}, {"max_rows": 2, "chunk_tokens": 4, "page_tokens": 4}, {"max_rows": 6, "capacity": 52, "page_tokens": 4}],
    ids=["together", "few rows and small chunks", "preempted"],
)
def test_the_engine_answers_as_a_plain_loop_does(options):
    model = small_model("qwen3 sliding, blocks")
    model.self_conditioning = None  # as released models of blocks have none
    settings = replace(SETTINGS, eos_ids=(EOS,))
    engine = Engine(model, None, settings, MASKED, FromTheLeft(), **options)
    found = answered(engine, asked())
    for n in LENGTHS:
        tokens, steps = fill_from_the_left(model, prompt(n, n), 10, MASK, EOS, n)
        assert (found[n].tokens, found[n].steps) == (tokens, steps)
        assert steps[0] == L - n % L
        if "capacity" not in options:
            blocks = (n >= L) if options == {} else n // L
            assert found[n].forwards.denoise == sum(steps)
            assert found[n].forwards.encode == blocks + len(steps) - 1, "every block once, and the last canvas never"
    assert ("capacity" in options) == (engine._scheduler.preemptions > 0)


def test_pages_are_shared_at_multiples_of_the_block_and_change_no_answer(model):
    begun = prompt(14)
    requests = [Request(n, tokens=[*begun, *prompt(n, n)], seed=n) for n in range(6)]
    engine = Engine(model, None, SETTINGS, MASKED, FromTheLeft(), page_tokens=6, chunk_tokens=6, max_rows=2)
    found = answered(engine, requests)
    assert engine.pages.page_tokens == 8 and Pages(model, 3).page_tokens == 4
    assert {result.cached_tokens for result in found.values()} == {0, 8}
    for request in requests:
        alone = Sampler(model, None, SETTINGS, MASKED, FromTheLeft()).generate([request])[0]
        assert found[request.id].tokens == alone.tokens


CONTROLS = {
    "nothing": {},
    "template": {"template": "ab<?3>c<?2>d"},
    "regex": {"regex": "(ab?c)+d*"},
    "min_tokens": {"min_tokens": 7},
    "banned": {"banned": ("a", 50)},
    "penalty": {"repetition_penalty": 2.0},
    "template and regex": {"template": "a<?6>h", "regex": "a(bc|d)+h"},
    "draft": {"draft": "abcdefgh", "noise": 0.5},
    "draft as it is": {"draft": "abcdefgh", "noise": 0.0},
}


@pytest.mark.parametrize("diffusion", [DiffusionSettings(), MASKED], ids=["uniform noise", "mask noise"])
@pytest.mark.parametrize("name", CONTROLS)
def test_controls_count_from_the_responses_first_token(model, name, diffusion):
    control = CONTROLS[name]
    sampler = Sampler(model, TOKENIZER, SETTINGS, diffusion)
    recorder = Recorder()
    results = sampler.generate(asked(**control), on_step=recorder.step, on_canvas=recorder.canvas)
    sequences = [prepare_sequences(request, sampler.settings)[0] for request in asked(**control)]
    generate_in_lockstep(model, sampler.settings, sequences)
    for result, sequence, trace in zip(results, sequences, recorder.traces, strict=True):
        assert result.error is None and result.tokens == sequence.tokens and result.steps == sequence.steps
        places = [len(canvas.tokens) for canvas in trace.canvases]
        assert places[0] == L - result.id % L and set(places[1:]) <= {L}
        assert all(len(step.tokens) == places[step.canvas] for step in trace.steps)
        assert [token for canvas in trace.canvases for token in canvas.tokens][: len(result.tokens)] == result.tokens
        if "template" in control:
            form = re.sub(r"<\?(\d+)>", f"[{LETTERS}]{{\\1}}", control["template"])
            assert re.fullmatch(form, result.text)
        if "regex" in control:
            assert re.fullmatch(control["regex"], result.text)
        if "min_tokens" in control:
            assert len(result.tokens) >= 7
        if "banned" in control:
            assert not {3, 50} & set(result.tokens)


def test_max_tokens_fill_the_last_block_and_stop_texts_end_a_response_anywhere(model):
    sampler = Sampler(model, TOKENIZER, replace(SETTINGS, eos_ids=(MASK,)), MASKED, FromTheLeft())
    for result in sampler.generate(asked()):
        assert (result.id + len(result.tokens)) % L == 0 and 10 <= len(result.tokens) < 10 + L
        assert result.finish_reason == "length"
    sampler = Sampler(model, TOKENIZER, SETTINGS, MASKED, FromTheLeft())
    for result in sampler.generate(asked(regex="(abcdefgh)+", stop=("cd",))):
        assert result.text == "ab" and result.finish_reason == "stop" and len(result.tokens) == 4


def test_a_request_that_fits_the_positions_is_taken_and_one_more_token_is_not(model):
    sampler = Sampler(model, None, SETTINGS, MASKED, FromTheLeft())
    room = model.config.max_position_embeddings
    taken = Request("a", tokens=prompt(room - 10), max_new_tokens=10)
    assert len(sampler.generate([taken])[0].tokens) <= 10
    with pytest.raises(RequestError, match="positions"):
        sampler.generate([Request("a", tokens=prompt(room - 9), max_new_tokens=10)])


def test_a_read_looks_behind_the_prompts_tail(model):
    sampler = Sampler(model, TOKENIZER, SETTINGS, MASKED)
    for n in (8, 9, 10):
        request = Request("q", tokens=prompt(n), seed=1)
        [read] = sampler.read([request], "<?one>", {"one": ["a", "d", "h"]}, draws=1)
        begin = n // L * L
        block = [*prompt(n)[begin:], MASK, *[EOS] * L][:L]
        hidden = model.denoise(torch.tensor([block]), model.encode(torch.tensor([prompt(n)[:begin]])))
        wanted = model.unembed(hidden)[0, n - begin, [3, 6, 10]].double().softmax(-1)
        assert list(read.probabilities["one"].values()) == pytest.approx(wanted.tolist(), abs=1e-6)
    with pytest.raises(RequestError, match="canvas of 4"):
        sampler.read([Request("q", tokens=prompt(11))], "ab<?one>", {"one": ["a", "d"]})
