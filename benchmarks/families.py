"""Families with masks beside transformers' layers: whole answers, and one denoising step.

    python -m benchmarks.families --rows 1,8 --output FILE.json

Both sides have the same random weights and the same greedy rule. transformers has no loop for these models, so its side
is the released one in short: Ministral 3's or Qwen3's layers with a `DynamicCache`, prompts of equal length in one
batch, a block denoised over the cache, which is cut back after every step, and encoded once more when it is whole. The
last block is not encoded. Answers must be equal token for token before anything is timed. A step is the difference
between many and few steps of one block, of which each fills one place.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import blockdiff
from benchmarks import machine
from benchmarks.result import Agreement, Result, table
from benchmarks.timing import Stopwatch, interleaved, once
from blockdiff.checkpoint.config import config_from
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.sampling import Generation, Request, Sampler

CPU = torch.device("cpu")
# Factors of the head's weights: with PEAKED only some positions of a step are sure, with FLAT none is.
PEAKED, FLAT = 15.0, 4.0
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
# The keys of config.json that differ, the class of transformers with its config, the names there, and the threshold.
FAMILIES: dict[str, tuple[dict[str, Any], str, dict[str, str], float]] = {
    "SDAR": (
        {"model_type": "sdar", "block_size": 4, "mask_token_id": 3, "tie_word_embeddings": False},
        "Qwen3",
        {},
        0.85,
    ),
    "Nemotron-Labs-Diffusion": (
        {"model_type": "nemotron_labs_diffusion", "block_size": 32, "mask_token_id": 3, "rope_parameters": YARN},
        "Ministral3",
        {"encoder.": "model.", "diffusion_head": "lm_head"},
        0.9,
    ),
}


@dataclass(frozen=True)
class Size:
    """The sizes of a model, of its prompts and of its answers, in tokens."""

    hidden: int = 128
    layers: int = 4
    vocabulary: int = 4096
    prompt: int = 128
    answer: int = 64

    def values(self) -> dict[str, Any]:
        """Return the keys of config.json that all families share."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden // 32,
            "num_key_value_heads": self.hidden // 64,
            "head_dim": 32,
            "max_position_embeddings": 32768,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }


@dataclass(frozen=True)
class Peer:
    """transformers' layers in the released loop; threshold: a token of higher probability fills its position."""

    model: Any
    block: int
    mask: int
    threshold: float
    is_causal: bool

    @torch.no_grad()
    def answer(self, tokens_BS: Tensor, blocks: int, steps: int) -> Tensor:
        """Return the tokens [B, blocks * block] after the prompts, with at most `steps` steps per block."""
        cache, found = transformers.DynamicCache(), list[Tensor]()
        logits = self._call(tokens_BS, cache, self.is_causal)
        for number in range(blocks):
            canvas_BL = tokens_BS.new_full((len(tokens_BS), self.block), self.mask)
            if self.is_causal:
                canvas_BL[:, 0] = logits[:, -1].argmax(-1)
            for step in range(steps):
                logits = self._call(canvas_BL, cache, is_causal=False)
                cache.crop(-self.block)
                canvas_BL = self._filled(canvas_BL, logits, fills_all=step == steps - 1)
                if not (canvas_BL == self.mask).any():
                    break
            found.append(canvas_BL)
            if number < blocks - 1:
                logits = self._call(canvas_BL, cache, self.is_causal)
        return torch.cat(found, 1)

    def _call(self, tokens_BT: Tensor, cache: Any, is_causal: bool) -> Tensor:
        """Return the logits of tokens after those in the cache; unless `is_causal`, each sees its whole block."""
        T, before = tokens_BT.shape[1], cache.get_seq_length()
        position_T = torch.arange(before, before + T)
        end_T = position_T + 1 if is_causal else (position_T // self.block + 1) * self.block
        if not is_causal and T == self.block:
            end_T = torch.full_like(position_T, before + T)
        seen_TT = torch.arange(before + T) < end_T[:, None]
        mask = seen_TT.expand(len(tokens_BT), 1, T, before + T)
        called = self.model(tokens_BT, attention_mask=mask, past_key_values=cache, position_ids=position_T[None])
        logits: Tensor = called.logits.float()
        logits[..., self.mask] = -torch.inf
        return logits

    def _filled(self, canvas_BL: Tensor, logits_BLV: Tensor, fills_all: bool) -> Tensor:
        """Return the canvases with sure masks filled by their likeliest tokens.

        The surest mask of a row is always filled; with `fills_all` every mask is.
        """
        is_mask_BL = canvas_BL == self.mask
        probability_BL, token_BL = logits_BLV.softmax(-1).max(-1)
        probability_BL = probability_BL.masked_fill(~is_mask_BL, -1.0)
        is_best_BL = torch.zeros_like(is_mask_BL).scatter(1, probability_BL.argmax(1, keepdim=True), True)
        chosen_BL = (probability_BL > self.threshold) | is_best_BL | fills_all
        return torch.where(chosen_BL & is_mask_BL, token_BL, canvas_BL)


def pair(name: str, size: Size, peak: float) -> tuple[BlockDiffusionModel, Peer]:
    """Return our model of a family with random weights, and transformers' layers with the same weights."""
    own, theirs, spelt, threshold = FAMILIES[name]
    config = config_from(size.values() | own, name)
    ours = blockdiff.init(config, seed=1, device=CPU)
    with torch.no_grad():
        (ours.vocabulary.table if ours.vocabulary.head is None else ours.vocabulary.head).mul_(peak)
    values = {key: value for key, value in (size.values() | own).items() if key != "model_type"}
    made = getattr(transformers, f"{theirs}Config")(**values, attn_implementation="sdpa")
    model = getattr(transformers, f"{theirs}ForCausalLM")(made).eval()
    state = {}
    for key, tensor in ours.state_dict().items():
        hub = str(config.names.to_hub(key))
        for ours_there, hub_there in spelt.items():
            hub = hub.replace(ours_there, hub_there, 1)
        state[hub] = tensor
    model.load_state_dict(state)
    return ours, Peer(model, ours.canvas_length, int(own["mask_token_id"]), threshold, config.block is None)


def measure(name: str, size: Size, rows: int, repeats: int) -> list[Result]:
    """Return two lines: whole answers, and one denoising step."""
    draws = torch.Generator().manual_seed(7)
    tokens_BS = torch.randint(4, size.vocabulary, (rows, size.prompt), generator=draws)
    requests = [Request(row, tokens=tokens) for row, tokens in enumerate(tokens_BS.tolist())]
    described = f"{size.hidden} x {size.layers}, prompts of {size.prompt}"

    def both(peak: float, blocks: int, steps: int) -> tuple[Peer, Callable[[], Tensor], Callable[[], Tensor]]:
        """Return the peer, and a function for each side that answers with `blocks` blocks of at most `steps` steps."""
        ours, peer = pair(name, size, peak)
        rule = f"confident:threshold={peer.threshold},confidence=0,t_min=1,t_max=1,greedy=true"
        generation = Generation(max_steps=steps, max_new_tokens=blocks * peer.block, eos_ids=())
        sampler = Sampler(ours, None, generation, strategy=rule)

        def mine() -> Tensor:
            return torch.tensor([result.tokens for result in sampler.generate(requests, batch_size=rows)])

        return peer, mine, lambda: peer.answer(tokens_BS, blocks, steps)

    def line(suite: str, case: str, mine: Callable[[], Tensor], other: Callable[[], Tensor]) -> Result:
        differing = float((mine() != other()).float().mean())
        return Result(suite, described, case, Agreement({"differing tokens": (differing, 0.0)}))

    def timed(result: Result, mine: Stopwatch, other: Stopwatch) -> Result:
        if not result.agreement.is_met:
            return result
        times = interleaved({"ours": mine, "dynamic cache": other}, repeats, warmup=1)
        return replace(result, ours=times["ours"], peers={"dynamic cache": times["dynamic cache"]})

    def difference(more: Callable[[], Tensor], fewer: Callable[[], Tensor], count: int) -> Stopwatch:
        many, few = once(more, CPU), once(fewer, CPU)
        return lambda: (many() - few()) / count

    L, case = int(FAMILIES[name][0]["block_size"]), f"{name}, batch {rows}"
    _, mine, other = both(PEAKED, size.answer // L, L)
    answers = timed(line(f"answers of {size.answer}", case, mine, other), once(mine, CPU), once(other, CPU))
    peer, mine, other = both(FLAT, 1, L)  # each step fills one place
    _, mine_at_once, other_at_once = both(FLAT, 1, 1)
    count = L - 1 - peer.is_causal  # the head's first token fills one place
    step = line("denoising step", f"{case}, canvas {L}", mine, other)
    return [answers, timed(step, difference(mine, mine_at_once, count), difference(other, other_at_once, count))]


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; return 1 if a line disagrees, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families", description=__doc__)
    parser.add_argument("--rows", default="1,8", help="batch sizes, comma-separated (default 1,8)")
    parser.add_argument("--repeats", type=int, default=5, help="timed repeats of each side (default 5)")
    parser.add_argument("--output", type=Path, help="FILE.json for all figures, and FILE.md for the table")
    options = parser.parse_args(words)
    results = list[Result]()
    for name in FAMILIES:
        for rows in map(int, options.rows.split(",")):
            results += measure(name, Size(), rows, options.repeats)
    record = machine.describe(CPU)
    text = f"{machine.heading(record, options.repeats)}\n\n{table(results)}\n"
    print(text)
    if options.output is not None:
        lines = [result.to_record() for result in results]
        options.output.write_text(json.dumps({"machine": record, "results": lines}, indent=1) + "\n")
        options.output.with_suffix(".md").write_text(text)
    return 0 if all(result.agreement.is_met for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
