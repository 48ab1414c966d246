"""Every setting that `accelerate launch` takes is the launcher's own, agrees with the recipe, or is refused by name."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import launch

from blockdiff.errors import RunError
from blockdiff.parallel import accelerate_config
from blockdiff.parallel.accelerate_config import HONOURED, refuse_settings
from blockdiff.training.recipe import Recipe

pytestmark = pytest.mark.quick

RECIPE = {"train.autocast": None, "model.compile": False, "optim.clip": 1.0, "parallel.shard": "none"}
RECIPE |= {"parallel.offload": False, "train.activation_checkpointing": False}
# Accelerate reads these from its arguments to start processes; they say nothing about what the processes do.
LAUNCHERS = ("MASTER_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "KMP_", "PYTHONPATH", "TRITON_", "NCCL_")
PLUGINS = ("--use_fsdp", "--use_deepspeed", "--use_megatron_lm")


def environment(words: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables that `accelerate launch WORDS` puts into the environment of the processes it starts."""
    monkeypatch.setattr("accelerate.commands.launch.default_config_file", "/nowhere")
    base = ["--num_processes", "2", "--num_machines", "1", "--main_process_port", "0", "--dynamo_backend", "no"]
    words = words if "--mixed_precision" in words else ["--mixed_precision", "no", *words]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            patch.delenv(name, raising=False)
        args, _, _ = _validate_launch_command(launch_command_parser().parse_args([*base, *words, "script.py"]))
        args.deepspeed_fields_from_accelerate_config = ""
        if args.use_deepspeed:
            return launch.prepare_deepspeed_cmd_env(args)[1]
        if "--multi_gpu" in words or args.use_fsdp or args.use_megatron_lm:
            return launch.prepare_multi_gpu_env(args)
        return launch.prepare_simple_launcher_cmd_env(args)[1]


def refusal(words: list[str], monkeypatch: pytest.MonkeyPatch, **recipe: object) -> str:
    """The line with which a training is refused; "" when it is not."""
    known = RECIPE | {key.replace("__", "."): value for key, value in recipe.items()}
    try:
        refuse_settings(environment(words, monkeypatch), known)
    except RunError as error:
        assert "\n" not in str(error)
        return str(error)
    return ""


@pytest.mark.parametrize("kind", [[], ["--multi_gpu"], ["--cpu"], ["--multi_gpu", "--enable_cpu_affinity"]])
def test_processes_alone_are_accelerates_to_start(kind, monkeypatch):
    assert refusal(kind, monkeypatch) == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--multi_gpu", "--mixed_precision", "fp16"],
            "mixed_precision: fp16 is not used: nothing here computes in fp16",
        ),
        (["--multi_gpu", "--mixed_precision", "bf16"], "write train.autocast: bfloat16 in the recipe"),
        (["--cpu", "--mixed_precision", "bf16"], "write train.autocast: bfloat16 in the recipe"),
        (["--multi_gpu", "--dynamo_backend", "inductor"], "dynamo_backend: inductor is not used: write model.compile"),
        (["--multi_gpu", "--dynamo_backend", "eager"], "dynamo_backend: eager is not used"),
        (["--multi_gpu", "--debug"], "debug is not used: torch checks collectives with TORCH_DISTRIBUTED_DEBUG=DETAIL"),
        (["--use_fsdp"], "FSDP plugin is not used: write parallel.shard: full in the recipe, and distributed_type"),
        (
            ["--use_fsdp", "--fsdp_offload_params", "true", "--fsdp_activation_checkpointing", "true"],
            "write parallel.shard: full, parallel.offload: true, train.activation_checkpointing: true in the recipe",
        ),
        (["--use_fsdp", "--fsdp_version", "2", "--use_parallelism_config"], "parallelism_config is not used: write"),
        (
            ["--use_deepspeed", "--zero_stage", "3", "--offload_param_device", "cpu", "--gradient_clipping", "0.5"],
            "DeepSpeed plugin is not used: write parallel.shard: full, parallel.offload: true, optim.clip: 0.5 in the",
        ),
        (
            ["--use_deepspeed", "--gradient_accumulation_steps", "4"],
            "write train.micro_batch_size (train.batch_size stays what an optimiser step sees) in the recipe",
        ),
        (
            ["--use_megatron_lm", "--megatron_lm_expert_model_parallel_size", "4"],
            "Megatron-LM plugin is not used: write parallel.experts: 4, optim.clip: 1.0 in the recipe",
        ),
    ],
)
def test_what_is_the_recipes_to_say_is_refused_with_the_line_that_says_it(words, said, monkeypatch):
    assert said in refusal(words, monkeypatch)


def test_a_setting_that_the_recipe_says_as_well_is_honoured(monkeypatch):
    words = ["--multi_gpu", "--mixed_precision", "bf16", "--dynamo_backend", "inductor"]
    assert refusal(words, monkeypatch, train__autocast="bfloat16", model__compile=True) == ""
    regional = [*words, "--dynamo_use_regional_compilation"]
    assert refusal(regional, monkeypatch, train__autocast="bfloat16", model__compile=True) == ""
    more = [*words, "--dynamo_mode", "max-autotune", "--dynamo_use_fullgraph"]
    said = refusal(more, monkeypatch, train__autocast="bfloat16", model__compile=True)
    assert "dynamo_mode: max-autotune" in said and "dynamo_use_fullgraph" in said


@pytest.mark.parametrize("version", ["1", "2"])
def test_an_fsdp_plugin_that_agrees_with_the_recipe_is_taken(version, monkeypatch):
    words = ["--use_fsdp", "--fsdp_version", version]
    assert refusal(words, monkeypatch, parallel__shard="full") == ""
    words += ["--fsdp_offload_params", "true"]
    said = refusal(words, monkeypatch, parallel__shard="full")
    assert said.startswith("Accelerate's FSDP plugin is not used: write parallel.offload: true in the recipe")
    assert refusal(words, monkeypatch, parallel__shard="full", parallel__offload=True) == ""
    words += ["--fsdp_reshard_after_forward", "false"]  # which is not what is done here
    assert "FSDP plugin is not used" in refusal(words, monkeypatch, parallel__shard="full", parallel__offload=True)


def test_several_settings_are_refused_in_one_line(monkeypatch):
    said = refusal(["--use_fsdp", "--mixed_precision", "fp16", "--debug"], monkeypatch)
    assert all(name in said for name in ("FSDP plugin", "mixed_precision: fp16", "debug"))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8", "train.micro_batch_size"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1", ""),
        ("ACCELERATE_GRADIENT_CLIPPING", "0.5", "write optim.clip: 0.5"),
        ("ACCELERATE_GRADIENT_CLIPPING", "1.0", ""),
        ("ACCELERATE_MIXED_PRECISION", "fp8", "mixed_precision: fp8"),
        ("ACCELERATE_USE_SAGEMAKER", "true", "SageMaker"),
        ("ACCELERATE_IN_TPU_POD", "1", "TPU"),
        ("XLA_USE_BF16", "1", "TPU"),
        ("ACCELERATE_OF_TOMORROW", "yes", "ACCELERATE_OF_TOMORROW is not known"),
        ("ACCELERATE_OF_TOMORROW", "false", ""),
    ],
)
def test_a_variable_set_by_hand_is_no_exception(name, value, said):
    if said:
        with pytest.raises(RunError, match=said):
            refuse_settings({name: value}, RECIPE)
    else:
        refuse_settings({name: value}, RECIPE)


def test_every_option_of_the_launcher_is_its_own_or_is_refused(monkeypatch):
    plain = {kind: environment([kind], monkeypatch) for kind in ("--multi_gpu", *PLUGINS)}
    unseen = []
    for action in launch_command_parser()._actions:
        option = next((name for name in action.option_strings if name.startswith("--")), None)
        if option is None or option in (*PLUGINS, "--multi_gpu", "--help", "--module", "--config_file", "--tpu"):
            continue
        value = [] if action.nargs == 0 else [str(other(action))]
        for kind, usual in plain.items():
            try:
                found = environment([kind, option, *value], monkeypatch)
            except (TypeError, ValueError, RuntimeError, OSError, SystemExit):
                continue  # Accelerate itself refuses it
            names = {name for name in found if found[name] != usual.get(name)}
            told = {name for name in names if not name.startswith(LAUNCHERS) and name not in HONOURED}
            if told and not refusal([kind, option, *value], monkeypatch):
                unseen.append((kind, option, told))
    # which parts of dynamo it uses is of no interest while it is off, to Accelerate as well
    assert {option for _, option, _ in unseen} <= {
        *("--dynamo_mode", "--dynamo_use_fullgraph", "--dynamo_use_dynamic", "--dynamo_use_regional_compilation"),
    }


def other(action: argparse.Action) -> object:
    """A value of an option that is not its default."""
    if action.choices:
        return next((choice for choice in action.choices if choice not in (action.default, "no")), action.default)
    if action.type in (int, float):
        return (action.default or 1) + 1
    return "false" if str(action.default).lower() == "true" else "true"


def test_the_lines_are_keys_of_a_recipe():
    sections = {name: field.annotation for name, field in Recipe.model_fields.items()}
    named = re.findall(rf"\b({'|'.join(sections)})\.(\w+)\b", Path(accelerate_config.__file__).read_text())
    assert {"train.autocast", "optim.clip", "parallel.shard", "parallel.experts"} <= {".".join(key) for key in named}
    assert all(key in sections[section].model_fields for section, key in named)
