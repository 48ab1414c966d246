"""The families with masks behind the server, with weights in fewer bits: the answers of the same sampler."""

from __future__ import annotations

import pytest

from blockdiff import checkpoint
from blockdiff.models.stored import stored_layers
from blockdiff.sampling import Request, Sampler
from tests.support.asking import chat_tokenizer, served
from tests.support.families import CONFIGS

pytestmark = pytest.mark.quick
TURNS, COUNT = [{"role": "user", "content": "hello there"}], 14  # no multiple of a canvas


@pytest.mark.parametrize(
    ("name", "quantize"),
    [
        *((name, "fp8") for name in ("nemotron", "sdar", "llada2", "stable_diffcoder")),
        *((name, "nvfp4") for name in ("sdar_moe", "llada2")),  # whose experts it stores
    ],
)
def test_a_family_answers_over_http_as_its_sampler_does(name, quantize, tmp_path):
    tokenizer = chat_tokenizer()
    model = checkpoint.init(CONFIGS[name](), seed=2, tokenizer=tokenizer, device="cpu")
    checkpoint.save(model, tmp_path / "model", tokenizer=tokenizer)
    sampler = Sampler.from_pretrained(tmp_path / "model", device="cpu", kernels="torch", quantize=quantize)
    assert stored_layers(sampler.model)

    async def use(asking):
        asked = {"model": "blockdiff", "messages": TURNS, "max_tokens": COUNT}
        return [await asking.openai.chat.completions.create(**asked, seed=seed) for seed in (5, 6)]

    answers = served(sampler, use)
    found = sampler.generate([Request(seed, messages=TURNS, seed=seed, max_new_tokens=COUNT) for seed in (5, 6)])
    tokens = [result.tokens[:COUNT] for result in found]
    assert [answer.choices[0].message.content for answer in answers] == [sampler.settings.text(own) for own in tokens]
    assert [answer.usage.completion_tokens for answer in answers] == [len(own) for own in tokens]
