"""Sampling over a prefix of blocks as a plain loop: one row, no engine, no cache, and every pass from scratch.

Source: the sampling loop of SDAR (reference for families, JetAstra/SDAR generate.py): blocks stand at multiples of
their length, whole blocks of the row are clean, and the row's last tokens stand in the block beside masks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blockdiff.models.model import BlockDiffusionModel
from blockdiff.sampling.step import STEPS_AHEAD, draw_ahead
from blockdiff.seeding import signed


@torch.no_grad()
def fill_from_the_left(
    model: BlockDiffusionModel, prompt: Sequence[int], new_tokens: int, mask: int, eos: int, seed: int
) -> tuple[list[int], list[int]]:
    """Fill each block's first mask by a draw a step; the tokens up to the first `eos`, and the steps of each block.

    As many whole blocks as `new_tokens` begin; a draw is addressed by its block and step.
    """
    L, row, steps = model.canvas_length, list(prompt), list[int]()
    while len(row) < len(prompt) + new_tokens and eos not in row[len(prompt) :]:
        begin = len(row) // L * L
        block = row[begin:] + [mask] * (begin + L - len(row))
        for step in range(block.count(mask)):
            first = step // STEPS_AHEAD * STEPS_AHEAD
            number = torch.tensor([len(steps)])
            uniform, _ = draw_ahead(torch.tensor([signed(seed)]), number, torch.tensor([first]), L, model.vocab_size)
            prefix = model.encode(torch.tensor([row[:begin]], dtype=torch.int64))
            logits = model.unembed(model.denoise(torch.tensor([block]), prefix))[0]
            place = block.index(mask)
            logits[place, mask] = -torch.inf
            below = logits[place].double().softmax(-1).cumsum(-1) <= uniform[0, step - first, place]
            block[place] = int(below.sum())
        steps.append(step + 1)
        row = row[:begin] + block
    response = row[len(prompt) :]
    return response[: response.index(eos) + 1] if eos in response else response, steps
