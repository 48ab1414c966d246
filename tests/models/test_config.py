"""Values of a config are computed (tests/models/test_backbone.py) or refused in one line that names the field."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedConfig
from transformers.models.diffusion_gemma.configuration_diffusion_gemma import (
    DiffusionGemmaConfig,
    DiffusionGemmaTextConfig,
)

from blockdiff import checkpoint
from blockdiff.checkpoint import init, load, read_config, save
from blockdiff.errors import CheckpointError
from blockdiff.models.diffusion_gemma.family import ONE_VALUE
from blockdiff.time_limit import time_limit
from tests.support.little_model import LITTLE

pytestmark = pytest.mark.quick

SMALL = {
    "model_type": "diffusion_gemma",
    "canvas_length": 4,
    "text_config": {
        **dict(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2),
        **dict(num_key_value_heads=1, head_dim=4, global_head_dim=4, sliding_window=4),
        **dict(layer_types=["sliding_attention", "full_attention"], num_experts=2, top_k_experts=1),
        **dict(moe_intermediate_size=4),
    },
    "vision_config": LITTLE["vision_config"],
}


def rope(**sliding: Any) -> dict[str, Any]:
    return {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, **sliding},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        }
    }


# The fields of transformers' classes that the model or its image side reads.
USED = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_activation", "initializer_range", "rms_norm_eps", "pad_token_id"),
    *("eos_token_id", "bos_token_id", "rope_parameters", "sliding_window", "layer_types", "final_logit_softcapping"),
    *("num_experts", "top_k_experts", "moe_intermediate_size", "max_position_embeddings", "tie_word_embeddings"),
    *("text_config", "vision_config", "canvas_length", "boi_token_id", "eoi_token_id", "image_token_id"),
}

REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "activation": ({"hidden_activation": "gelu"}, ["hidden_activation 'gelu'", "silu"]),
    "bias": ({"attention_bias": True}, ["attention_bias is True; only False"]),
    "dropout": ({"attention_dropout": 0.1}, ["attention_dropout is 0.1"]),
    "bidirectional": ({"use_bidirectional_attention": "all"}, ["use_bidirectional_attention is 'all'"]),
    "wide MLP": ({"use_double_wide_mlp": True}, ["use_double_wide_mlp is True"]),
    "shared kv": ({"num_kv_shared_layers": 1}, ["num_kv_shared_layers is 1"]),
    "no experts": ({"num_experts": None}, ["num_experts is None"]),
    "too many experts": ({"top_k_experts": 3}, ["top_k_experts is 3", "2 experts"]),
    "layer type": ({"layer_types": ["chunked_attention", "full_attention"]}, ["layer_types 'chunked_attention'"]),
    "odd heads": ({"head_dim": 3}, ["head_dim of layer 0 is 3"]),
    "kv heads": ({"num_attention_heads": 3, "num_key_value_heads": 2}, ["layer 0", "3 query heads", "do not divide"]),
    "a layer's own": ({"per_layer_config": {"1": {"hidden_size": 4}}}, ["per_layer_config", "hidden_size of layer 1"]),
    "yarn": (
        rope(rope_type="yarn", factor=2.0, original_max_position_embeddings=64),
        ["rope_parameters.sliding_attention", "'yarn'", "proportional"],
    ),
    "dynamic": (rope(rope_type="dynamic", factor=2.0), ["sliding_attention", "'dynamic'"]),
    "a factor without effect": (rope(factor=2.0), ["sliding_attention", "factor 2.0", "'default'"]),
    "a part without effect": (
        rope(rope_type="linear", factor=2.0, partial_rotary_factor=0.5),
        ["partial_rotary_factor 0.5", "'linear'"],
    ),
    "a part that is none": (
        rope(rope_type="proportional", partial_rotary_factor=float("nan")),
        ["partial_rotary_factor is nan", "a number above 0"],
    ),
    "too large a part": (rope(rope_type="proportional", partial_rotary_factor=1.5), ["partial_rotary_factor is 1.5"]),
    "theta": (rope(rope_theta="x"), ["sliding_attention: rope_theta is 'x'"]),
    "no RoPE": (
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
        ["rope_parameters.sliding_attention: missing"],
    ),
}


def changed(text: dict[str, Any]) -> dict[str, Any]:
    values = json.loads(json.dumps(SMALL))
    values["text_config"] |= text
    return values


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return save(init(DiffusionGemmaConfig(**changed({})), device="cpu"), tmp_path_factory.mktemp("model") / "m")


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_config_can_say_and_the_model_does_not_do_is_refused(what, tmp_path):
    """By reading, which comes before any weight; by init of a config made in Python; and by saving."""
    text, words = REFUSED[what]
    (tmp_path / "config.json").write_text(json.dumps(changed(text)))
    message = refusal(lambda: read_config(tmp_path))
    assert str(tmp_path) in message and all(word in message for word in words), message
    assert refusal(lambda: load(tmp_path)) == message
    config = DiffusionGemmaConfig(**changed(text))
    assert all(word in refusal(lambda: init(config)) for word in words)


@pytest.mark.parametrize("text", [{"layer_types": ["full_attention"]}, {"num_hidden_layers": "two"}])
def test_what_transformers_finds_wrong_is_said_in_its_own_words(text, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(changed(text)))
    assert "num_hidden_layers" in refusal(lambda: read_config(tmp_path))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"canvas_length": 0}, "canvas_length is 0; it must be at least 1"),
        ({"sliding_window": 0}, "text_config.sliding_window is 0; it must be at least 1"),
        ({"num_key_value_heads": 0}, "text_config.num_key_value_heads is 0; it must be at least 1"),
        ({"moe_intermediate_size": -1}, "text_config.moe_intermediate_size is -1; it must be at least 1"),
        ({"per_layer_config": {"1": {"head_dim": 10**9}}}, "per_layer_config.1.head_dim is 1000000000; it must be"),
        ({"num_hidden_layers": -2}, "text_config.num_hidden_layers is -2; it must be at least 1"),
        ({"per_layer_config": {"2": {"head_dim": 4}}}, "text_config.per_layer_config names layer '2', but there are 2"),
        ({"per_layer_config": {"x": {"head_dim": 4}}}, "text_config.per_layer_config names layer 'x', but there are 2"),
    ],
)
def test_sizes_of_nothing_and_layers_that_are_not_there_are_refused(values, said, tmp_path):
    config = changed({name: value for name, value in values.items() if name != "canvas_length"})
    (tmp_path / "config.json").write_text(json.dumps(config | {k: v for k, v in values.items() if k in config}))
    assert said in refusal(lambda: read_config(tmp_path))


def test_sizes_of_nothing_are_refused_in_a_config_made_in_python():
    for values in (changed({}) | {"canvas_length": 0}, changed({"sliding_window": 0})):
        assert "is 0; it must be at least 1" in refusal(lambda v=values: init(DiffusionGemmaConfig(**v)))


def test_what_is_no_preset_and_no_model_is_refused():
    assert "init: 3 is no preset; give a preset's name, a preset file or a config" in refusal(lambda: init(3))
    assert "save: a dict is no model of this package" in refusal(lambda: save({}, "nowhere"))  # type: ignore[arg-type]
    message = refusal(lambda: init("tny"))
    assert "no preset 'tny'; did you mean tiny? (there are 15m, " in message


def test_a_class_is_asked_for_where_an_instance_of_a_model_is_given(saved):
    model = load(saved, device="cpu")
    assert "model: an instance of DiffusionGemma; give the class" in refusal(lambda: load(saved, model=model))


def test_a_config_stays_as_it_was_read(saved):
    """So what is saved can be loaded: nothing changes a config after it was checked."""
    config = load(saved, device="cpu").config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 16
    config.to_dict()["text_config"]["attention_bias"] = True
    assert config.values["text_config"]["attention_bias"] is False


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"canvas_length": 100_000}, "canvas_length is 100000; canvases of at most 8192 tokens"),
        ({"vision_config": LITTLE["vision_config"] | {"num_hidden_layers": 10**9}}, "vision_config.num_hidden_layers"),
        ({"vision_config": LITTLE["vision_config"] | {"head_dim": 10**9}}, "vision_config.head_dim is 1000000000"),
        ({"vision_config": LITTLE["vision_config"] | {"patch_size": 0}}, "vision_config.patch_size is 0"),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps is 1e+300; it must be at least 0 and at most 1"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"final_logit_softcapping": float("nan")}, "final_logit_softcapping is nan"),
        ({"final_logit_softcapping": -30.0}, "final_logit_softcapping is -30.0; it must be above 0, or null"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping is 0.0; it must be above 0, or null"),
        ({"initializer_range": float("inf")}, "initializer_range is inf; it must be a finite number"),
    ],
)
def test_numbers_that_no_model_has_are_refused(values, said, tmp_path):
    whole = {name: value for name, value in values.items() if name in SMALL}
    text = {name: value for name, value in values.items() if name not in SMALL}
    (tmp_path / "config.json").write_text(json.dumps(changed(text) | whole))
    assert said in refusal(lambda: read_config(tmp_path))


def test_what_no_model_of_ours_reads_is_written_back_and_never_reaches_transformers(tmp_path):
    unread = {"num_labels": 10**9, "problem_type": "single_label_classification", "output_attentions": True}
    values = changed({"num_labels": 10**9}) | unread
    values["vision_config"] = values["vision_config"] | {"num_labels": 10**9}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with time_limit(5):
        config = read_config(tmp_path)
        checkpoint.empty_image_side(config)
    assert config.to_dict() == values
    written = config.written("float32", None)
    assert {name: written[name] for name in unread} == unread and written["text_config"]["num_labels"] == 10**9


def test_neutral_values_are_not_refused(saved):
    neutral = {"use_double_wide_mlp": False, "num_kv_shared_layers": 0, "attention_dropout": None}
    init(DiffusionGemmaConfig(**changed(neutral | rope(factor=1.0, partial_rotary_factor=1.0))), device="cpu")


def test_every_field_of_the_configs_is_used_or_has_one_value():
    """A field that a newer transformers adds belongs in one of the lists."""
    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)} | set(vars(PreTrainedConfig()))
    fields = {
        field.name for each in (DiffusionGemmaConfig, DiffusionGemmaTextConfig) for field in dataclasses.fields(each)
    }
    own = {name for name in fields - inherited if not name.startswith("_")}
    assert own <= USED | set(ONE_VALUE), own - USED - set(ONE_VALUE)
    assert USED.isdisjoint(ONE_VALUE)
