"""Generation settings as files hold them, and traces as files hold them."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import pairwise

import pytest
import torch
from transformers.models.diffusion_gemma import generation_diffusion_gemma as reference

from blockdiff.checkpoint.generation import Generation, special_tokens
from blockdiff.errors import CheckpointError
from blockdiff.sampling.request import Request
from blockdiff.sampling.trace import Recorder, write_traces
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.oracle import our_config, tiny_config
from tests.support.scripted import ScriptedModel, random_script, sampler_for

pytestmark = pytest.mark.quick


def test_the_defaults_are_those_of_transformers():
    theirs = reference.DiffusionGemmaGenerationConfig._get_default_generation_params()
    ours = Generation().to_dict()
    for name, value in theirs.items():
        if name == "sampler_config":
            assert ours[name]["entropy_bound"] == value.entropy_bound
        else:
            assert ours[name] == value
    assert Generation.from_dict({}) == Generation()
    assert Generation.from_dict({"t_min": 0.8, "t_max": 0.8}).t_min == 0.8  # a constant temperature


def test_a_file_that_transformers_wrote_reads_back(tmp_path):
    theirs = reference.DiffusionGemmaGenerationConfig(
        max_new_tokens=64,
        max_denoising_steps=7,
        sampler_config=reference.EntropyBoundSamplerConfig(entropy_bound=0.25),
        t_min=0.1,
        t_max=0.9,
        stability_threshold=2,
        confidence_threshold=0.5,
        eos_token_id=[1, 106, 50],
        pad_token_id=3,
    )
    theirs.save_pretrained(tmp_path)
    expected = Generation(7, 0.25, 0.1, 0.9, 2, 0.5, 64, (1, 106, 50), 3)
    assert Generation.from_pretrained(tmp_path) == expected
    assert Generation.from_dict(expected.to_dict()) == expected


def test_what_we_write_transformers_reads(tmp_path):
    ours = Generation(7, 0.25, 0.1, 0.9, 2, 0.5, 64, (1, 106), 3)
    (tmp_path / "generation_config.json").write_text(json.dumps(ours.to_dict()))
    theirs = reference.DiffusionGemmaGenerationConfig.from_pretrained(tmp_path)
    assert theirs.max_denoising_steps == 7 and theirs.eos_token_id == [1, 106]
    assert theirs.sampler_config == reference.EntropyBoundSamplerConfig(0.25)


def test_missing_values_and_files_are_defaults_and_one_eos_is_a_list_of_one(tmp_path):
    assert Generation.from_pretrained(tmp_path) == Generation()
    config = {"eos_token_id": 106, "t_min": None, "transformers_version": "5.0", "something_new": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert Generation.from_pretrained(tmp_path) == Generation(eos_ids=(106,))


@pytest.mark.parametrize(
    "text, reason",
    [
        ("{", "generation_config.json"),
        ('{"max_denoising_steps": 0}', "json: max_denoising_steps .*0$"),
        ('{"max_denoising_steps": true}', "json: max_denoising_steps .*True$"),
        ('{"confidence_threshold": -1}', "json: confidence_threshold .*-1$"),
        ('{"t_min": 0.9}', r"json: t_min .*t_max.*0\.8.*0\.9$"),
        ('{"sampler_config": {"_cls_name": "OtherConfig"}}', "OtherConfig"),
        ('{"stability_threshold": "two"}', "json: stability_threshold .*'two'$"),
        ("[]", "generation_config.json"),
        ("[" * 10**5, "generation_config.json"),
        ('{"sampler_config": 3}', "sampler_config .*3$"),
        ('{"eos_token_id": "</s>"}', "'</s>'$"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, text, reason):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=reason) as error:
        Generation.from_pretrained(tmp_path)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


class Tokenizer:
    bos_token_id, eos_token_id, pad_token_id = 7, 8, 9
    chat_template, get_vocab = None, dict


NO_TOKENS = our_config(tiny_config(eos_token_id=None, pad_token_id=None, bos_token_id=None))


@pytest.mark.parametrize(
    "sources, expected",
    [
        ((our_config(tiny_config(eos_token_id=[1, 4])), Generation(eos_ids=(5, 6), pad_id=3)), ((5, 6), 3)),
        ((our_config(tiny_config(eos_token_id=[1, 4])), Generation(), Tokenizer()), ((1, 4), 0)),
        ((NO_TOKENS, Generation(), Tokenizer()), ((8,), 9)),
        ((our_config(tiny_config(eos_token_id=0, pad_token_id=3)),), ((0,), 3)),
        ((None, Generation(pad_id=3), Tokenizer()), ((8,), 3)),
        ((None, None, chat_tokenizer()), ((1, 4), 0)),  # 4 ends a turn
        ((None,), ((), 0)),
        (
            (our_config(tiny_config(eos_token_id=[-1], pad_token_id=-1)), Generation(), Tokenizer()),
            ((8,), 9),
        ),  # -1: none
        ((our_config(tiny_config(eos_token_id=0)), Generation(pad_id=10**6)), ((0,), 0)),  # the table has no such row
    ],
)
def test_special_tokens_are_the_settings_else_the_configs_else_the_tokenizers(sources, expected):
    special = special_tokens(*sources)
    assert (special.eos_ids, special.pad_id) == expected


def test_a_vocabulary_whose_every_token_ends_an_answer_is_refused():
    config = our_config(tiny_config())
    with pytest.raises(CheckpointError, match="eos_token_id: every token"):
        special_tokens(config, Generation(eos_ids=tuple(range(config.vocab_size + 1))))


@pytest.fixture
def recorder() -> Recorder:
    model = ScriptedModel(random_script(8, 40, {(9, 1): [5, 1, *[6] * 6]}, {9: 1, 10: 2}), 8, 40)
    recorder = Recorder()
    sampler = sampler_for(model, None, Generation(max_steps=5, max_new_tokens=16, eos_ids=(1,)))
    requests = [Request("ü", tokens=[3, 9]), Request(2, tokens=[10])]
    sampler.generate(requests, on_step=recorder.step, on_canvas=recorder.canvas)
    return recorder


def test_a_trace_holds_every_step_and_canvas(recorder):
    traces = {trace.id: trace for trace in recorder.traces}
    assert set(traces) == {"ü", 2}
    for trace in traces.values():
        assert [canvas.canvas for canvas in trace.canvases] == [0, 1]
        for canvas in trace.canvases:
            steps = trace.steps_of(canvas.canvas)
            assert [step.step for step in steps] == list(range(canvas.steps))
            assert canvas.tokens == steps[-1].argmax
            temperatures = [step.temperature for step in steps]
            assert temperatures == sorted(temperatures, reverse=True)
            for before, after in pairwise(steps):
                stayed = torch.tensor(before.is_accepted)
                assert stayed.any()
                assert (torch.tensor(after.tokens)[stayed] == torch.tensor(before.sample)[stayed]).all()
    assert [canvas.finish_reason for canvas in traces["ü"].canvases] == [None, "eos"]
    assert [canvas.kept for canvas in traces["ü"].canvases] == [8, 2]
    assert traces[2].canvases[1].finish_reason == "length"


def test_a_file_of_traces_has_a_line_per_request_with_all_of_it(recorder, tmp_path):
    path = tmp_path / "trace.jsonl"
    write_traces(path, recorder.traces)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [asdict(trace) for trace in recorder.traces]


def test_a_recorder_with_ids_records_these_requests_only():
    model = ScriptedModel(random_script(8, 40, {}, {}), 8, 40)
    recorder = Recorder(ids=["b"])
    requests = [Request(name, tokens=[9]) for name in "abc"]
    settings = Generation(max_steps=2, max_new_tokens=8)
    sampler_for(model, None, settings).generate(requests, on_step=recorder.step, on_canvas=recorder.canvas)
    assert [(trace.id, len(trace.steps), len(trace.canvases)) for trace in recorder.traces] == [("b", 2, 1)]
