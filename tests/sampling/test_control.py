"""Controls: templates, constraints, banned texts, penalties and drafts, from the request to the committed text."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace

import pytest
import torch

from blockdiff.checkpoint.generation import Generation
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.errors import RequestError
from blockdiff.sampling import DiffusionSettings, Recorder, Request, Sampler, canvas_control
from blockdiff.sampling.canvas_control import FREE, grouped
from blockdiff.sampling.control import Control, compile_control
from blockdiff.sampling.predict import PredictInputs, predict
from blockdiff.sampling.prepare import prepare_sequences
from blockdiff.sampling.settings import SamplingSettings
from blockdiff.sampling.strategies import Composed
from blockdiff.sampling.template import Hole, parse_template
from tests.oracles.lockstep import Draws, generate_in_lockstep
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.random_regex import random_regex
from tests.support.scripted import ScriptedModel, random_script, sampler_for
from tests.support.streamed import streamed

pytestmark = pytest.mark.quick

PAD, EOS, BOS = 0, 1, 2
LETTERS = "abcd"
V = 3 + len(LETTERS) + 2  # two ids that the tokenizer does not have
L = 6
TOKENIZER = character_tokenizer(LETTERS)
MASK = V - 1
MASKED = DiffusionSettings(corruption="mask", mask_id=MASK)


def settings(canvases: int = 3, **changes) -> Generation:
    return Generation(max_steps=5, max_new_tokens=canvases * L, eos_ids=(EOS,), pad_id=PAD, **changes)


def sampler(canvases: int = 3, diffusion: DiffusionSettings | None = None, script=None, tokenizer=TOKENIZER) -> Sampler:
    model = ScriptedModel(script or random_script(L, V, {}, {}), L, V)
    return sampler_for(model, tokenizer, settings(canvases), diffusion)


def asked(**options) -> Request:
    return Request(0, tokens=[options.pop("last", 3)], **options)


def answering(tokenizer, length: int = L, mask_id: int | None = None) -> SamplingSettings:
    noise = DiffusionSettings() if mask_id is None else DiffusionSettings(corruption="mask", mask_id=mask_id)
    return SamplingSettings(tokenizer, Generation(eos_ids=(EOS,), pad_id=PAD), noise, Composed(), length, V)


def test_a_response_ends_with_eos_and_then_the_fill_of_training():
    plain = answering(TOKENIZER)
    assert plain.ending(3) == [EOS] * 3 and plain.ending(0) == []
    filled = replace(plain, fill_id=PAD)
    assert filled.ending(3) == [EOS, PAD, PAD]
    for options in ({"template": "a<?1>"}, {"draft": "ab", "noise": 0.5}):
        held = compile_control(asked(**options), [3], filled, max_tokens=L, max_steps=4)
        tokens = held.pins if "template" in options else held.start
        assert tokens[2:] == filled.ending(L - 2)


def control(canvases: int = 3, mask_id: int | None = None, tokenizer=TOKENIZER, **options) -> Control | None:
    request = asked(**options)
    request.check()
    return compile_control(request, [3], answering(tokenizer, mask_id=mask_id), max_tokens=canvases * L, max_steps=5)


def spell(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


# -- templates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template,parts",
    [
        ("a<?3>b", ["a", Hole(3), "b"]),
        ("<?3>", [Hole(3)]),
        ("<?1><?2>", [Hole(1), Hole(2)]),
        ("<??3><?2>", ["<?3>", Hole(2)]),
        ("<??xml?><?16>", ["<?xml?>", Hole(16)]),
        ("a<b?<?1>", ["a<b?", Hole(1)]),
        ("<???><?1>", ["<??>", Hole(1)]),
        ("<?né_1>, <?b:12>", [Hole(None, "né_1"), ", ", Hole(12, "b")]),
    ],
)
def test_a_template_is_text_and_holes(template, parts):
    assert parse_template(template) == parts


@pytest.mark.parametrize(
    "template", [*["<?>", "<?0>", "<?x:0>", "<?1:2>", "<?x:>", "a<?", "<?3", "<?-1>", "abc", "<??3>"], ""]
)
def test_what_is_no_template_is_refused_with_how_to_write_it(template):
    with pytest.raises(RequestError, match=r"<\?16>") as caught:
        parse_template(template)
    assert "\n" not in str(caught.value)


def test_a_hole_that_no_model_can_fill_is_refused():
    with pytest.raises(RequestError, match=r"999,999,999.*1,048,576"):
        parse_template("a<?999999999>")


@pytest.mark.parametrize("diffusion", [None, MASKED], ids=["uniform noise", "mask noise"])
def test_a_template_stands_as_written_over_any_number_of_canvases(diffusion):
    template, recorder = "ab<?4>c<?1>dd<?5>a", Recorder()
    (result,) = sampler(1, diffusion).generate([asked(template=template)], on_step=recorder.step)
    assert re.fullmatch("ab[a-d]{4}c[a-d]dd[a-d]{5}a", result.text) and result.finish_reason == "eos"
    assert len(result.steps) == 3 and result.tokens == [*spell(result.text), EOS]
    pins = [*spell("ab"), *[FREE] * 4, *spell("c"), FREE, *spell("dd"), *[FREE] * 5, *spell("a"), EOS, EOS]
    for step in recorder.traces[0].steps:
        own = pins[step.canvas * L : (step.canvas + 1) * L]
        for place, pin in enumerate(own):
            if pin != FREE:
                assert step.tokens[place] == step.argmax[place] == step.sample[place] == pin
                assert step.entropy[place] == 0.0


def test_a_template_that_fills_its_canvases_has_no_end_and_decides_the_length():
    (result,) = sampler(5).generate([asked(template=f"<?{2 * L - 1}>d")])
    assert len(result.tokens) == 2 * L and result.finish_reason == "length" and result.text.endswith("d")


def test_holes_are_filled_with_text_alone_however_likely_other_tokens_are():
    def script(last, canvas, step):
        z = torch.zeros(L, V)
        z[:, [PAD, EOS, BOS, V - 1, V - 2]] = 20.0
        return z

    (result,) = sampler(1, script=script).generate([asked(template="<?6>")])
    assert len(result.text) == 6


# -- constraints ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("diffusion", [None, MASKED], ids=["uniform noise", "mask noise"])
def test_committed_texts_satisfy_random_expressions_whatever_the_logits_are(diffusion):
    generator, requests = random.Random(3), []
    for number in range(30):
        regex = random_regex(generator, LETTERS)
        requests.append(Request(number, tokens=[number % V], regex=regex, seed=number))
    results = streamed(sampler(3, diffusion), requests)
    answered = 0
    for request, result in zip(requests, results, strict=True):
        if result.error is None:
            answered += 1
            assert re.fullmatch(request.regex, result.text), (request.regex, result.text)
        else:
            assert "no text of at most 18 tokens" in result.error, request.regex
    assert answered > 20
    assert {len(result.steps) for result in results if not result.error} == {1, 2, 3}, "some take several canvases"


@pytest.mark.parametrize("diffusion", [None, MASKED], ids=["uniform noise", "mask noise"])
def test_a_template_and_an_expression_hold_together(diffusion):
    forms = {"a<?5>b<?3>": "(a|bb)*c?", "<?4>c<?8>": "(?:abc?|dc)+", "<?6>": "a*d"}
    requests = [Request(n, tokens=[3], template=each, regex=forms[each]) for n, each in enumerate(forms)]
    for request, result in zip(requests, sampler(1, diffusion).generate(requests), strict=True):
        assert result.error is None and re.fullmatch(request.regex, result.text)
        assert re.fullmatch(re.sub(r"<\?(\d+)>", r".{\1}", request.template), result.text)


def test_a_text_needs_all_the_canvases_that_its_expression_asks_for():
    (result,) = sampler(3).generate([asked(regex="(ab){8}c*")])
    assert result.error is None and result.text.startswith("ab" * 8) and len(result.steps) == 3


def test_statistics_under_a_constraint_are_those_of_all_canvases_that_satisfy_it():
    """Best canvas, marginal entropies, probabilities of samples and their frequencies, against an enumeration."""
    length, n = 3, 6_000
    regex = "(?:a|bc|[cd]{3})+"
    held = compile_control(asked(regex=regex), [3], answering(TOKENIZER, length), max_tokens=length, max_steps=5)
    z = torch.randn(length, V, generator=torch.Generator().manual_seed(0)) * 1.5
    canvases, weights = [], []
    for tokens in itertools.product(range(V), repeat=length):
        end = tokens.index(EOS) if EOS in tokens else length
        is_text = all(3 <= token < 7 for token in tokens[:end]) and all(token in (EOS, PAD) for token in tokens[end:])
        if is_text and re.fullmatch(regex, TOKENIZER.decode(list(tokens[:end]))):
            canvases.append(tokens)
            weights.append(sum(float(z[place, token]) for place, token in enumerate(tokens)) / 0.7)
    truth = torch.tensor(weights, dtype=torch.float64).softmax(0)
    marginal = torch.zeros(length, V, dtype=torch.float64)
    for tokens, weight in zip(canvases, truth, strict=True):
        marginal[torch.arange(length), list(tokens)] += weight

    model = ScriptedModel(lambda *_: z, length, V)
    controls = [held.begin(seed) for seed in range(n)]
    uniform = torch.rand(n, length, generator=torch.Generator().manual_seed(1))
    canvas = torch.zeros(n, length, dtype=torch.int64)
    together = grouped(controls)
    inputs = PredictInputs(z.expand(n, -1, -1), canvas, 0.7, uniform, step_B=torch.zeros(n).long())
    stats = predict(model, inputs, together)
    assert stats.argmax[0].tolist() == list(canvases[int(truth.argmax())])
    torch.testing.assert_close(stats.entropy[0], torch.special.entr(marginal).sum(-1).float(), atol=1e-4, rtol=1e-4)
    of_sample = marginal[torch.arange(length), stats.sample].log()
    torch.testing.assert_close(stats.log_probability, of_sample.float(), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(stats.soft_embedding[0], (z / 0.7).softmax(-1))
    counts = dict.fromkeys(canvases, 0)
    for tokens in stats.sample.tolist():
        counts[tuple(tokens)] += 1  # a canvas that does not satisfy it is a KeyError
    for (_, count), probability in zip(counts.items(), truth.tolist(), strict=True):
        assert abs(count / n - probability) < 5 * (probability * (1 - probability) / n) ** 0.5 + 1e-9


def test_a_constraint_that_the_logits_make_impossible_is_an_error_and_no_broken_text():
    def script(last, canvas, step):
        return torch.full((L, V), torch.nan)

    (result,) = sampler(1, script=script).generate([asked(regex="a+")])
    assert "not finite" in result.error and result.text == ""


def test_what_an_expression_leaves_no_choice_of_is_seen_from_the_first_step_on():
    recorder = Recorder()
    sampler(2).generate([asked(regex="[ab]{2}cd[ab]{4}d")], on_step=recorder.step)
    first, *_ = recorder.traces[0].steps_of(0)
    assert first.tokens[2:4] == spell("cd") and first.argmax[2:4] == first.sample[2:4] == spell("cd")
    assert recorder.traces[0].steps_of(1)[0].tokens[2] == spell("d")[0]


def test_a_template_that_spells_a_control_token_keeps_it_as_text():
    tokenizer = chat_tokenizer()
    request = Request(0, tokens=[9], template="<eos>a<?1>")
    of_chats = replace(answering(tokenizer, 16), vocab_size=len(tokenizer))
    held = compile_control(request, [9], of_chats, max_tokens=of_chats.canvas_length, max_steps=5)
    assert held is not None and held.pins is not None
    assert tokenizer.decode(held.pins[:6]) == "<eos>a" and held.pins[6:] == [FREE, *[EOS] * 9]


# -- words, tokens and penalties --------------------------------------------------------------------------------


def test_banned_texts_occur_nowhere_even_across_canvases():
    requests = [Request(n, tokens=[n % V], seed=n, banned=["ab", "ca", "dd"]) for n in range(40)]
    free = sampler().generate([Request(n, tokens=[n % V], seed=n) for n in range(40)])
    assert any(text in result.text for result in free for text in ("ab", "ca", "dd"))
    for result in sampler().generate(requests):
        assert result.error is None and not any(text in result.text for text in ("ab", "ca", "dd"))


def test_banned_texts_hold_with_an_expression_and_special_tokens_may_still_stand_without_one():
    (result,) = sampler().generate([asked(regex="[ab]{9}", banned=["aa", "bb"])])
    assert result.text in ("ababababa", "babababab")
    (result,) = sampler(1, script=lambda *_: torch.eye(V)[[BOS] * L] * 30).generate([asked(banned=["ab"])])
    assert result.tokens == [BOS] * L


def test_banned_tokens_are_never_used():
    for result in sampler().generate([Request(n, tokens=[n % V], seed=n, banned=[4, V - 1]) for n in range(20)]):
        assert result.error is None and not {4, V - 1} & set(result.tokens)


def test_the_repetition_penalty_counts_the_prompt_and_what_was_committed():
    def script(last, canvas, step):
        z = torch.zeros(L, V)
        z[:, 3], z[:, 4], z[:, 5] = 5.0, 4.0, 3.0
        return z

    free, held = (sampler(2, script=script).generate([asked(repetition_penalty=p)])[0] for p in (1.0, 2.0))
    assert free.tokens == [3] * 2 * L, "the prompt is token 3"
    assert held.tokens == [4] * L + [5] * L, "5 / 2 < 4, then 4 / 2 < 3"


# -- drafts -----------------------------------------------------------------------------------------------------


def test_a_draft_that_is_all_noise_is_no_draft():
    plain, drafted = (
        sampler().generate([Request(n, tokens=[n], seed=n, **options) for n in range(9)])
        for options in ({}, {"draft": "abcabcabca", "noise": 1.0})
    )
    assert [(result.tokens, result.steps) for result in plain] == [(result.tokens, result.steps) for result in drafted]


@pytest.mark.parametrize("diffusion", [None, MASKED], ids=["uniform noise", "mask noise"])
@pytest.mark.parametrize("noise,first_step", [(0.0, 4), (0.4, 3), (1.0, 0)])
def test_a_draft_enters_the_schedule_at_the_step_of_its_noise(noise, first_step, diffusion):
    recorder = Recorder()
    draft = "abcdabcda"
    (result,) = sampler(3, diffusion).generate([asked(draft=draft, noise=noise)], on_step=recorder.step)
    of_canvas = [recorder.traces[0].steps_of(canvas) for canvas in range(len(result.steps))]
    assert {steps[0].step for steps in of_canvas[:2]} == {first_step}
    assert result.steps == [len(steps) for steps in of_canvas]
    if len(of_canvas) == 3:
        assert of_canvas[2][0].step == 0, "the draft has two canvases; the third begins as noise"
    clean = [*spell(draft), EOS, EOS, EOS]
    noise_L = Draws(torch.tensor([recorder_seed()]), 0, L, V).of_step(first_step)[1][0].tolist()
    filled = [MASK] * L if diffusion else noise_L
    seen = of_canvas[0][0].tokens
    assert all(token in (mine, other) for token, mine, other in zip(seen, clean, filled, strict=False))
    if noise == 0.0:
        assert seen == clean[:L] and of_canvas[1][0].tokens == clean[L:], "all of the draft"
    if noise == 1.0:
        assert seen == filled


def recorder_seed() -> int:
    from blockdiff.seeding import child_seed, signed

    return signed(child_seed(0, 0))


@pytest.mark.parametrize("strategy", ["confident", "quota", "ddim"])
def test_constraints_and_templates_hold_under_any_strategy(strategy):
    requests = [
        Request(n, tokens=[n % V], strategy=strategy, **({"regex": "(?:ab|c)+d?"} if n % 2 else {"template": "a<?7>b"}))
        for n in range(12)
    ]
    for request, result in zip(requests, sampler().generate(requests), strict=True):
        assert result.error is None and re.fullmatch(request.regex or "a[a-d]{7}b", result.text)


def ending():
    """A model that would end every response at once."""
    return lambda last, canvas, step: 20.0 * torch.nn.functional.one_hot(torch.full((L,), EOS), V).float()


@pytest.mark.parametrize(
    "options", [{}, {"regex": "[a-d]{0,8}"}, {"banned": ["aa"]}, {"banned": [5]}, {"scores": False}]
)
@pytest.mark.parametrize("strategy", [None, "confident"])
@pytest.mark.parametrize("least", [1, 3, 4, 7])
def test_an_answer_ends_as_soon_as_it_has_its_least_tokens_and_not_before(options, strategy, least):
    asked = Request(0, tokens=[3], min_tokens=least, strategy=strategy, **options)
    [found] = sampler(2, script=ending()).generate([asked])
    assert found.error is None and found.finish_reason == "eos"
    assert len(found.tokens) == least + 1 and found.tokens[-1] == EOS and EOS not in found.tokens[:-1]


def test_least_tokens_need_no_tokenizer_and_are_reached_where_a_constraint_lets_them():
    [found] = sampler(2, tokenizer=None, script=ending()).generate([Request(0, tokens=[3], min_tokens=5)])
    assert len(found.tokens) == 6
    words = [Request(n, tokens=[3], regex="a{2}|a{6}", min_tokens=least) for n, least in enumerate((0, 2, 3, 6))]
    texts = [result.text for result in sampler(2, script=ending()).generate(words)]
    assert texts == ["aa", "aa", "aaaaaa", "aaaaaa"]


# -- requests side by side --------------------------------------------------------------------------------------


def test_a_request_does_not_depend_on_what_its_neighbours_ask_for():
    options = [
        {}, {"regex": "(ab|c)+"}, {"template": "a<?7>b"}, {"banned": ["ab"]}, {"repetition_penalty": 1.3},
        {"draft": "abc", "noise": 0.4}, {"regex": "(ab|c)+", "banned": ["cc"]}, {"regex": "["}, {},
    ]  # fmt: skip
    requests = [Request(n, tokens=[3 + n % 4], **each) for n, each in enumerate(options)]
    alone = [streamed(sampler(), [request])[0] for request in requests]
    together = streamed(sampler(), requests)
    assert alone == together and sum(result.error is not None for result in alone) == 1


def test_the_engine_answers_as_the_loop_in_lockstep_does_and_groups_of_rows_change_nothing(monkeypatch):
    options = [
        {}, {"regex": "(ab|c)+"}, {"template": "a<?7>b"}, {"banned": ["ab"]}, {"repetition_penalty": 1.3},
        {"draft": "abcabcabc", "noise": 0.4}, {"draft": "abc", "noise": 0.7, "regex": "(ab|c)+"}, {"banned": [4]},
    ]  # fmt: skip
    requests = [Request(n, tokens=[3 + n % 4], max_steps=20, **options[n % 8]) for n in range(24)]
    engine = sampler()
    results = engine.generate(requests)
    asked = [sequence for request in requests for sequence in prepare_sequences(request, engine.settings)]
    generate_in_lockstep(engine.model, engine.settings, asked)
    assert results == [each.result(engine.settings) for each in asked]
    monkeypatch.setattr(canvas_control, "NUMBERS", 1)
    assert results == sampler().generate(requests)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"template": 5}, "template must be text"),
        ({"template": "a<?2>e"}, "cannot be tokenised"),
        ({"template": "a<eos><?2>"}, "cannot be tokenised"),
        ({"template": "a<eos><?2>", "allow_control_tokens": True}, "the token that ends a response"),
        ({"regex": b"a"}, "regex must be text"),
        ({"regex": ""}, "regex is empty; leave it out"),
        ({"json_schema": " "}, "json_schema is empty; leave it out"),
        ({"template": ""}, "the template has no hole"),
        ({"template": "a<?x>"}, "hole <\\?x> has no size"),
        ({"banned": ["a" * 20_000]}, "the banned texts have 20,000 bytes"),
        ({"regex": "a", "json_schema": "{}"}, "give one of regex and json_schema"),
        ({"regex": "x"}, "no tokens for any text"),
        ({"regex": "a{19}"}, "no text of at most 18 tokens"),
        ({"regex": "b{3}", "template": "a<?2>"}, "no text of the template's form"),
        ({"json_schema": 3}, "json_schema must be an object or its JSON"),
        ({"json_schema": {"type": "integer"}}, "no tokens for any text"),
        ({"banned": "ab"}, "banned must be a list"),
        ({"min_tokens": -1}, "min_tokens must be an integer of at least 0"),
        ({"min_tokens": 9, "max_new_tokens": 8}, "min_tokens 9 is more than max_new_tokens, 8"),
        ({"min_tokens": 19}, "min_tokens 19 is more than max_new_tokens, 18"),
        ({"min_tokens": 4, "regex": "a{3}"}, "no response of at most 18 tokens .* min_tokens, 4"),
        ({"min_tokens": 1, "template": "a<?2>"}, "a template says how long"),
        ({"banned": [""]}, "banned must be a list of texts and token ids, got ''"),
        ({"banned": [V]}, f"not one of the model's {V} ids"),
        ({"banned": list(range(V))}, "every token is banned"),
        ({"banned": ["a"], "template": "a<?2>"}, "no text of the template's form"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number from 0.001 to 1000"),
        ({"repetition_penalty": True}, "repetition_penalty must be a number from 0.001 to 1000"),
        ({"noise": 0.5}, "give a draft with it"),
        ({"draft": "a", "noise": 1.5}, r"noise must be a number in \[0, 1\]"),
        ({"draft": "a" * 19}, "the draft has 19 tokens"),
        ({"draft": "a", "template": "a<?1>"}, "no place for a draft"),
        ({"draft": "x"}, "cannot be tokenised"),
        ({"regex": "a", "strategy": "entropy_bound:top_p=0.9"}, "leave one of the two out"),
    ],
)
def test_what_cannot_be_asked_for_is_one_line_and_disturbs_nobody(options, message):
    good, bad = streamed(sampler(), [Request(0, tokens=[3]), Request(1, tokens=[3], **options)])
    assert good.error is None and re.search(message, bad.error) and "\n" not in bad.error


def test_words_need_a_tokenizer_and_token_ids_do_not():
    with pytest.raises(RequestError, match="tokenizer"):
        sampler(tokenizer=None).generate([asked(regex="a")])
    (good,) = sampler(tokenizer=None).generate([asked(banned=[5], repetition_penalty=1.1)])
    assert good.error is None and 5 not in good.tokens


def test_a_draft_and_a_constraint_do_not_go_together_where_tokens_never_change():
    with pytest.raises(RequestError, match=r"draft.*constraint"):
        control(mask_id=MASK, draft="a", regex="b")


def test_automata_are_made_once_for_a_constraint_and_a_tokenizer():
    one, other = (control(regex="(ab)+") for _ in range(2))
    assert one is not None and other is not None and one.automaton is other.automaton
    assert control(regex="(ab)+", banned=["aba"]).automaton is not one.automaton
    assert control() is None
