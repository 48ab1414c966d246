"""Random weights and presets: what a fresh model has."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from blockdiff.checkpoint import (
    draw_weights,
    empty,
    init,
    load,
    load_weights,
    preset_config,
    presets,
    read_config,
    save,
)
from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.cli.main import app
from blockdiff.data.tokenizer import byte_level_bpe, character_tokenizer
from blockdiff.errors import CheckpointError
from tests.support.hub_files import assert_same, in_transformers


@pytest.mark.quick
def test_random_weights_follow_the_seed_and_load_in_transformers_complete(tmp_path):
    model = init("tiny", seed=3, device="cpu")
    again, other = init("tiny", seed=3, device="cpu"), init("tiny", seed=4, device="cpu")
    assert_same(model.state_dict(), again.state_dict())
    assert_same(dict(model.carried.tensors), dict(again.carried.tensors))
    assert not torch.equal(model.vocabulary.table, other.vocabulary.table)
    spread = model.config.initializer_range
    for name, tensor in model.state_dict().items():
        if tensor.dim() == 1:
            assert (tensor == 1).all(), name
        else:
            assert tensor.std().item() == pytest.approx(spread, rel=0.1), name
    out = save(model, tmp_path / "out")
    in_transformers(out)
    assert_same(load(out, "auto", "cpu").state_dict(), model.state_dict())


def test_what_is_frozen_in_an_empty_model_is_frozen_in_the_filled_one(written_by_transformers):
    for fill, whole in (
        (lambda model: load_weights(model, written_by_transformers, "float32", "cpu"), load(written_by_transformers)),
        (lambda model: draw_weights(model, 3, "float32", "cpu"), init(read_config(written_by_transformers), 3)),
    ):
        model = empty(read_config(written_by_transformers), "torch")
        assert all(tensor.is_meta for tensor in model.state_dict().values())
        frozen = {name for name, _ in model.named_parameters() if ".attention." in name}
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        assert fill(model) is model and not model.training
        assert {name for name, p in model.named_parameters() if not p.requires_grad} == frozen
        assert_same(model.to(whole.dtype).state_dict(), {k: t.cpu() for k, t in whole.state_dict().items()})


def test_drawing_weights_leaves_torchs_own_random_state_alone():
    state = torch.get_rng_state()
    init("tiny", seed=3, device="cpu")
    assert torch.equal(torch.get_rng_state(), state)


def test_a_tokenizer_sets_the_vocabulary_and_the_special_tokens_those_of_images_too():
    tokenizer = byte_level_bpe(["how many apples are there " * 9], 400)
    made = init("tiny", tokenizer=tokenizer, device="cpu")
    config, count = made.config, len(tokenizer)
    assert made.vocabulary.table.shape[0] == config.vocab_size == count < 384
    assert (config.pad_token_id, config.eos_token_id, config.bos_token_id) == (0, 1, 2)
    assert config.image_tokens() is None  # none of its words is the place of an image
    assert config.heads[3].head_dim == 32
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image>", "<|image|>", "<image|>"]})
    assert init("tiny", tokenizer=tokenizer, device="cpu").config.image_tokens() == (count, count + 1, count + 2)
    assert config.read(config.to_dict() | {"eoi_token_id": None}).image_tokens() is None
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eos>")
    config = init("tiny", tokenizer=bare, device="cpu").config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, 1, None)


@pytest.mark.quick
def test_a_mask_that_a_tokenizer_has_no_token_for_is_a_row_of_its_own():
    tokenizer = character_tokenizer("1234")
    config = init("sudoku4-llada2", tokenizer=tokenizer, device="cpu").config
    assert (config.vocab_size, config.mask, config.fill) == (len(tokenizer) + 1, len(tokenizer), tokenizer.pad_token_id)
    spelt = byte_level_bpe(["a b"], 300)
    config = init("sudoku4-llada2", tokenizer=spelt, device="cpu").config
    assert (config.vocab_size, config.mask) == (len(spelt), spelt.mask_token_id)


@pytest.mark.quick
def test_the_presets_have_the_sizes_they_say():
    sizes = {}
    for name in presets():
        sizes[name] = sum(p.numel() for p in empty(preset_config(name), "torch").parameters())
    causal = {"sudoku4-causal", "sudoku4-m3", "minimax-m3-tiny", "minimax-m3", "word-problems", "qwen3-8b"}
    others = {"tiny", "sudoku4", "sudoku-decisions", "pixel-sudoku", "chat", "gsm8k", "15m", "countdown3"}
    others |= {"diffusiongemma-26b-a4b"}
    llada2, nemotron = {"llada2.0-mini", "sudoku4-llada2"}, {"nemotron-labs-diffusion-3b", "sudoku4-nemotron"}
    sdar = {"sdar-4b", "sdar-30b-a3b", "sudoku4-sdar", "stable-diffcoder-8b"}
    assert sizes.keys() == others | causal | llada2 | nemotron | sdar | {"qwen3-8b-drafter"}
    assert 3.8e9 < sizes["nemotron-labs-diffusion-3b"] < 3.9e9 and 0.7e6 < sizes["sudoku4-nemotron"] < 0.9e6
    assert 4.4e9 < sizes["sdar-4b"] < 4.5e9 and 30.5e9 < sizes["sdar-30b-a3b"] < 30.6e9
    assert 0.4e6 < sizes["sudoku4-sdar"] < 0.5e6 and 8.2e9 < sizes["stable-diffcoder-8b"] < 8.3e9
    assert 16.2e9 < sizes["llada2.0-mini"] < 16.3e9 and 0.9e6 < sizes["sudoku4-llada2"] < 1e6
    assert 1.2e6 < sizes["word-problems"] < 1.4e6
    assert 8.1e9 < sizes["qwen3-8b"] < 8.3e9 and sizes["qwen3-8b-drafter"] == 1_048_626_432
    assert 0.4e6 < sizes["sudoku4-causal"] < 0.5e6
    assert 0.9e6 < sizes["sudoku4-m3"] < 1.1e6
    assert 420e9 < sizes["minimax-m3"] < 430e9
    assert 0.8e6 < sizes["sudoku4"] < 1.3e6
    assert 0.8e6 < sizes["pixel-sudoku"] < 1.3e6  # without its vision tower
    assert 0.4e6 < sizes["chat"] < 1e6
    assert 4.5e6 < sizes["gsm8k"] < 5.5e6
    assert 13e6 < sizes["15m"] < 17e6
    assert sizes["diffusiongemma-26b-a4b"] * 2 / 1e9 == pytest.approx(50.5, abs=0.01)  # GB of text in bf16


@pytest.mark.quick
def test_an_unknown_preset_is_refused_with_the_nearest_name():
    with pytest.raises(CheckpointError, match="sudoku4"):
        init("sudoko4")


@pytest.mark.parametrize("preset", ["sudoku4", "sudoku4-causal"])
def test_new_tokens_get_rows_and_the_others_stay(tmp_path, preset):
    (tmp_path / "tokens.txt").write_text("<plan>\n<act>\n")
    tokenizer = character_tokenizer("1234.=")
    base = init(preset, seed=3, tokenizer=tokenizer, device="cpu")
    save(base, tmp_path / "base", tokenizer=tokenizer)
    asked = ["--add-tokens", str(tmp_path / "tokens.txt")]
    words = ["init", "--from", str(tmp_path / "base"), str(tmp_path / "more"), *asked]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0 and "2 new tokens" in result.output, result.output
    model, old = load(tmp_path / "more", "auto", "cpu"), base.vocabulary.table
    ids = load_tokenizer(tmp_path / "more").convert_tokens_to_ids(["<plan>", "<act>"])
    assert ids == [len(old), len(old) + 1] and model.denoises
    assert torch.equal(model.vocabulary.table[: len(old)], old)
    assert torch.allclose(model.vocabulary.table[ids], old.mean(0).expand(2, -1))
    again = CliRunner().invoke(app, [*words[:2], str(tmp_path / "more"), str(tmp_path / "again"), *words[4:]])
    assert again.exit_code == 1 and "'<plan>' cannot be added: it is in the vocabulary already" in again.stderr
    for text, said in (("", "the file holds no token"), ("<a>\n<a>\n", "'<a>' cannot be added: it stands there twice")):
        (tmp_path / "tokens.txt").write_text(text)
        refused = CliRunner().invoke(app, [*words[:3], str(tmp_path / "others"), *words[4:]])
        assert refused.exit_code == 1 and said in refused.stderr
