"""Reads: the distributions of a template's holes are those of the model's own logits, whoever shares the steps."""

from __future__ import annotations

import pytest
import torch

from blockdiff.checkpoint import init
from blockdiff.checkpoint.diffusion import DiffusionSettings
from blockdiff.checkpoint.generation import Generation
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.errors import RequestError
from blockdiff.sampling import Recorder, Request, Sampler
from blockdiff.seeding import Stream, child_seed, to_integers, words
from tests.support.little_model import LITTLE, save_preset

pytestmark = pytest.mark.quick
TOKENIZER = character_tokenizer("abcdefgh")
GENERATION = Generation(max_steps=8, eos_ids=(1,), stability=8)
TEMPLATE, CHOICES = "ab<?one>c<?two>", {"one": ["a", "d", "h"], "two": ["ab", "gh"]}
FILLED = [*TOKENIZER("ab?c??".replace("?", "e"), add_special_tokens=False)["input_ids"], 1, 1, 1]
HOLES = {"one": [2], "two": [4, 5]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    preset = tmp_path_factory.mktemp("model") / "preset.json"
    save_preset(preset, LITTLE)
    return init(preset, seed=1, dtype="float64")


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def noise(seed: int, length: int, vocab_size: int) -> torch.Tensor:
    drawn = words(torch.tensor([seed - 2**64 if seed >= 2**63 else seed]), Stream.SAMPLE, (0, 0), 2 * length)
    return to_integers(drawn[:, length:], vocab_size)


def marginals(model, hidden_LD: torch.Tensor) -> dict[str, torch.Tensor]:
    """The probabilities of the choices of each hole, by the logits of a canvas."""
    logits = model.unembed(hidden_LD).double()
    found = {}
    for name, places in HOLES.items():
        of_choices = [sum(map(logits.__getitem__, zip(places, ids(text), strict=True))) for text in CHOICES[name]]
        found[name] = torch.stack(of_choices).softmax(0)
    return found


@torch.no_grad()
def test_one_step_reads_the_softmax_of_the_logits_over_the_choices(model) -> None:
    prompt, L = [2, 5, 9, 4], model.canvas_length
    [read] = Sampler(model, TOKENIZER, GENERATION).read(
        [Request("q", tokens=prompt, seed=7)], TEMPLATE, CHOICES, draws=3
    )
    found = []
    for seed in (7, child_seed(7, 1), child_seed(7, 2)):
        canvas = torch.tensor([FILLED])
        for place in (2, 4, 5):
            canvas[0, place] = noise(seed, L, model.vocab_size)[0, place]
        found.append(marginals(model, model.denoise(canvas, model.encode(torch.tensor([prompt])))[0]))
    for name, texts in CHOICES.items():
        p_NX = torch.stack([each[name] for each in found])
        for values, wanted_X in ((read.probabilities, p_NX.mean(0)), (read.spread, p_NX.std(0, correction=0))):
            assert list(values[name]) == texts
            torch.testing.assert_close(
                torch.tensor([*values[name].values()]).double(), wanted_X, atol=1e-7, rtol=0
            )  # logits are fp32
        assert max(read.spread[name].values()) > 1e-3
    product = read.probabilities["one"]["d"] * read.probabilities["two"]["gh"]
    assert read.product_of_marginals(one="d", two="gh") == product


@torch.no_grad()
def test_later_steps_read_what_the_model_says_after_those_before(model) -> None:
    sampler, recorder = Sampler(model, TOKENIZER, GENERATION), Recorder()
    request = Request("q", tokens=[2, 5, 9, 4], seed=7)
    [read] = sampler.read([request], TEMPLATE, CHOICES, steps=2, draws=1)
    filled = Request("q", tokens=[2, 5, 9, 4], seed=7, template="ab<?1>c<?2>", max_steps=2)
    sampler.generate([filled], on_step=recorder.step)
    first, second = recorder.traces[0].steps
    prefix = model.encode(torch.tensor([[2, 5, 9, 4]]))
    before = model.denoise(torch.tensor([first.tokens]), prefix)
    soft = model.vocabulary.soft_embedding(before, first.temperature)
    truth = marginals(model, model.denoise(torch.tensor([second.tokens]), prefix, soft_embedding=soft)[0])
    for name, texts in CHOICES.items():
        values = torch.tensor([read.probabilities[name][text] for text in texts]).double()
        torch.testing.assert_close(values, truth[name], atol=1e-7, rtol=0)  # temperatures are fp32


def test_a_read_is_the_same_in_company(model) -> None:
    requests = [Request(n, tokens=[2, *range(3, 4 + n % 7)], seed=n) for n in range(9)]
    sampler = Sampler(model, TOKENIZER, GENERATION)
    together = sampler.read(requests, TEMPLATE, CHOICES, steps=2, draws=2, batch_size=5)
    for request, read in zip(requests, together, strict=True):
        [alone] = sampler.read([request], TEMPLATE, CHOICES, steps=2, draws=2)
        for name in CHOICES:
            assert alone.probabilities[name] == pytest.approx(read.probabilities[name], abs=1e-12)


def test_a_free_hole_has_the_likeliest_texts_of_each_position(model) -> None:
    [read] = Sampler(model, TOKENIZER, GENERATION).read(["abc"], "<?x:2>b<?y:1>", draws=2)
    assert list(read.probabilities) == ["x[0]", "x[1]", "y"]
    for shares in read.probabilities.values():
        assert {*shares} == {*"abcdefgh"} and sum(shares.values()) == pytest.approx(1)
        assert list(shares.values()) == sorted(shares.values(), reverse=True)


@pytest.mark.parametrize(
    "asked,message",
    [
        ({"template": "a<?one>", "choices": None}, r"<\?one>.*neither"),
        ({"template": "a<?one:2>", "choices": {"one": ["a", "b"]}}, "both.*choices"),
        ({"template": "<?2>"}, "no name"),
        ({"template": "<?a:1><?a:1>"}, "two holes"),
        ({"choices": {"one": ["a", "bc"], "two": ["a", "b"]}}, "'a' has 1 .*'bc' 2"),
        ({"choices": {"one": ["a"], "two": ["a", "b"]}}, "'one' .*two texts"),
        ({"choices": {"one": ["a", "a"], "two": ["a", "b"]}}, "differ"),
        ({"choices": {**CHOICES, "three": ["a", "b"]}}, r"<\?three>"),
        ({"choices": {"one": ["a", "z"], "two": ["a", "b"]}}, "'z'"),
        ({"template": "abcdefghab<?one>", "choices": {"one": ["a", "b"]}}, "canvas of 9"),
        ({"template": "<?a:9><?b:8>", "choices": None}, "17 tokens"),
        ({"draws": 0}, "draws .*1,024"),
        ({"steps": True}, "steps .*1,000,000"),
        ({"prompts": [Request("q", prompt="a", regex="a")]}, "prompt alone"),
        ({"prompts": "a"}, "prompts .*list"),
    ],
)
def test_what_cannot_be_read_is_refused_before_anything_runs(model, asked, message, monkeypatch) -> None:
    monkeypatch.setattr(Sampler, "_answers", None)
    with pytest.raises(RequestError, match=message) as caught:
        Sampler(model, TOKENIZER, GENERATION).read(
            **{"prompts": ["a"], "template": TEMPLATE, "choices": CHOICES} | asked
        )
    assert "\n" not in str(caught.value)


def test_a_model_of_mask_noise_is_read_after_one_step(model) -> None:
    masked = DiffusionSettings(corruption="mask", mask_id=15)
    sampler = Sampler(model, TOKENIZER, GENERATION, masked)
    [read] = sampler.read(["abc"], TEMPLATE, CHOICES, draws=2)
    assert max(read.spread["one"].values()) < 1e-12, "all draws of the noise are the mask"
    with pytest.raises(RequestError, match="for good"):
        sampler.read(["abc"], TEMPLATE, CHOICES, steps=2)


def test_logits_that_are_not_finite_raise(model) -> None:
    broken = init(model.config, seed=0, dtype="float64")
    broken.norm.weight.data.fill_(torch.nan)
    with pytest.raises(RequestError, match="not finite"):
        Sampler(broken, TOKENIZER, GENERATION).read(["abc"], TEMPLATE, CHOICES)
