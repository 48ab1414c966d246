"""Policies: the strategies that draw their actions, and the objective, with the log-probability of every action.

- next_token: the head's draws. One encode of prompt and answer gives the log-probability of every token.
- canvas: the sampler's trajectory. At each step the tokens of the accepted positions are drawn independently from that
  step's tempered distribution. The logits decide which positions are accepted, and the noise elsewhere does not depend
  on the weights. So log p(trajectory) is the sum over steps and accepted positions, and its gradient is exact wherever
  the accepted positions do not change.

B answers, S clean columns, C canvases, K steps, L positions, N actions of a micro-batch (docs/rl.md has the formulas).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from blockdiff.canvas import Batch
from blockdiff.checkpoint.generation import Generation
from blockdiff.errors import RecipeError
from blockdiff.models.adapters import without_adapters
from blockdiff.objective import Losses, Objective
from blockdiff.sampling.strategies import Composed, EntropyBound, NextToken, as_strategy, next_token_head
from blockdiff.sampling.strategy import Canvases, Decision, Shape, Strategy

DRAWS_NOTHING = "objective.strategy: greedy decoding draws nothing, so nothing can be reinforced; "
FILTERED = "objective.strategy: top_k, top_p and min_p change the distribution that is scored; leave them out"


@dataclass(frozen=True)
class Policy:
    """The kind of policy, and the settings of the loss over its actions.

    temperatures: one for the head, or one for each step of a canvas; acceptance: the acceptance rule of canvases; clip:
    how far below and above 1 a ratio may be before its gradient ends; kl: the weight of the divergence from the model
    without its adapters; through: whether gradients also flow through the self-conditioning signal.
    """

    kind: Literal["next_token", "canvas"]
    temperatures: Sequence[float]
    clip: tuple[float, float] = (0.2, 0.28)
    kl: float = 0.0
    acceptance: EntropyBound | None = None
    through: bool = False


@dataclass(frozen=True)
class CommitsDraw:
    """Wraps a strategy to commit the last step's draw, not its argmax: then every token of an answer is an action."""

    strategy: Composed

    @property
    def is_capturable(self) -> bool:
        """True if the wrapped strategy is."""
        return self.strategy.is_capturable

    def shape(self, step: int, steps: int) -> Shape:
        """Return the wrapped strategy's distribution."""
        return self.strategy.shape(step, steps)

    def decide(self, canvases: Canvases) -> Decision:
        """Return the wrapped strategy's decision, in which a finished canvas becomes the sample."""
        return replace(self.strategy.decide(canvases), final_BL=canvases.stats.sample)


def rollout_strategy(
    kind: Literal["next_token", "canvas"], named: str | None, generation: Generation, denoises: bool
) -> Strategy:
    """Return the strategy that draws rollouts for a policy.

    named: the recipe's strategy. None: next tokens at temperature 1 for the head, the model's own rules for canvases.
    denoises: whether the model has canvases. Raises RecipeError if the strategy's draws have no known log-probability
    under this kind of policy, or if it draws nothing (greedy).
    """
    if kind == "next_token":
        strategy = NextToken(1.0) if named is None else as_strategy(named, generation)
        head = next_token_head(strategy)
        if head is None:
            raise RecipeError(
                f"objective.strategy: {named} denoises canvases, and the policy is the head; take next_token, or "
                "verified, whose tokens are the head's"
            )
        if not head.temperature:
            raise RecipeError(DRAWS_NOTHING + "say temperature=1")
        if not head.shape(0, 1).is_plain:
            raise RecipeError(FILTERED)
        return strategy
    if not denoises:
        raise RecipeError("objective.over: canvas: the model is causal and has no canvases; choose next_token")
    strategy = as_strategy(named, generation)
    acceptance = getattr(strategy, "acceptance", None)
    if not isinstance(strategy, Composed) or not isinstance(acceptance, EntropyBound):
        raise RecipeError(
            f"objective.strategy: {named}: what it accepts depends on what it draws, so the log-probability of a "
            "trajectory is not known; take entropy_bound"
        )
    if strategy.greedy:
        raise RecipeError(DRAWS_NOTHING + "leave greedy out")
    if not strategy.shape(0, 1).is_plain:
        raise RecipeError(FILTERED)
    return CommitsDraw(strategy)


def policy_of(strategy: Strategy, max_steps: int, clip: tuple[float, float], kl: float, through: bool) -> Policy:
    """Return the policy whose actions a rollout strategy draws, with at most `max_steps` steps per canvas."""
    head = next_token_head(strategy)
    if head is not None:
        return Policy("next_token", [head.temperature], clip, kl)
    assert isinstance(strategy, CommitsDraw) and isinstance(strategy.strategy.acceptance, EntropyBound)
    temperatures = [strategy.shape(step, max_steps).temperature for step in range(max_steps)]
    return Policy("canvas", temperatures, clip, kl, strategy.strategy.acceptance, through)


@dataclass(frozen=True, kw_only=True)
class RolloutBatch(Batch):
    """Recorded answers, one per row; a clean row has all tokens before the answer's last actions.

    advantage_B: of each answer; answers: the number of answers that the batch stands for, including those left out. For
    the head, actions are the tokens of scored pairs. For canvases, seen_BCKL are the tokens that each step saw, and
    action_BCKL the tokens that it drew in accepted positions, -1 elsewhere; at the last step of a canvas every position
    is accepted. old_N: the log-probabilities of the actions under the weights that drew them (None: the present
    weights). examples: answers of above-average reward as rows of the ordinary objective (None: without this loss).
    """

    advantage_B: Tensor
    answers: Tensor
    seen_BCKL: Tensor
    action_BCKL: Tensor
    old_N: Tensor | None = None
    examples: Batch | None = None

    def ar_count(self) -> float:
        """Return the divisor of the AR loss, counted over `examples`; 0 without them."""
        return 0.0 if self.examples is None else self.examples.ar_count()

    def answer_count(self) -> float:
        """Return the divisor of the policy loss."""
        return float(self.answers)

    def rows(self, places: Tensor) -> RolloutBatch:
        """Return the batch with the rows of these indices only."""
        whole = ("answers", "old_N", "examples", "images", "visited", "host")
        there = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in whole}
        return replace(self, **{name: x[places] for name, x in there.items() if x is not None}, host=None)


class Actions(NamedTuple):
    """Log-probabilities of actions [N], with gradient, and the batch row of each [N]."""

    log_p_N: Tensor
    row_N: Tensor


class PolicyObjective(Objective):
    """The ordinary objective, extended by a policy loss for batches that are a `RolloutBatch`.

    The loss of an answer is the sum over its actions of -min(r A, clip(r) A) with r = exp(log p - old log p) (PPO,
    arXiv 1707.06347). `kl` adds r (exp(d) - d - 1) with d = reference log p - log p. The factor r makes value and
    gradient equal those of the divergence of each action's distribution, whichever weights drew the action (arXiv
    2512.02556). `measured` accumulates sums for the log until the caller resets it.
    """

    def __init__(self, *parts: Any, policy: Policy, **choices: Any) -> None:
        super().__init__(*parts, **choices)
        self.policy = policy
        self.measured: defaultdict[str, Tensor | float] = defaultdict(float)

    def canvas_count(self, batch: Batch) -> float:
        """Return the divisor of the canvas loss; for a `RolloutBatch` it is counted over `examples`."""
        counted = batch.examples if isinstance(batch, RolloutBatch) else batch
        return 0.0 if counted is None else super().canvas_count(counted)

    def forward(self, batch: Batch) -> Losses:
        """Return the sum of each loss over a batch; "policy" is the loss over a `RolloutBatch`'s actions."""
        if not isinstance(batch, RolloutBatch):
            return super().forward(batch)
        log_p_N, row_N = self.actions(batch)
        advantage_N = batch.advantage_B.to(log_p_N.dtype)[row_N]
        old_N = log_p_N.detach() if batch.old_N is None else batch.old_N
        ratio_N, (below, above) = (log_p_N - old_N).exp(), self.policy.clip
        clipped_N = ratio_N.clamp(1 - below, 1 + above)
        policy_sum = -torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N).sum()
        is_clipped_N = ((ratio_N > 1 + above) & (advantage_N > 0)) | ((ratio_N < 1 - below) & (advantage_N < 0))
        self._measure(actions=len(log_p_N), clipped=is_clipped_N.sum(), surprise=-log_p_N.detach().sum())
        if self.policy.kl:
            with torch.no_grad(), without_adapters(self.model):
                reference_N = self.actions(batch, is_measured=False).log_p_N
            more_N = reference_N - log_p_N
            divergence = (ratio_N * (more_N.exp() - more_N - 1)).sum()
            policy_sum = policy_sum + self.policy.kl * divergence
            self._measure(kl=divergence.detach())
        zero = policy_sum.new_zeros(())
        losses = {} if batch.examples is None else super().forward(batch.examples)
        return {"canvas": zero, "ar": zero} | losses | {"policy": policy_sum}

    def actions(self, batch: RolloutBatch, is_measured: bool = True) -> Actions:
        """Return the log-probabilities of a batch's actions under the present weights."""
        if self.policy.kind == "next_token":
            return self._of_head(batch)
        return self._of_canvases(batch, is_measured)

    def _measure(self, **sums: Tensor | float) -> None:
        for name, value in sums.items():
            self.measured[name] = self.measured[name] + value

    def _of_head(self, batch: RolloutBatch) -> Actions:
        hidden_BSD, _ = self._encode(batch)
        is_scored_BS = batch.is_ar_scored_BS
        target_N = batch.tokens_BS.roll(-1, dims=1)[is_scored_BS]
        [temperature] = self.policy.temperatures
        loss_N = self.model.vocabulary.cross_entropy(hidden_BSD[is_scored_BS], target_N, temperature=temperature)
        return Actions(-loss_N, is_scored_BS.nonzero()[:, 0])

    def _of_canvases(self, batch: RolloutBatch, is_measured: bool) -> Actions:
        """Run the recorded steps in order, each on the tokens that it saw and on the signal of the previous step.

        A step runs the answers that have one, and at least one answer, since ranks run the model together.
        """
        vocabulary, steps = self.model.vocabulary, batch.action_BCKL.shape[2]
        _, kv = self._encode(batch)
        columns = int(batch.on_host.start_BC.max())
        past = [tuple(x[:, :columns] for x in layer) for layer in kv]
        place_B = torch.arange(len(batch.tokens_BS), device=batch.tokens_BS.device)
        soft_BTD: Tensor | None = None
        log_p, rows = list[Tensor](), list[Tensor]()
        for step in range(steps):
            is_left_B = (batch.action_BCKL[:, :, step:] >= 0).flatten(1).any(1)
            if not bool(is_left_B.all()):
                is_left_B[0] |= ~is_left_B.any()
                remaining = is_left_B.nonzero()[:, 0]
                batch, place_B = batch.rows(remaining), place_B[remaining]
                past = [tuple(x[remaining] for x in layer) for layer in past]
                soft_BTD = None if soft_BTD is None else soft_BTD[remaining]
            state = replace(batch, canvas_BCL=batch.seen_BCKL[:, :, step])
            hidden_BTD = self._denoise(state, past, soft_BTD)
            temperature, action_BT = self.policy.temperatures[step], batch.action_BCKL[:, :, step].flatten(1)
            is_action_BT = action_BT >= 0
            rows.append(place_B[is_action_BT.nonzero()[:, 0]])
            if self.policy.through:
                z_BTV = vocabulary.logits(hidden_BTD) / temperature
                log_p_BT = z_BTV.log_softmax(-1).gather(-1, action_BT.clamp(min=0)[..., None]).squeeze(-1)
                log_p.append(log_p_BT[is_action_BT])
                soft_BTD = vocabulary.soft_embedding_of(z_BTV)
                continue
            hidden_ND, action_N = hidden_BTD[is_action_BT], action_BT[is_action_BT]
            log_p.append(-vocabulary.cross_entropy(hidden_ND, action_N, temperature=temperature))
            if step + 1 < steps:
                with torch.no_grad():
                    zeros_BT = torch.zeros(action_BT.shape, device=action_BT.device)
                    stats = vocabulary.stats(hidden_BTD.detach(), temperature, zeros_BT)
                    soft_BTD = stats.soft_embedding
                if is_measured:
                    self._compare(stats.entropy, batch, step)
        return Actions(torch.cat(log_p), torch.cat(rows))

    def _compare(self, entropy_BT: Tensor, batch: RolloutBatch, step: int) -> None:
        """Count the positions whose acceptance would now differ, in canvases that continue after this step."""
        assert self.policy.acceptance is not None
        goes_on_BC = (batch.action_BCKL[:, :, step + 1] >= 0).any(-1)
        was_XL = (batch.action_BCKL[:, :, step] >= 0)[goes_on_BC]
        is_free_XL = ~batch.is_pinned_BCL[goes_on_BC]
        entropy_XL = entropy_BT.view_as(batch.action_BCKL[:, :, step])[goes_on_BC]
        is_XL = self.policy.acceptance.within(entropy_XL * is_free_XL)  # pinned positions are certain
        self._measure(positions=is_free_XL.sum(), reaccepted=((was_XL != is_XL) & is_free_XL).sum())
