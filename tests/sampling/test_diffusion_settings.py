"""The settings of diffusion that a model was trained for, in sampling, and the file that keeps them."""

from __future__ import annotations

import warnings
from itertools import pairwise

import pytest
import torch

from blockdiff import checkpoint
from blockdiff.checkpoint import Carried
from blockdiff.diffusion.corruption import MaskCorruption, UniformCorruption
from blockdiff.diffusion.schedule import Linear
from blockdiff.errors import CheckpointError
from blockdiff.objective import Objective
from blockdiff.sampling import DiffusionSettings, Generation, Recorder, Request, Sampler
from tests.support.oracle import tiny_config
from tests.support.scripted import ScriptedModel, random_script, sampler_for

pytestmark = pytest.mark.quick

L, V, MASK = 8, 40, 39
GENERATION = Generation(max_steps=12, max_new_tokens=2 * L)
MASKED = DiffusionSettings(corruption="mask", mask_id=MASK)


def scripted(targets=None, calm=None) -> ScriptedModel:
    return ScriptedModel(random_script(L, V, targets or {}, calm or {}), L, V)


def steps_of(diffusion: DiffusionSettings | None, script=None, **settings) -> tuple[Recorder, list]:
    recorder = Recorder()
    model = ScriptedModel(script, L, V) if script else scripted(calm={9: 4})
    generation = Generation(max_steps=12, max_new_tokens=2 * L, **settings)
    sampler = sampler_for(model, None, generation, diffusion)
    requests = [Request(n, tokens=[n]) for n in (9, 10, 11)]
    return recorder, sampler.generate(requests, on_step=recorder.step, on_canvas=recorder.canvas)


# -- mask noise ----------------------------------------------------------------------------------------------


def test_a_mask_model_starts_from_masks_and_fills_them_for_good():
    recorder, results = steps_of(MASKED)
    assert all(MASK not in result.tokens for result in results)
    for trace in recorder.traces:
        for canvas in trace.canvases:
            steps = trace.steps_of(canvas.canvas)
            assert steps[0].tokens == [MASK] * L
            for before, after in pairwise(steps):
                for old, sample, accepted, new in zip(
                    before.tokens, before.sample, before.is_accepted, after.tokens, strict=True
                ):
                    # a mask becomes the sampled token where it is accepted; other tokens stay what they are
                    assert new == (old if old != MASK else sample if accepted else MASK)
                hidden = [step.tokens.count(MASK) for step in (before, after)]
                assert hidden[1] < hidden[0] or hidden[0] == 0, "every step fills at least one mask"


def test_visible_tokens_are_certain():
    recorder, _ = steps_of(MASKED)
    for trace in recorder.traces:
        for step in trace.steps:
            for token, argmax, sample, entropy in zip(step.tokens, step.argmax, step.sample, step.entropy, strict=True):
                assert MASK not in (argmax, sample)
                if token != MASK:
                    assert (argmax, sample, entropy) == (token, token, 0.0)


def test_the_mask_token_is_never_predicted_however_likely_the_model_says_it_is():
    def script(last: int, canvas: int, step: int) -> torch.Tensor:
        z = torch.randn(L, V, generator=torch.Generator().manual_seed(last + step))
        z[:, MASK] = 20.0
        return z

    recorder, results = steps_of(MASKED, script)
    assert all(MASK not in result.tokens for result in results)
    entropies = [e for trace in recorder.traces for step in trace.steps for e in step.entropy if e]
    assert min(entropies) > 0.5  # of the distribution over the other tokens


def test_uniform_models_sample_as_they_did():
    """From uniform noise, and the last token of the vocabulary is as good as any other."""
    default, plain = (steps_of(diffusion) for diffusion in (None, DiffusionSettings()))
    assert default[1] == plain[1]
    starts = [step.tokens for trace in plain[0].traces for step in trace.steps if step.step == 0]
    assert all(len(set(start)) > 2 for start in starts)
    assert MASK in {token for trace in plain[0].traces for step in trace.steps for token in step.tokens}


def test_a_mask_model_draws_for_each_request_alone():
    _, together = steps_of(MASKED)
    alone = sampler_for(scripted(calm={9: 4}), None, GENERATION, MASKED).generate([Request(10, tokens=[10])])
    assert alone[0] == together[1]


def test_a_real_model_fills_masks():
    model = checkpoint.init(tiny_config(canvas_length=L), seed=0, device="cpu", kernels="torch")
    mask_id = 100
    diffusion = DiffusionSettings(corruption="mask", mask_id=mask_id)
    recorder = Recorder()
    sampler = Sampler(model, None, Generation(max_steps=8, max_new_tokens=L), diffusion)
    [result] = sampler.generate([Request(0, tokens=[5, 6, 7])], on_step=recorder.step, on_canvas=recorder.canvas)
    counts = [step.tokens.count(mask_id) for step in recorder.traces[0].steps]
    assert counts[0] == L and counts == sorted(counts, reverse=True) and mask_id not in result.tokens


# -- leave one out -------------------------------------------------------------------------------------------


def test_the_released_rules_take_the_logits_of_a_leave_one_out_model_as_they_are():
    _, results = steps_of(DiffusionSettings(prediction="leave_one_out"))
    assert results == steps_of(None)[1]


def test_no_model_is_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps_of(None), steps_of(MASKED), steps_of(DiffusionSettings(prediction="leave_one_out"))


# -- the file ------------------------------------------------------------------------------------------------


def test_choices_survive_their_file(tmp_path):
    assert DiffusionSettings.from_pretrained(tmp_path) == DiffusionSettings()
    ours = DiffusionSettings("posterior", "mask", 7, {"schedule": "cosine", "eps": 1e-4})
    ours.save(tmp_path)
    assert DiffusionSettings.from_pretrained(tmp_path) == ours
    assert [file.name for file in tmp_path.iterdir()] == ["blockdiff.json"]


def test_the_choices_of_an_objective_come_from_its_parts():
    def objective(corruption, **options) -> Objective:
        return Objective(torch.nn.Linear(1, 1), Linear(), corruption, **options)

    assert DiffusionSettings.of(objective(UniformCorruption(V))) == DiffusionSettings()
    assert DiffusionSettings.of(objective(MaskCorruption(7)), {"schedule": "linear"}) == DiffusionSettings(
        "posterior", "mask", 7, {"schedule": "linear"}
    )
    assert (
        DiffusionSettings.of(objective(UniformCorruption(V), prediction="leave_one_out")).prediction == "leave_one_out"
    )


@pytest.mark.parametrize(
    "text, reason",
    [
        ("{", "not readable"),
        ("[]", "not a list"),
        ('{"prediction": "x0"}', "prediction must.*'x0'"),
        ('{"corruption": "gaussian"}', "corruption must.*'gaussian'"),
        ('{"corruption": "mask"}', ": mask_id "),
        ('{"corruption": "mask", "mask_id": true}', ": mask_id "),
        ('{"mask_id": 5}', ": mask_id .*5"),
        ('{"mask_id": [1]}', ": mask_id "),
        (
            '{"predictoin": "leave_one_out"}',
            "predictoin.*prediction, corr",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_named_in_one_line(tmp_path, text, reason):
    (tmp_path / "blockdiff.json").write_text(text)
    with pytest.raises(CheckpointError, match=reason) as error:
        DiffusionSettings.from_pretrained(tmp_path)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_a_mask_token_outside_the_vocabulary_is_refused():
    with pytest.raises(CheckpointError, match=r"mask_id 40.*40 tokens"):
        Sampler(scripted(), None, GENERATION, DiffusionSettings(corruption="mask", mask_id=V))


def test_without_choices_those_beside_the_weights_decide(tmp_path):
    MASKED.save(tmp_path)
    model = scripted()
    model.carried = Carried(side_files=(tmp_path / "tokenizer.json", tmp_path / "blockdiff.json"))
    assert Sampler(model, None, GENERATION).diffusion == MASKED
    assert Sampler(model, None, GENERATION, DiffusionSettings()).diffusion == DiffusionSettings()


def test_choices_travel_with_a_checkpoint(tmp_path):
    model = checkpoint.init(tiny_config(canvas_length=L), seed=0, device="cpu", kernels="torch")
    first, second = tmp_path / "first", tmp_path / "second"
    checkpoint.save(model, first)
    DiffusionSettings(corruption="mask", mask_id=100).save(first)
    loaded = checkpoint.load(first, dtype="float32", device="cpu", kernels="torch")
    assert Sampler(loaded, None, GENERATION).diffusion.mask_id == 100
    checkpoint.save(loaded, second)
    assert DiffusionSettings.from_pretrained(second).mask_id == 100
