"""Stable-DiffCoder: told from Llama by its files, with its passes under a mask of blocks, and its own answers."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import blockdiff
from blockdiff.errors import CheckpointError
from blockdiff.models.family import family_of
from blockdiff.models.llama import LlamaFamily
from blockdiff.models.stable_diffcoder import StableDiffCoderFamily
from blockdiff.sampling import Request, Sampler
from tests.support.families import SMALL

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("without_gradients")]

L, MASK, EOS = 4, 5, 2
NAMED = {
    "architectures": ["StableDiffcoderForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_stable_diffcoder.StableDiffcoderForCausalLM"},
}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """transformers' Llama with wide logits, and ours of its files in the released layout."""
    folder = tmp_path_factory.mktemp("stable_diffcoder")
    torch.manual_seed(3)
    theirs = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=False, attn_implementation="eager")).double()
    for parameter in theirs.parameters():
        if parameter.dim() == 2:
            parameter.data.normal_(0, 0.3)
    theirs.lm_head.weight.data[MASK] = 0  # and is never the likeliest
    theirs.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text()) | NAMED
    (folder / "config.json").write_text(json.dumps(values))
    return theirs.eval(), blockdiff.load(folder, dtype="float64", device="cpu", kernels="torch"), folder


def logits(theirs: LlamaForCausalLM, row: list[int]) -> Tensor:
    """The logits of a row whose tokens see their blocks and all before."""
    block = torch.arange(len(row)) // L
    sees = block[:, None] >= block[None]
    added = torch.zeros(sees.shape, dtype=torch.float64).masked_fill(~sees, -torch.inf)
    return theirs(torch.tensor([row]), attention_mask=added[None, None]).logits[0]


def released_answer(theirs: LlamaForCausalLM, prompt: list[int], new_tokens: int) -> tuple[list[int], list[int]]:
    """Fill blocks as its own loop does: the surest mask in any case, and all that are surer than 0.95."""
    row, steps = list(prompt), list[int]()
    while len(row) < len(prompt) + new_tokens and EOS not in row[len(prompt) :]:
        row += [MASK] * (L - len(row) % L)
        steps.append(0)
        while MASK in row[len(prompt) :]:
            probability, best = logits(theirs, row).softmax(-1).max(-1)
            is_open = torch.tensor([n >= len(prompt) and token == MASK for n, token in enumerate(row)])
            probability = probability.where(is_open, -1.0)
            taken = (probability > 0.95) | (torch.arange(len(row)) == probability.argmax())
            row = torch.where(taken, best, torch.tensor(row)).tolist()
            steps[-1] += 1
    answer = row[len(prompt) :]
    return answer[: answer.index(EOS) + 1] if EOS in answer else answer, steps


def test_passes_are_llamas_under_a_mask_of_blocks(both):
    theirs, model, _ = both
    row = torch.randint(6, 90, (15,), generator=torch.Generator().manual_seed(0)).tolist()
    found = model.unembed(model.encode(torch.tensor([row])).hidden)[0]
    torch.testing.assert_close(found.double(), logits(theirs, row), atol=2e-5, rtol=0)  # unembed gives fp32
    noisy = [*row[:9], MASK, MASK, MASK]
    found = model.unembed(model.denoise(torch.tensor([noisy[8:]]), model.encode(torch.tensor([noisy[:8]]))))[0]
    torch.testing.assert_close(found.double(), logits(theirs, noisy)[8:], atol=2e-5, rtol=0)


def test_one_command_without_options_answers_as_its_own_code_does(both):
    theirs, model, _ = both
    requests = [Request(n, tokens=[*range(10, 10 + n)], max_new_tokens=12) for n in range(1, 10)]
    steps = []
    for result in Sampler(model).generate(requests):
        expected = released_answer(theirs, [*range(10, 10 + result.id)], 12)
        assert (result.tokens, result.steps) == expected
        steps += result.steps
    assert {1, 2, 3} <= set(steps), "some blocks take several tokens in a step"


def test_its_files_are_told_from_llamas_and_come_back_as_they_were(both, tmp_path):
    _, model, folder = both
    config = model.config
    assert isinstance(config, StableDiffCoderFamily) and (config.mask, config.block, config.answer_length) == (
        5,
        4,
        512,
    )
    blockdiff.save(model, tmp_path / "again")
    values = [json.loads((each / "config.json").read_text()) for each in (folder, tmp_path / "again")]
    assert values[0] == values[1]
    plain = {name: value for name, value in values[0].items() if name not in NAMED}
    assert family_of(plain) is LlamaFamily and family_of(plain | {"auto_map": NAMED["auto_map"]}) is type(config)
    with pytest.raises(CheckpointError, match="mask_token_id"):
        type(config).read(values[0] | {"mask_token_id": 96})
    with pytest.raises(CheckpointError, match="prefix"):
        type(config).read(values[0] | {"prefix": "causal"})
