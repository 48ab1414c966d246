"""Every setting that `accelerate launch` takes is the launcher's own, agrees with the recipe, or is refused by name."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import launch

from blockdiff.errors import RunError
from blockdiff.parallel.accelerate_config import HONOURED, refuse_settings

pytestmark = pytest.mark.quick

RECIPE: dict[str, Any] = {"autocast": None, "compiles": False, "clip": 1.0}
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


def refusal(found: dict[str, str], **recipe: Any) -> str:
    """The line with which a training is refused; "" when it is not."""
    try:
        refuse_settings(found, **RECIPE | recipe)
    except RunError as error:
        assert "\n" not in str(error)
        return str(error)
    return ""


@pytest.mark.parametrize("kind", [[], ["--multi_gpu"], ["--cpu"], ["--multi_gpu", "--enable_cpu_affinity"]])
def test_processes_alone_are_accelerates_to_start(kind, monkeypatch):
    assert refusal(environment(kind, monkeypatch)) == ""


@pytest.mark.parametrize("plugin", [*PLUGINS, "--use_parallelism_config"])
def test_every_plugin_is_refused_by_its_name(plugin, monkeypatch):
    words = ["--use_fsdp", "--fsdp_version", "2", plugin] if "config" in plugin else [plugin]
    assert f"ACCELERATE_{plugin[2:].upper()}=true" in refusal(environment(words, monkeypatch))


def test_a_setting_that_the_recipe_says_as_well_is_honoured(monkeypatch):
    found = environment(["--multi_gpu", "--mixed_precision", "bf16", "--dynamo_backend", "inductor"], monkeypatch)
    assert refusal(found, autocast="bfloat16", compiles=True) == ""
    assert "ACCELERATE_DYNAMO_BACKEND=INDUCTOR, ACCELERATE_MIXED_PRECISION=bf16;" in refusal(found)
    assert "ACCELERATE_DYNAMO_BACKEND" not in refusal(found, compiles=True)


@pytest.mark.parametrize(
    ("name", "value", "is_refused"),
    [
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8", True),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1", False),
        ("ACCELERATE_GRADIENT_CLIPPING", "0.5", True),
        ("ACCELERATE_GRADIENT_CLIPPING", "1.0", False),
        ("ACCELERATE_MIXED_PRECISION", "fp8", True),
        ("ACCELERATE_USE_SAGEMAKER", "true", True),
        ("ACCELERATE_IN_TPU_POD", "1", True),
        ("XLA_USE_BF16", "1", True),
        ("ACCELERATE_OF_TOMORROW", "yes", True),
        ("ACCELERATE_OF_TOMORROW", "false", False),
        ("ACCELERATE_LOG_LEVEL", "debug", False),
    ],
)
def test_a_variable_set_by_hand_is_no_exception(name, value, is_refused):
    assert (f"{name}={value}" in refusal({name: value})) == is_refused
    assert bool(refusal({name: value})) == is_refused


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
            if told and not refusal(found):
                unseen.append((kind, option, told))
    assert unseen == []


def other(action: argparse.Action) -> object:
    """A value of an option that is not its default."""
    if action.choices:
        return next((choice for choice in action.choices if choice not in (action.default, "no")), action.default)
    if action.type in (int, float):
        return (action.default or 1) + 1
    return "false" if str(action.default).lower() == "true" else "true"
