"""Checkpoints against transformers as the oracle: what we read, what we write, and how we refuse."""

from __future__ import annotations

import json
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.diffusion_gemma.generation_diffusion_gemma import DiffusionGemmaGenerationConfig

import blockdiff.checkpoint.read
import blockdiff.checkpoint.write
from blockdiff.checkpoint import (
    init,
    load,
    read_config,
    save,
)
from blockdiff.checkpoint.digests import DIGESTS
from blockdiff.checkpoint.files import INDEX, WEIGHTS, stored_tensors
from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.errors import CheckpointError
from blockdiff.models.diffusion_gemma import DiffusionGemma
from blockdiff.models.diffusion_gemma.names import NAMES
from tests.support.hub_files import PROJECTION, assert_same, drop, edit, in_transformers
from tests.support.oracle import our_config, tiny_config

SCALAR = "model.encoder.language_model.layers.1.layer_scalar"


def all_tensors(directory: Path) -> dict[str, Tensor]:
    files = sorted({place.file for place in stored_tensors(directory).values()})
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.quick
def test_loading_puts_every_tensor_in_its_place_bit_exactly(theirs, written_by_transformers):
    model = load(written_by_transformers, dtype="float32", device="cpu")
    state = theirs.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[NAMES.to_hub(name)]), name
    assert not model.training
    assert model.config.final_logit_softcapping == 20.0
    assert not torch.equal(model.layers[0].encoder_scalar, model.layers[0].decoder_scalar)


@pytest.mark.quick
def test_what_we_write_loads_in_transformers_with_equal_logits(written_by_transformers, tmp_path):
    out = save(load(written_by_transformers, "float32", "cpu"), tmp_path / "out")
    original, again = in_transformers(written_by_transformers), in_transformers(out)
    assert again.dtype == torch.float32
    tokens = torch.arange(3, 40)[None]
    canvas = torch.arange(50, 66)[None]
    with torch.no_grad():
        expected, logits = (model(tokens, decoder_input_ids=canvas).logits for model in (original, again))
    assert torch.equal(logits, expected)


@pytest.mark.quick
def test_a_round_trip_changes_no_byte_of_any_tensor_or_side_file(written_by_transformers, tmp_path):
    out = save(load(written_by_transformers, "auto", "cpu"), tmp_path / "out")
    assert_same(all_tensors(out), all_tensors(written_by_transformers))
    before, after = (json.loads((d / "config.json").read_text()) for d in (written_by_transformers, out))
    assert before == after
    for name in ("generation_config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (written_by_transformers / name).read_bytes()


def test_image_tensors_keep_their_own_dtype_and_bytes_whatever_the_text_is_cast_to(damaged, tmp_path):
    def mixed(tensors: dict[str, Tensor]) -> None:
        tensors.update({n: t.half() for n, t in tensors.items() if NAMES.is_carried(n)})

    edit(damaged, mixed)
    out = save(load(damaged, "float64", "cpu"), tmp_path / "out", dtype="bfloat16")
    before, after = all_tensors(damaged), all_tensors(out)
    carried = [name for name in before if NAMES.is_carried(name)]
    assert len(carried) > 10
    assert_same({n: before[n] for n in carried}, {n: after[n] for n in carried})
    assert {t.dtype for n, t in after.items() if not NAMES.is_carried(n)} == {torch.bfloat16}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", torch.bfloat16])
def test_the_dtype_holds_for_every_text_tensor_scalars_included(written_by_transformers, theirs, dtype):
    model = load(written_by_transformers, dtype, "cpu")
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    assert {t.dtype for t in model.state_dict().values()} == {wanted}
    table = theirs.state_dict()["model.decoder.embed_tokens.weight"]
    assert torch.equal(model.vocabulary.table, table.to(wanted))


def test_a_model_has_the_dtype_of_the_stored_table_where_none_is_named(written_by_transformers, damaged):
    assert load(written_by_transformers, device="cpu").dtype == torch.float32
    edit(damaged, lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items()}))
    assert load(damaged, "auto", "cpu").dtype == load(damaged, device="cpu").dtype == torch.bfloat16


def test_both_ways_read_what_the_other_sharded(theirs, written_by_transformers, tmp_path):
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="300KB")
    assert (tmp_path / "theirs" / INDEX).exists()
    model = load(tmp_path / "theirs", "auto", "cpu")
    out = save(model, tmp_path / "ours", shard_bytes=300_000)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(sum(t.nbytes for t in load_file(file).values()) <= 300_000 for file in files)
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in all_tensors(out).values())
    assert_same(all_tensors(out), all_tensors(written_by_transformers))
    in_transformers(out)


def test_a_config_with_the_older_global_head_fields_gives_the_same_model(damaged, written_by_transformers):
    data = json.loads((damaged / "config.json").read_text())
    wide = data["text_config"].pop("per_layer_config")["3"]
    data["text_config"]["global_head_dim"] = wide["head_dim"]
    data["text_config"]["num_global_key_value_heads"] = wide["num_key_value_heads"]
    (damaged / "config.json").write_text(json.dumps(data))
    older, newer = (load(d, "auto", "cpu").state_dict() for d in (damaged, written_by_transformers))
    assert_same(older, newer)


def test_missing_encoder_scalars_fall_back_to_the_decoders_and_are_written(damaged, tmp_path):
    for scalar in [name for name in all_tensors(damaged) if name.startswith("model.encoder.language_model")]:
        drop(scalar)(damaged)
    model = load(damaged, "auto", "cpu")
    for layer in model.layers:
        assert torch.equal(layer.encoder_scalar, layer.decoder_scalar)
    model.layers[1].encoder_scalar.fill_(5.0)
    assert model.layers[1].decoder_scalar.item() != 5.0, "the two share memory"
    assert all_tensors(save(model, tmp_path / "out"))[SCALAR].item() == 5.0


def test_tied_copies_are_tolerated_and_not_written(damaged, tmp_path):
    def add_ties(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.decoder.embed_tokens.weight"].clone()
        for name in [n for n in tensors if n.startswith("model.decoder.layers") and "layer_scalar" not in n]:
            tensors[name.replace("model.decoder", "model.encoder.language_model")] = tensors[name].clone()

    before = all_tensors(damaged)
    edit(damaged, add_ties)
    assert len(all_tensors(damaged)) > len(before) + 50
    assert_same(all_tensors(save(load(damaged, "auto", "cpu"), tmp_path / "out")), before)


def test_loading_holds_at_most_two_read_tensors_beside_the_model(written_by_transformers, monkeypatch):
    alive: list[weakref.ref[Tensor]] = []
    peak = 0
    original = blockdiff.checkpoint.read.read_blocks

    def watched(*args: object) -> Iterator[tuple[str, object, Tensor]]:
        nonlocal peak
        for name, block, tensor in original(*args):
            alive.append(weakref.ref(tensor))
            peak = max(peak, sum(ref() is not None for ref in alive))
            yield name, block, tensor
            del tensor

    monkeypatch.setattr(blockdiff.checkpoint.read, "read_blocks", watched)
    model = load(written_by_transformers, "auto", "cpu")
    assert len(alive) == len(model.state_dict())
    assert peak <= 2


def test_weights_that_are_not_finite_are_one_warning(damaged):
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[PROJECTION][3, 5] = float("nan")
        tensors["model.decoder.norm.weight"][0] = float("-inf")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        edit(damaged, lambda tensors: tensors["model.decoder.norm.weight"].fill_(6e4))
        load(damaged, "float16", "cpu")  # a large sum is not yet an infinite weight
    edit(damaged, spoil)
    with pytest.warns(UserWarning, match=f"damaged: tensors .*{PROJECTION}.* are not finite") as caught:
        load(damaged, "bfloat16", "cpu")
    assert len(caught) == 1


def test_the_directory_of_a_run_stands_for_its_model_and_a_broken_config_is_not_the_tokenizers_fault(damaged):
    run = damaged.parent / "run"
    run.mkdir()
    damaged.rename(run / "model")
    assert load(run, "auto", "cpu").canvas_length == read_config(run).canvas_length
    (run / "model" / "config.json").write_text("{")
    for read in (load_tokenizer, read_config):
        with pytest.raises(CheckpointError, match=r"run/model/config\.json: .*JSON"):
            read(run)


def test_a_loaded_model_does_not_depend_on_its_files_staying_as_they_are(damaged):
    model = load(damaged, "auto", "cpu")
    before = model.vocabulary.table.detach().clone()
    with open(damaged / WEIGHTS, "r+b") as file:
        file.write(b"\xff" * (damaged / WEIGHTS).stat().st_size)
    assert torch.equal(model.vocabulary.table, before)


# -- refusals --------------------------------------------------------------------------------------


# -- writing ---------------------------------------------------------------------------------------


@pytest.mark.quick
def test_a_failed_save_leaves_nothing_and_keeps_what_was(written_by_transformers, tmp_path, monkeypatch):
    model = load(written_by_transformers, "auto", "cpu")
    out = save(model, tmp_path / "out")
    before = all_tensors(out)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(blockdiff.checkpoint.write, "write_stream", full)
    for target in (out, tmp_path / "new"):
        needed = sum(tensor.nbytes for tensor in before.values())
        words = rf"{target}: cannot be written \(No space left on device; it needs {needed:,} bytes, .* are free\); "
        with pytest.raises(CheckpointError, match=words + ("what stood there" if target == out else "nothing is left")):
            save(model, target, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert_same(all_tensors(out), before)


@pytest.mark.quick
def test_saving_never_replaces_by_accident(written_by_transformers, tmp_path):
    model = load(written_by_transformers, "auto", "cpu")
    out = save(model, tmp_path / "out")
    with pytest.raises(CheckpointError, match="out holds"):
        save(model, out)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        save(model, tmp_path / "home", overwrite=True)
    (tmp_path / "empty").mkdir()
    assert (save(model, tmp_path / "empty") / WEIGHTS).exists()


def test_a_model_can_be_saved_over_the_checkpoint_it_came_from_again_and_again(damaged):
    before = all_tensors(damaged)
    model = load(damaged, "auto", "cpu")
    for shard_bytes in (300_000, 10**9, 300_000):
        save(model, damaged, overwrite=True, shard_bytes=shard_bytes)
        assert_same(all_tensors(damaged), before)
        assert (damaged / "tokenizer.json").read_text() == '{"any": "bytes"}'
    assert [path.name for path in damaged.parent.iterdir()] == [damaged.name]


def test_a_tokenizer_given_replaces_every_file_of_the_old_one(damaged, tmp_path):
    class Tokenizer:
        def save_pretrained(self, directory: Path) -> None:
            (directory / "tokenizer.json").write_text("new")

    (damaged / "chat_template.jinja").write_text("old")
    (damaged / "processor_config.json").write_text("{}")
    out = save(load(damaged, "auto", "cpu"), tmp_path / "out", tokenizer=Tokenizer())
    carried_on = {"config.json", "generation_config.json", "processor_config.json", WEIGHTS, DIGESTS}
    assert {file.name for file in out.iterdir()} == {*carried_on, "tokenizer.json"}
    assert (out / "tokenizer.json").read_text() == "new"


def test_carried_files_that_have_gone_are_named(damaged, tmp_path):
    model = load(damaged, "auto", "cpu")
    (damaged / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has gone"):
        save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_generation_config_given_or_default_is_what_transformers_reads(written_by_transformers, tmp_path):
    model = load(written_by_transformers, "auto", "cpu")
    given = {"max_denoising_steps": 5, "eos_token_id": [1, 106]}
    out = save(model, tmp_path / "given", generation=given)
    read = DiffusionGemmaGenerationConfig.from_pretrained(out)
    assert (read.max_denoising_steps, read.eos_token_id) == (5, [1, 106])
    out = save(DiffusionGemma(our_config(tiny_config())), tmp_path / "default")
    read = DiffusionGemmaGenerationConfig.from_pretrained(out)
    assert read.sampler_config.entropy_bound == 0.1
    assert (read.t_min, read.t_max, read.max_denoising_steps, read.max_new_tokens) == (0.4, 0.8, 48, 16)
    assert (read.stability_threshold, read.confidence_threshold) == (1, 0.005)
    assert (read.eos_token_id, read.pad_token_id, read.bos_token_id) == (1, 0, 2)


# -- random weights --------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_checkpoint_loads_onto_the_gpu_and_is_written_back_unchanged(written_by_transformers, tmp_path):
    model = load(written_by_transformers, "float32")
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cuda"}
    assert_same(all_tensors(save(model, tmp_path / "out")), all_tensors(written_by_transformers))
    on_host, on_gpu = init("tiny", seed=3, device="cpu"), init("tiny", seed=3, device="cuda")
    assert_same(on_host.state_dict(), {name: tensor.cpu() for name, tensor in on_gpu.state_dict().items()})
