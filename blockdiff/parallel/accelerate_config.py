"""Settings of an Accelerate config beside its processes: they agree with the recipe, or are refused by name.

`accelerate launch` hands its settings to the processes in environment variables, which accelerate/utils/launch.py sets.
How many processes there are and where they run is Accelerate's; everything else about a training is the recipe's, so
that a run directory says what was trained. A setting is never passed over in silence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from blockdiff.errors import RunError

# Accelerate itself does what these say (or they are for code of its that does not run here).
HONOURED = (
    *("ACCELERATE_USE_CPU", "ACCELERATE_CPU_AFFINITY", "ACCELERATE_TORCH_DEVICE", "ACCELERATE_LOG_LEVEL"),
    *("ACCELERATE_ENABLE_RICH", "ACCELERATE_BYPASS_DEVICE_MAP", "ACCELERATE_CONFIG_DS_FIELDS"),
)
_OFF = ("", "no", "none", "false", "0")
_ON = "true|1|yes|on|y|t"
_MANY = r"(?!1$)\d+"
_CHECKPOINTING = "train.activation_checkpointing: true"
_MICRO_BATCHES = "train.micro_batch_size (train.batch_size stays what an optimiser step sees)"
# The variable that turns a plugin on, the plugin's name, and recipe lines that do the same: variable, value, line.
_PLUGINS = (
    (
        "ACCELERATE_USE_FSDP",
        "FSDP plugin",
        (
            ("FSDP_SHARDING_STRATEGY", "(?!NO_SHARD).+", "parallel.shard: full"),
            ("FSDP_OFFLOAD_PARAMS", _ON, "parallel.offload: true"),
            ("FSDP_ACTIVATION_CHECKPOINTING", _ON, _CHECKPOINTING),
        ),
    ),
    (
        "ACCELERATE_USE_DEEPSPEED",
        "DeepSpeed plugin",
        (
            ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "[123]", "parallel.shard: full"),
            ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu|nvme", "parallel.offload: true"),
            ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "cpu|nvme", "parallel.offload: true"),
            ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", _MANY, _MICRO_BATCHES),
            ("ACCELERATE_GRADIENT_CLIPPING", r"[\d.]+", "optim.clip: {}"),
        ),
    ),
    (
        "ACCELERATE_USE_MEGATRON_LM",
        "Megatron-LM plugin",
        (
            ("MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER", _ON, "parallel.shard: full"),
            ("MEGATRON_LM_USE_CUSTOM_FSDP", _ON, "parallel.shard: full"),
            ("MEGATRON_LM_OPTIMIZER_CPU_OFFLOAD", _ON, "parallel.offload: true"),
            ("MEGATRON_LM_EXPERT_MODEL_PARALLEL_SIZE", _MANY, "parallel.experts: {}"),
            ("MEGATRON_LM_RECOMPUTE_ACTIVATIONS", _ON, _CHECKPOINTING),
            ("MEGATRON_LM_RECOMPUTE_GRANULARITY", ".+", _CHECKPOINTING),
            ("MEGATRON_LM_NUM_MICRO_BATCHES", _MANY, _MICRO_BATCHES),
            ("MEGATRON_LM_GRADIENT_CLIPPING", r"[\d.]+", "optim.clip: {}"),
        ),
    ),
    (
        "ACCELERATE_USE_PARALLELISM_CONFIG",
        "parallelism_config",
        (("PARALLELISM_CONFIG_DP_SHARD_SIZE", _MANY, "parallel.shard: full"),),
    ),
    ("ACCELERATE_USE_SAGEMAKER", "SageMaker environment", ()),
    ("ACCELERATE_IN_TPU_POD", "TPU pod", ()),
    ("XLA_USE_BF16", "TPU precision", ()),
    ("XLA_DOWNCAST_BF16", "TPU precision", ()),
)


def refuse_settings(environment: Mapping[str, str], recipe: Mapping[str, Any]) -> None:
    """Raise RunError, in one line, for every Accelerate setting in `environment` that the recipe does not say as well.

    recipe: the values of `train.autocast`, `model.compile`, `optim.clip`, `parallel.shard`, `parallel.offload` and
    `train.activation_checkpointing`.
    """
    plugins = list(_plugins(environment, recipe))
    alone = [] if plugins else list(_accumulation(environment, recipe))
    found = [*plugins, *alone, *_precision(environment, recipe), *_compiler(environment, recipe), *_others(environment)]
    if found:
        raise RunError("; ".join(found))


def _value(environment: Mapping[str, str], name: str) -> str:
    """The value in lower case; "" for what is off or not set."""
    value = environment.get(name, "").strip().lower()
    return "" if value in _OFF else value


def _plugins(environment: Mapping[str, str], recipe: Mapping[str, Any]) -> Iterator[str]:
    for switch, title, counterparts in _PLUGINS:
        if not _value(environment, switch):
            continue
        lines = [
            line.format(value)
            for variable, pattern, line in counterparts
            if (value := _value(environment, variable)) and re.fullmatch(pattern, value, re.IGNORECASE)
        ]
        if switch == "ACCELERATE_USE_FSDP" and _is_fsdp_as_here(environment):
            lines = [line for line in lines if str(recipe[line.partition(": ")[0]]).lower() != line.partition(": ")[2]]
            if not lines:
                continue
        instead = f"write {', '.join(dict.fromkeys(lines))} in the recipe, and" if lines else "write"
        yield f"Accelerate's {title} is not used: {instead} distributed_type: MULTI_GPU (or NO) in its config"


def _is_fsdp_as_here(environment: Mapping[str, str]) -> bool:
    """True for an FSDP plugin that shards as `parallel.shard: full` does, weights between forward and backward too."""
    is_freed = environment.get("FSDP_RESHARD_AFTER_FORWARD", "true").strip().lower() not in _OFF
    return is_freed and _value(environment, "FSDP_SHARDING_STRATEGY") in ("full_shard", "1")


def _accumulation(environment: Mapping[str, str], recipe: Mapping[str, Any]) -> Iterator[str]:
    if _value(environment, name := "ACCELERATE_GRADIENT_ACCUMULATION_STEPS") not in ("", "1"):
        yield f"Accelerate's gradient_accumulation_steps ({name}) is not used: the recipe has {_MICRO_BATCHES}"
    clip = _value(environment, name := "ACCELERATE_GRADIENT_CLIPPING")
    if clip and not _is_number(clip, recipe["optim.clip"]):
        yield f"Accelerate's gradient_clipping ({name}) is not used: write optim.clip: {clip} in the recipe"


def _precision(environment: Mapping[str, str], recipe: Mapping[str, Any]) -> Iterator[str]:
    asked = _value(environment, "ACCELERATE_MIXED_PRECISION")
    if not asked or (asked == "bf16" and recipe["train.autocast"] == "bfloat16"):
        return
    key = "train.autocast: bfloat16"
    remedy = f"write {key}" if asked == "bf16" else f"nothing here computes in {asked}; write {key}"
    yield f"Accelerate's mixed_precision: {asked} is not used: {remedy} in the recipe, or 'no' in its config"


def _compiler(environment: Mapping[str, str], recipe: Mapping[str, Any]) -> Iterator[str]:
    backend = _value(environment, "ACCELERATE_DYNAMO_BACKEND")
    if not backend:
        return  # then Accelerate, too, passes over the rest of dynamo_config
    if backend != "inductor" or not recipe["model.compile"]:
        yield f"Accelerate's dynamo_backend: {backend} is not used: write model.compile: true (inductor) in the recipe"
    mode = _value(environment, "ACCELERATE_DYNAMO_MODE")
    names = {"dynamo_use_fullgraph": "USE_FULLGRAPH", "dynamo_use_dynamic": "USE_DYNAMIC"}
    asked = [name for name, variable in names.items() if _value(environment, f"ACCELERATE_DYNAMO_{variable}")]
    for name in [f"dynamo_mode: {mode}"] * (mode not in ("", "default")) + asked:
        yield f"Accelerate's {name} is not used: model.compile: true compiles every layer; take it out of its config"


def _others(environment: Mapping[str, str]) -> Iterator[str]:
    if _value(environment, "ACCELERATE_DEBUG_MODE"):
        yield "Accelerate's debug is not used: torch checks collectives with TORCH_DISTRIBUTED_DEBUG=DETAIL"
    parts = ("DYNAMO_", "DEEPSPEED_", "FP8_", "SAGEMAKER_")  # of what is refused or off as a whole
    switches = {switch for switch, _, _ in _PLUGINS}
    read_elsewhere = {
        "ACCELERATE_MIXED_PRECISION",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        "ACCELERATE_GRADIENT_CLIPPING",
    }
    read_elsewhere |= {*HONOURED, *switches, "ACCELERATE_DEBUG_MODE"}
    for name in sorted(environment):
        is_known = name in read_elsewhere or name.startswith(tuple(f"ACCELERATE_{part}" for part in parts))
        if name.startswith("ACCELERATE_") and not is_known and _value(environment, name):
            yield f"{name} is not known here: take it out of the environment"


def _is_number(text: str, number: float) -> bool:
    try:
        return float(text) == number
    except ValueError:
        return False
