"""The sampler over requests and batches; nothing is encoded or denoised twice or for nobody."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from blockdiff.checkpoint import Carried
from blockdiff.checkpoint.generation import Generation
from blockdiff.checkpoint.tokenizer import mismatch
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.errors import RequestError
from blockdiff.sampling.engine import Engine
from blockdiff.sampling.request import Request, Result
from blockdiff.sampling.sampler import Sampler
from blockdiff.sampling.step import STEPS_AHEAD
from tests.oracles.lockstep import Draws
from tests.support.scripted import ScriptedModel, random_script, sampler_for
from tests.support.streamed import streamed

pytestmark = pytest.mark.quick

L, V = 8, 40
EOS = 1
B = 14  # the letter b
GENERATION = Generation(max_steps=6, max_new_tokens=3 * L, eos_ids=(EOS,))


def scripted(targets=None, calm=None) -> ScriptedModel:
    return ScriptedModel(random_script(L, V, targets or {}, calm or {}), L, V)


def tokenizer():
    return character_tokenizer("0123456789abcdefghijklmnopqrstuvwxyz=")


def spell(text: str) -> list[int]:
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


def test_prompts_are_encoded_once_and_a_commit_encodes_only_the_new_canvas():
    model = scripted()
    sampler_for(model, None, GENERATION).generate([Request(n, tokens=[n, 7, 7][: n + 1]) for n in range(3)])
    # One encode of the prompts of similar length each, then one canvas after each canvas but the last.
    assert model.encoded[:2] == [(2, 3), (1, 1)]
    assert {width for _, width in model.encoded[2:]} == {L} and sum(rows for rows, _ in model.encoded[2:]) == 6


def test_rows_do_not_wait_for_one_another():
    model = scripted(calm={10: 0, 11: 2})  # token 12 never settles
    requests = [Request(n, tokens=[n]) for n in (10, 11, 12)]
    results = sampler_for(model, None, GENERATION).generate(requests, max_new_tokens=2 * L)
    assert [r.steps for r in results] == [[2, 2], [4, 4], [6, 6]]
    assert model.denoised == [3, 3, 3, 3, 2, 2, 2, 2, *[1] * 4]
    assert model.encoded == [(3, 1), (1, L), (1, L), (1, L)]


def test_a_row_that_met_its_eos_leaves_for_good():
    model = scripted(targets={(10, 0): [5, EOS, 5, 5, 5, 5, 5, 5]}, calm={10: 0, 11: 0})
    results = sampler_for(model, None, GENERATION).generate([Request(n, tokens=[n]) for n in (10, 11)])
    assert [r.finish_reason for r in results] == ["eos", "length"]
    assert results[0].tokens == [5, EOS] and len(results[1].tokens) == 3 * L
    assert model.encoded == [(2, 1), (1, L), (1, L)] and model.denoised == [2, 2, 1, 1, 1, 1]


def test_nothing_is_encoded_after_the_last_canvas_of_anyone():
    model = scripted(targets={(10, 0): [EOS] * L}, calm={10: 0})
    sampler_for(model, None, GENERATION).generate([Request(0, tokens=[10])])
    assert model.encoded == [(1, 1)]


def test_max_new_tokens_rounds_up_to_whole_canvases():
    for asked, given in ((1, L), (L, L), (L + 1, 2 * L)):
        [result] = sampler_for(scripted(), None, GENERATION).generate([Request(0, tokens=[9])], max_new_tokens=asked)
        assert len(result.tokens) == given and result.finish_reason == "length"


def test_batch_size_bounds_the_rows_that_run_together():
    model = scripted(calm=dict.fromkeys(range(10, 15), 0))
    requests = [Request(n, tokens=[n]) for n in range(10, 15)]
    results = sampler_for(model, None, GENERATION).generate(requests, batch_size=2, max_new_tokens=L)
    assert model.encoded == [(2, 1), (2, 1), (1, 1)]
    assert [r.id for r in results] == [10, 11, 12, 13, 14]


def test_results_keep_the_order_of_the_prompts_whatever_their_lengths():
    prompts = ["abcdef", "a", "abc"]
    results = sampler_for(scripted(), tokenizer(), GENERATION).generate(prompts, batch_size=2)
    assert [r.id for r in results] == [0, 1, 2]
    for prompt, result in zip(prompts, results, strict=True):
        alone = sampler_for(scripted(), tokenizer(), GENERATION).generate([Request(result.id, prompt=prompt)])
        assert alone == [result]


def test_the_seed_decides_and_follows_from_the_call_and_the_id_unless_given():
    def noise(request: Request, seed: int = 0) -> list[int]:
        starts: list[list[int]] = []
        sampler = sampler_for(scripted(), None, GENERATION)
        sampler.generate([request], seed=seed, max_steps=1, on_step=lambda step: starts.append(step.tokens))
        return starts[0] + starts[1]

    a, b, one = (Request(id, tokens=[9]) for id in ("a", "b", 1))
    assert noise(a) == noise(a)
    assert len({tuple(noise(request, seed)) for request in (a, b, one) for seed in (0, 1)}) == 6
    x, y = Request("x", tokens=[9], seed=5), Request("y", tokens=[9], seed=5)
    assert noise(x) == noise(y) == noise(x, seed=1) != noise(a, seed=5)
    assert noise(Request("x", tokens=[9], seed=2**64 - 1)) != noise(Request("x", tokens=[9], seed=2**63 - 1))


def test_raw_prompts_get_one_bos_and_text_leaves_special_tokens_out():
    response = [*spell("hi"), EOS, *spell("xxxxx")]
    model = scripted(targets={(B, 0): response}, calm={B: 0})
    events = []
    for prompt in ("ab", Request(0, prompt="<bos>ab", allow_control_tokens=True)):
        [result] = sampler_for(model, tokenizer(), GENERATION).generate([prompt], on_canvas=events.append)
        assert model.encoded[-1] == (1, 3)
        assert (result.text, result.tokens) == ("hi", [*spell("hi"), EOS])
    assert (events[0].text, events[0].kept, events[0].tokens) == ("hi", 3, response)
    assert (events[0].prompt, events[0].finish_reason) == ("ab", "eos")


def test_text_leaves_out_an_eos_that_is_no_special_token():
    end = spell("z")[0]
    model = scripted(targets={(B, 0): [*spell("hi"), end, *spell("aaaaa")]}, calm={B: 0})
    generation = Generation(max_steps=6, eos_ids=(EOS, end))
    [result] = sampler_for(model, tokenizer(), generation).generate(["ab"])
    assert (result.text, result.tokens[-1]) == ("hi", end)


def test_without_eos_settings_the_tokenizer_decides():
    assert sampler_for(scripted(), tokenizer()).generation.eos_ids == (EOS,)
    assert sampler_for(scripted(), tokenizer(), Generation(eos_ids=(5,))).generation.eos_ids == (5,)
    assert sampler_for(scripted()).generation.eos_ids == ()


def test_without_settings_those_beside_the_weights_decide(tmp_path):
    ours = Generation(max_steps=7, eos_ids=(EOS, 106))
    (tmp_path / "generation_config.json").write_text(json.dumps(ours.to_dict()))
    model = scripted()
    model.carried = Carried(side_files=(tmp_path / "tokenizer.json", tmp_path / "generation_config.json"))
    assert sampler_for(model, tokenizer()).generation == replace(ours, pad_id=0)
    assert sampler_for(model, tokenizer(), GENERATION).generation == replace(GENERATION, pad_id=0)


def test_messages_go_through_the_chat_template_with_its_generation_prompt():
    model, words = scripted(), tokenizer()
    words.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    events = []
    conversation = [{"role": "user", "content": "01"}, {"role": "user", "content": "2"}]
    sampler_for(model, words, GENERATION).generate([conversation], on_canvas=events.append, max_new_tokens=L)
    assert events[0].prompt == "012=" and model.encoded == [(1, 4)]  # no bos but the template's


BAD = {
    "two of them": (Request(1, prompt="a", tokens=[3]), "exactly one"),
    "nothing": (Request(1), "exactly one"),
    "empty": (Request(1, tokens=[]), "empty"),
    "a token too large": (Request(1, tokens=[V]), "40"),
    "a negative token": (Request(1, tokens=[-1]), "-1"),
    "half a token": (Request(1, tokens=[1.5]), "1.5"),
    "a character without a token": (Request(1, prompt="Ä"), "tokenised"),
    "no template": ([{"role": "user", "content": "a"}], "chat template"),
    "no messages": ([], "at least one"),
    "a message without role": ([{"content": "a"}], "role"),
    "an answer to nothing": ([{"role": "assistant", "content": "b"}], "nothing before it"),
    "an image": ([{"role": "user", "content": [{"type": "image"}]}], "has no image"),
    "a seed in words": (Request(1, prompt="a", seed="x"), "seed"),
    "a seed of more than 64 bits": (Request(1, prompt="a", seed=2**64), "seed must be an integer from 0 to 2**64 - 1"),
    "a negative seed": (Request(1, prompt="a", seed=-1), "seed must be an integer from 0 to 2**64 - 1"),
    "neither text nor messages": (7, "7 is no prompt; give text, a list of messages"),
    "a row of a file": ({"prompt": "a"}, "is no prompt; give text, a list of messages"),
    "nothing at all": (None, "None is no prompt"),
    "a schema that is no JSON": (Request(1, prompt="a", json_schema="{"), "JSON schema"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_gets_an_error_and_the_others_are_answered(name):
    bad, reason = BAD[name]
    alone = sampler_for(scripted(), tokenizer(), GENERATION).generate([Request(0, prompt="a")])
    prompts = [Request(0, prompt="a"), bad, "b"]
    results = streamed(sampler_for(scripted(), tokenizer(), GENERATION), prompts)
    assert results[0] == alone[0] and results[2].finish_reason == "length"
    assert results[1].finish_reason == "error" and reason in results[1].error and "\n" not in results[1].error
    record = results[1].to_record()
    assert (record["id"], record["text"], record["tokens"], record["steps"]) == (1, "", [], [])
    assert "error" not in results[0].to_record()
    model = scripted()
    with pytest.raises(RequestError, match=r"^prompts\[1\]: .*" + re.escape(reason)):  # before any is answered
        sampler_for(model, tokenizer(), GENERATION).generate(prompts)
    assert not model.encoded


def test_a_template_that_raises_is_the_error_of_its_request():
    words = tokenizer()
    words.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError, match="alternate"):
        sampler_for(scripted(), words, GENERATION).generate([[{"role": "user", "content": "a"}]])


def test_a_template_without_an_end_is_the_error_of_its_request(monkeypatch):
    words = tokenizer()
    monkeypatch.setattr("blockdiff.data.template.TEMPLATE_SECONDS", 0.05)
    words.chat_template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    results = streamed(sampler_for(scripted(), words, GENERATION), [[{"role": "user", "content": "a"}], "b"])
    assert "it takes more than 0.05 seconds" in results[0].error and results[1].error is None


def test_a_result_among_the_prompts_is_returned_as_it_is():
    failed = Result.failed("x", "no")
    results = sampler_for(scripted(), tokenizer(), GENERATION).generate([failed, Request(1, prompt="a")])
    assert results == [failed, *sampler_for(scripted(), tokenizer(), GENERATION).generate([Request(1, prompt="a")])]


def test_what_is_no_list_of_prompts_is_one_line():
    sampler = sampler_for(scripted(), tokenizer(), GENERATION)
    for given, said in (("abc", "one text"), (Request(0, prompt="a"), r"Request\(id=0, .*"), (5, "5")):
        with pytest.raises(RequestError, match=rf"prompts .*{said}.*\[prompt\]"):
            sampler.generate(given)
    for rows in (0, 2.5, "4"):
        with pytest.raises(RequestError, match=r"batch_size .* 1"):
            sampler.generate(["a"], batch_size=rows)
    assert sampler.generate(each for each in ["a", "b"]) == sampler.generate(["a", "b"])


def test_no_prompts_give_no_results():
    assert sampler_for(scripted(), tokenizer(), GENERATION).generate([]) == []


def test_draws_have_an_address_and_follow_their_rows():
    seeds = torch.tensor([5, 6, 7])
    draws, alone = Draws(seeds, 2, L, V), Draws(seeds[1:2], 2, L, V)
    for step in (0, 1, STEPS_AHEAD - 1):
        assert all(torch.equal(a[1:2], b) for a, b in zip(draws.of_step(step), alone.of_step(step), strict=True))
    draws.select(torch.tensor([1]))
    for step in (STEPS_AHEAD - 1, STEPS_AHEAD, 3 * STEPS_AHEAD + 1):
        assert all(torch.equal(a, b) for a, b in zip(draws.of_step(step), alone.of_step(step), strict=True))
    # A step read out of turn is the same as in turn.
    late = Draws(seeds[1:2], 2, L, V).of_step(STEPS_AHEAD + 1)
    assert all(
        torch.equal(a, b) for a, b in zip(late, Draws(seeds[1:2], 2, L, V).of_step(STEPS_AHEAD + 1), strict=True)
    )
    other = Draws(seeds[1:2], 3, L, V).of_step(0)
    assert not any(torch.equal(a, b) for a, b in zip(other, Draws(seeds[1:2], 2, L, V).of_step(0), strict=True))


def test_logits_that_are_not_finite_end_their_request_with_an_error_and_no_other():
    broken = random_script(L, V, {}, {10: 0, 11: 2})

    def script(last: int, canvas: int, step: int) -> torch.Tensor:
        logits = broken(last, canvas, step)
        if last == 11 and canvas == 1 and step >= 1:
            logits[3] = float("nan")
        return logits

    requests = [Request(n, tokens=[n]) for n in (10, 11, 12)]
    model, whole = ScriptedModel(script, L, V), ScriptedModel(broken, L, V)
    results = sampler_for(model, None, GENERATION).generate(requests)
    expected = sampler_for(whole, None, GENERATION).generate(requests)
    assert results[0] == expected[0] and results[2] == expected[2]
    assert results[1].finish_reason == "error" and results[1].tokens == []
    assert "not finite" in results[1].error and "canvas 2, step 2" in results[1].error
    # Its row leaves the batch at the step at which it is seen.
    assert model.denoised == [3] * 6 + [1] * 12


def test_a_tokenizer_of_another_size_is_one_warning():
    few = character_tokenizer("0123456789")
    sampler = sampler_for(scripted(), few, GENERATION)
    with pytest.warns(UserWarning, match="no text for") as caught:
        warnings.simplefilter("default")  # which says a text of a place once
        sampler.generate(["1", "2"])
        sampler.generate(["3"])
    assert len(caught) == 1 and f"which has {len(few)}" in str(caught[0].message)
    with pytest.warns(UserWarning, match="has 66 tokens, the model 40; .* put the tokenizer.json that"):
        sampler_for(scripted(), character_tokenizer("".join(map(chr, range(40, 103)))), GENERATION)


@pytest.mark.parametrize(("ids", "rows", "doubted"), [
    (range(151_669), 151_936, False),  # padded, as Qwen3's
    (range(413), 512, False),
    (range(413), 1024, True),
    ([0, 1, 512], 512, True),  # few tokens, and an id that cannot be
    (range(262_144), 262_144, False),
])  # fmt: skip
def test_a_padded_table_is_no_other_tokenizers(ids, rows, doubted):
    tokenizer = SimpleNamespace(get_vocab=lambda: {str(id): id for id in ids})
    assert (mismatch(tokenizer, rows) is not None) == doubted


def test_what_needs_more_positions_than_the_model_has_is_refused():
    sampler = sampler_for(scripted(), None, GENERATION)
    sampler.settings = replace(sampler.settings, positions=5 * L)
    fits, too_long = streamed(sampler, [Request(1, tokens=[5] * 2 * L), Request(2, tokens=[5] * (2 * L + 1))])
    assert fits.finish_reason == "length" and too_long.finish_reason == "error"
    assert "17 tokens" in too_long.error and "40 positions leave room for 16 before a response of 24" in too_long.error
    with pytest.raises(RequestError, match="max_new_tokens 1000000000"):
        sampler.generate([Request(1, tokens=[5])], max_new_tokens=10**9)
    sampler.settings = replace(sampler.settings, positions=GENERATION.max_new_tokens)
    assert sampler.generate([Request(1, tokens=[5], max_new_tokens=L)])[0].finish_reason == "length"


BAD_OPTIONS = {
    "no tokens": ({"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1, got 0"),
    "half a step": ({"max_steps": 1.5}, "max_steps must be an integer from 1 to 1,000,000, got 1.5"),
    "a thought": ({"thinking": "yes"}, "thinking must be true or false, got 'yes'"),
    "too many tokens": ({"max_new_tokens": 10**9}, "leaves no room for a prompt"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_options_of_a_request_that_cannot_be_used_are_its_own_error(name):
    options, reason = BAD_OPTIONS[name]
    sampler = sampler_for(scripted(), None, GENERATION)
    sampler.settings = replace(sampler.settings, positions=5 * L)
    good, bad = streamed(sampler, [Request(0, tokens=[3]), Request(1, tokens=[3], **options)])
    assert good.error is None and reason in bad.error


@pytest.mark.parametrize("seed", [-1, 2**64, None, 1.5, True, "1"])
def test_a_seed_that_is_none_is_refused_by_every_door(seed):
    with pytest.raises(RequestError, match=r"seed .*2\*\*64 - 1"):
        sampler_for(scripted(), None, GENERATION).generate([Request(0, tokens=[3])], seed=seed)
    with pytest.raises(RequestError, match=r"seed .*integer"):
        sampler_for(scripted(), None, GENERATION).read([Request(0, tokens=[3])], "<?a:1>", seed=seed)
    with pytest.raises(RequestError, match=r"seed .*integer"):
        Engine(scripted(), generation=GENERATION, seed=seed)


@pytest.mark.parametrize("door", [Sampler, Engine])
def test_what_is_no_model_is_refused(door):
    with pytest.raises(RequestError, match=r"^model: None .*blockdiff\.load"):
        door(None, None)


def test_options_of_a_request_go_before_those_of_the_call():
    requests = [Request(0, tokens=[12]), Request(1, tokens=[12], max_new_tokens=L, max_steps=2)]
    usual, own = sampler_for(scripted(), None, GENERATION).generate(requests, max_new_tokens=2 * L, max_steps=3)
    assert usual.steps == [3, 3] and own.steps == [2]


def test_thinking_is_what_the_chat_template_is_told():
    words = tokenizer()
    words.chat_template = "{% if enable_thinking %}x{% endif %}{{ messages[0].content }}"
    chat, prompts = [{"role": "user", "content": "01"}], []
    requests = [Request(0, messages=chat), Request(1, messages=chat, thinking=True)]
    sampler = sampler_for(scripted(), words, GENERATION)
    sampler.generate(requests, on_canvas=lambda canvas: prompts.append(canvas.prompt))
    assert set(prompts) == {"01", "x01"}
