"""The gradient of both policies beside the exact one, on models whose every answer can be written down."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import blockdiff
from blockdiff.data.collate import Collator
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear, StratifiedTime
from blockdiff.layers.lora import LowRank
from blockdiff.models.adapters import adapt, adapters_of, draw_adapters, targets
from blockdiff.rl.batches import Answer, Recorder, canvas_batch, head_batch
from blockdiff.rl.policy import CommitsDraw, Policy, PolicyObjective
from blockdiff.rl.reward import advantages
from blockdiff.sampling import Generation, Request, Sampler
from blockdiff.sampling.strategies import Composed, EntropyBound, NextToken
from tests.support.families import small_model
from tests.support.oracle import TWO_LAYERS, tiny_config

V, L, END = 3, 2, 0
PROMPT = [2, 1, 1]
TEMPERATURES = (1.3, 0.7)
BOUND = EntropyBound(0.4)  # accepts one of two positions in some states, and both in others
COLLATOR = Collator(L, 0, END, 3, StratifiedTime())


@pytest.fixture(scope="module")
def model() -> Any:
    """A DiffusionGemma of three tokens in fp64, whose distributions are far from uniform."""
    made = blockdiff.init(
        tiny_config(canvas_length=L, vocab_size=V, hidden_size=16, **TWO_LAYERS),
        dtype=torch.float64,
        device="cpu",
        kernels="torch",
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, x in made.state_dict().items():
            wide = 0.6 if "vocabulary" in name else 0.3
            x.copy_(1 + 0.3 * torch.randn(x.shape, generator=generator)) if x.dim() == 1 else x.copy_(
                wide * torch.randn(x.shape, generator=generator)
            )
    return made


def objective_of(model: Any, policy: Policy) -> PolicyObjective:
    return PolicyObjective(model, Linear(), UniformCorruption(model.vocab_size), policy=policy)


def gradient(model: Any, loss: Tensor) -> dict[str, Tensor]:
    names, weights = zip(*[(n, x) for n, x in model.named_parameters() if x.requires_grad], strict=True)
    found = torch.autograd.grad(loss, weights, allow_unused=True)
    return {name: x for name, x in zip(names, found, strict=True) if x is not None}


def largest_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference beside the largest number of any gradient."""
    most = max(float(x.abs().max()) for x in expected.values())
    assert most > 1e-3
    names = found.keys() | expected.keys()
    zero = torch.zeros(())
    return max(float((found.get(n, zero) - expected.get(n, zero)).abs().max()) for n in names) / most


def answer(place: int, tokens: list[int], canvases: Any = (), advantage: float = 0.0) -> Answer:
    return Answer(place, PROMPT, tokens, 0.0, {}, {}, [], list(canvases), advantage=advantage)


def value(tokens: list[int]) -> float:
    """An advantage that depends on every token of an answer."""
    return math.sin(1 + sum((3 + 2 * n) * (token + 1) for n, token in enumerate(tokens)))


# -- the head ------------------------------------------------------------------------------------------------------


ANSWERS = [[END], *([first, *rest] for first in (1, 2) for rest in ([END], [1], [2]))]


def head_log_p(model: Any, tokens: list[int], temperature: float) -> Tensor:
    """log p of an answer, from the logits of each token alone."""
    total = torch.zeros((), dtype=torch.float64)
    for n, token in enumerate(tokens):
        hidden = model.encode(torch.tensor([[*PROMPT, *tokens[:n]]])).hidden[0, -1]
        total = total + (model.unembed(hidden[None]) / temperature).log_softmax(-1)[0, token]
    return total


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_expected_gradient_of_the_head_is_the_exact_one(model, temperature):
    log_p = torch.stack([head_log_p(model, tokens, temperature) for tokens in ANSWERS])
    assert float(log_p.detach().exp().sum()) == pytest.approx(1, abs=1e-12)
    worth = torch.tensor([value(tokens) for tokens in ANSWERS], dtype=torch.float64)
    exact = gradient(model, -(log_p.exp() * worth).sum())
    weighed = (log_p.exp() * worth).tolist()
    batch = head_batch(
        [answer(n, y, advantage=a) for n, (y, a) in enumerate(zip(ANSWERS, weighed, strict=True))], COLLATOR
    )
    objective = objective_of(model, Policy("next_token", [temperature]))
    assert largest_error(gradient(model, objective(batch)["policy"]), exact) < 1e-8
    one_by_one = [objective(head_batch([answer(n, y, advantage=a)], COLLATOR))["policy"]
                  for n, (y, a) in enumerate(zip(ANSWERS, weighed, strict=True))]  # fmt: skip
    together = gradient(model, objective(batch)["policy"])
    assert largest_error(gradient(model, torch.stack(one_by_one).sum()), together) < 1e-12


def test_centred_advantages_of_groups_of_two_give_the_exact_gradient(model):
    """Over all pairs of answers the mean loss has the gradient of the expected reward: the baseline adds nothing."""
    log_p = torch.stack([head_log_p(model, tokens, 1.0) for tokens in ANSWERS])
    rewards = [value(tokens) for tokens in ANSWERS]
    exact = gradient(model, -(log_p.exp() * torch.tensor(rewards, dtype=torch.float64)).sum())
    p, weighed = log_p.exp().tolist(), [0.0] * len(ANSWERS)
    for one, other in product(range(len(ANSWERS)), repeat=2):
        for n, advantage in zip((one, other), advantages([rewards[one], rewards[other]], "centred"), strict=True):
            weighed[n] += p[one] * p[other] * advantage / 2  # a mean over the two answers
    batch = head_batch(
        [answer(n, y, advantage=a) for n, (y, a) in enumerate(zip(ANSWERS, weighed, strict=True))], COLLATOR
    )
    found = gradient(model, objective_of(model, Policy("next_token", [1.0]))(batch)["policy"])
    assert largest_error(found, exact) < 1e-8


# -- canvases ------------------------------------------------------------------------------------------------------


@dataclass
class Walk:
    """One trajectory: its probability with gradient, by noise and draws, and what is recorded of it."""

    probability: Tensor
    seen: list[list[int]]
    drawn: list[list[int]]

    @property
    def answer(self) -> list[int]:
        """The tokens up to the first end."""
        tokens = self.drawn[-1]
        return tokens[: tokens.index(END) + 1] if END in tokens else tokens


def walks(model: Any, is_held: bool) -> Iterator[Walk]:
    """Every trajectory of two steps with its noise, from logits of dense plain torch."""
    prefix = model.encode(torch.tensor([PROMPT]))
    embedding, scale = model.vocabulary.table, model.vocabulary.table.shape[1] ** 0.5
    every = [list(tokens) for tokens in product(range(V), repeat=L)]
    for first in every:
        hidden = model.denoise(torch.tensor([first]), prefix, None)
        z0 = model.unembed(hidden)[0] / TEMPERATURES[0]
        p0 = z0.softmax(-1)
        accepted = BOUND.within(torch.special.entr(p0.detach()).sum(-1)[None])[0].tolist()
        soft = p0 @ embedding * scale
        if is_held:  # as the sampler has it, which draws in fp32
            soft = model.vocabulary.stats(hidden.detach(), TEMPERATURES[0], torch.zeros(1, L)).soft_embedding[0]
        for second in every:  # of accepted positions the draw, of others the noise
            before = torch.ones((), dtype=torch.float64) / len(every)
            for place, token in enumerate(second):
                before = before * (p0[place, token] if accepted[place] else 1 / V)
            z1 = model.unembed(model.denoise(torch.tensor([second]), prefix, soft[None]))[0] / TEMPERATURES[1]
            p1 = z1.softmax(-1)
            for last in every:
                drawn = [token if keep else -1 for token, keep in zip(second, accepted, strict=True)]
                probability = before * p1[0, last[0]] * p1[1, last[1]]
                yield Walk(probability, [first, second], [drawn, last])


def test_the_expected_gradient_of_canvases_is_the_exact_one_and_held_leaves_out_the_signal_alone(model):
    found: dict[str, dict[str, Tensor]] = {}
    exact: dict[str, dict[str, Tensor]] = {}
    for signal in ("through", "held"):
        every = list(walks(model, signal == "held"))
        assert len(every) == 9**3
        assert {sum(token >= 0 for token in walk.drawn[0]) for walk in every} == {1, 2}
        probability = torch.stack([walk.probability for walk in every])
        assert float(probability.detach().sum()) == pytest.approx(1, abs=1e-12)
        worth = [value(walk.answer) for walk in every]
        exact[signal] = gradient(model, -(probability * torch.tensor(worth, dtype=torch.float64)).sum())
        answers = []
        for n, (walk, p, a) in enumerate(zip(every, probability.tolist(), worth, strict=True)):
            kept = [*walk.answer, *[-1] * (L - len(walk.answer))]  # nothing looks at what is drawn after the end
            trajectory = walk.seen, [walk.drawn[0], kept], walk.drawn[-1]
            answers.append(answer(n, walk.answer, [trajectory], p * a))
        policy = Policy("canvas", TEMPERATURES, acceptance=BOUND, through=signal == "through")
        objective = objective_of(model, policy)
        found[signal] = gradient(model, objective(canvas_batch(answers, COLLATOR, 2))["policy"])
        assert largest_error(found[signal], exact[signal]) < 1e-8
        if signal == "held":
            assert objective.measured["reaccepted"] == 0 and objective.measured["positions"] == len(every) * L
    assert largest_error(found["held"], found["through"]) > 1e-3
    through, held = (torch.cat([found[signal][n].flatten() for n in found["held"]]) for signal in ("through", "held"))
    assert float(torch.cosine_similarity(through, held, dim=0)) == pytest.approx(0.88, abs=0.02)  # docs/rl.md


# -- what the engine drew ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Overhears(CommitsDraw):
    """Keeps the sum of the log-probabilities of what is accepted, and of all that is committed, by request."""

    heard: Any = None

    def __hash__(self) -> int:
        return hash(self.strategy)

    def decide(self, canvases: Any) -> Any:
        decision = super().decide(canvases)
        is_last_B1 = (canvases.step_B + 1 == canvases.steps_B)[:, None]
        log_p_BL = canvases.stats.log_probability.masked_fill(~(decision.keep_BL | is_last_B1), 0.0)
        for id, log_p in zip(canvases.ids, log_p_BL.sum(-1).tolist(), strict=True):
            self.heard[id] = self.heard.get(id, 0.0) + log_p
        return decision


def test_recorded_canvases_have_the_log_probability_with_which_the_engine_drew_them():
    """Two canvases of several steps each; the draws are those of fp32, whatever the model is."""
    denoiser, steps, heard = small_model("diffusion_gemma", seed=3), 4, dict[Any, float]()
    rules = Composed(EntropyBound(4.0), t_min=0.5, t_max=1.5, confidence=0)
    strategy = Overhears(rules, heard)
    generation = Generation(max_steps=steps, max_new_tokens=16, eos_ids=(95,))
    sampler = Sampler(denoiser, generation=generation, strategy=strategy)
    recorder = Recorder()
    requests = [Request(n, tokens=[2, 5 + n, 7], seed=n) for n in range(3)]
    results = sampler.generate(requests, on_step=recorder.step, on_canvas=recorder.canvas)
    answers = [replace(answer(n, r.tokens, recorder.take(n)), prompt=[2, 5 + n, 7]) for n, r in enumerate(results)]
    assert [len(each.canvases) for each in answers] == [2, 2, 2]
    temperatures = [strategy.shape(step, steps).temperature for step in range(steps)]
    objective = objective_of(denoiser, Policy("canvas", temperatures, acceptance=rules.acceptance))
    batch = canvas_batch(answers, Collator(8, 0, 95, 3, StratifiedTime()), steps)
    log_p_N, row_N = objective.actions(batch)
    found = torch.zeros(3, dtype=torch.float64).index_add(0, row_N, log_p_N.detach())
    assert found.tolist() == pytest.approx([heard[n] for n in range(3)], rel=1e-5)
    assert objective.measured["reaccepted"] == 0
    assert 0 < (batch.action_BCKL[:, :, :-1] >= 0).double().mean() < 1


def test_canvases_that_begin_with_a_prompts_tail_have_it_pinned_and_no_actions_there():
    denoiser, steps, heard, L = small_model("qwen3 sliding, blocks", seed=3), 3, dict[Any, float](), 4
    rules = Composed(EntropyBound(4.0), t_min=0.5, t_max=1.5, confidence=0)
    strategy = Overhears(rules, heard)
    sampler = Sampler(denoiser, None, Generation(max_steps=steps, max_new_tokens=7, eos_ids=(95,)), strategy=strategy)
    recorder, prompts = Recorder(), [[2, 5, 7, *range(9, 9 + n)] for n in range(4)]
    results = sampler.generate(
        [Request(n, tokens=prompt, seed=n) for n, prompt in enumerate(prompts)],
        on_step=recorder.step,
        on_canvas=recorder.canvas,
    )
    answers = [replace(answer(n, r.tokens, recorder.take(n)), prompt=prompts[n]) for n, r in enumerate(results)]
    temperatures = [strategy.shape(step, steps).temperature for step in range(steps)]
    objective = objective_of(denoiser, Policy("canvas", temperatures, acceptance=rules.acceptance))
    batch = canvas_batch(answers, Collator(L, 0, 95, 3, StratifiedTime(), aligned=True), steps)
    tails = [3, 0, 1, 2]
    assert batch.is_pinned_BCL.sum(-1)[:, 0].tolist() == tails and not batch.is_pinned_BCL[:, 1:].any()
    assert (batch.start_BC[:, 0] % L == 0).all() and not (batch.is_scored_BCL & batch.is_pinned_BCL).any()
    assert [batch.canvas_BCL[n, 0, :tail].tolist() for n, tail in enumerate(tails)] == [
        prompt[len(prompt) - tail :] for prompt, tail in zip(prompts, tails, strict=True)
    ]
    log_p_N, row_N = objective.actions(batch)
    found = torch.zeros(4, dtype=torch.float64).index_add(0, row_N, log_p_N.detach())
    assert found.tolist() == pytest.approx([heard[n] for n in range(4)], rel=1e-5)
    assert objective.measured["reaccepted"] == 0


def test_log_probabilities_of_the_head_are_the_scores(model):
    sampler = Sampler(model, generation=Generation(max_new_tokens=4, eos_ids=(END,)), strategy=NextToken(1.0))
    results = sampler.generate([Request(n, tokens=PROMPT, seed=n, scores=True) for n in range(6)])
    batch = head_batch([answer(n, result.tokens) for n, result in enumerate(results)], COLLATOR)
    log_p_N, row_N = objective_of(model, Policy("next_token", [1.0])).actions(batch)
    assert log_p_N.tolist() == pytest.approx([p for result in results for p in result.logprobs], abs=1e-12)
    assert row_N.tolist() == [n for n, result in enumerate(results) for _ in result.tokens]
    assert len({len(result.tokens) for result in results}) > 1  # so that there is padding


# -- the loss ------------------------------------------------------------------------------------------------------


def test_ratios_are_clipped_where_that_makes_the_loss_no_smaller_and_are_one_at_first(model):
    answers = [answer(n, y, advantage=a) for n, (y, a) in enumerate([([1, 2], 1.0), ([2, 1], -2.0)])]
    batch = head_batch(answers, COLLATOR)
    objective = objective_of(model, Policy("next_token", [1.0], clip=(0.2, 0.28)))
    assert float(objective(batch)["policy"]) == pytest.approx(-(2 * 1.0 + 2 * -2.0), abs=1e-12)
    log_p_N = objective.actions(batch).log_p_N.detach()
    ratio_N = torch.tensor([1.5, 0.5, 1.5, 0.5], dtype=torch.float64)
    objective.measured.clear()
    loss = objective(replace(batch, old_N=log_p_N - ratio_N.log()))["policy"]
    assert float(loss) == pytest.approx(-(1.28 + 0.5 - 2 * 1.5 - 2 * 0.8), abs=1e-12)
    assert objective.measured["clipped"] == 2 and objective.measured["actions"] == 4


def test_the_reference_is_the_model_without_its_adapters():
    adapted = small_model("diffusion_gemma", seed=3)
    answers = [answer(0, [4, 9, 1]), answer(1, [7, 2])]
    batch = head_batch(answers, Collator(8, 0, 1, 3, StratifiedTime()))
    plain = objective_of(adapted, Policy("next_token", [0.8])).actions(batch).log_p_N.detach()
    parts = {"attention": LowRank(2, 4), "experts": LowRank(2, 4)}
    adapt(adapted, targets(adapted, parts))
    draw_adapters(adapted, 4, torch.device("cpu"), torch.float64)
    with torch.no_grad():
        for module in adapters_of(adapted).values():
            for name, x in module.named_parameters(recurse=False):
                if name.endswith("lora_B"):
                    x.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    objective = objective_of(adapted, Policy("next_token", [0.8], kl=0.5))
    log_p = objective.actions(batch).log_p_N.detach()
    assert float((log_p - plain).abs().max()) > 1e-2
    expected = ((plain - log_p).exp() - (plain - log_p) - 1).sum()
    assert float(objective(batch)["policy"]) == pytest.approx(0.5 * float(expected), rel=1e-9)
    assert torch.equal(objective.actions(batch).log_p_N, objective.actions(batch).log_p_N)


def test_the_expected_gradient_of_the_divergence_is_the_exact_one_whichever_weights_drew_the_answers(model):
    adapted = copy.deepcopy(model)
    reference_V = torch.stack([head_log_p(adapted, [token], 1.0) for token in range(V)]).detach()
    adapt(adapted, targets(adapted, {"attention": LowRank(2, 4)}))
    draw_adapters(adapted, 4, torch.device("cpu"), torch.float64)
    with torch.no_grad():
        for name, x in adapted.named_parameters():
            if name.endswith("lora_B"):
                x.normal_(0, 2.0, generator=torch.Generator().manual_seed(1))
    log_p_V = torch.stack([head_log_p(adapted, [token], 1.0) for token in range(V)])
    exact = gradient(adapted, (log_p_V.exp() * (log_p_V - reference_V)).sum())
    objective = objective_of(adapted, Policy("next_token", [1.0], kl=1.0))
    for old in ([0.2, 0.5, 0.3], log_p_V.detach().exp().tolist()):
        losses = []
        for token, p in enumerate(old):
            batch = head_batch([answer(0, [token])], COLLATOR)
            drawn = replace(batch, old_N=torch.tensor([p], dtype=torch.float64).log())
            losses.append(p * objective(drawn)["policy"])
        assert largest_error(gradient(adapted, torch.stack(losses).sum()), exact) < 1e-8
