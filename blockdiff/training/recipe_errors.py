"""One line for a recipe that cannot be read: the place, the key and what to write instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

from pydantic import ValidationError

Key = tuple[str, ...]
Origin = tuple[str, Path | None]  # the file or override that sets a key, and the directory of its relative paths
Origins = dict[Key, Origin]  # of the last layer that sets a key
Keys = Mapping[Any, list[str]]  # the keys below each key

UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")  # pydantic's names
OF_UNIONS = re.compile(r"(constrained-|dict\[).*|str")  # pydantic's names for the members of a union
SWITCH = "; YAML reads a bare on, off, yes or no as true or false"
# Renamed keys, and their present names.
_RL = "objective: {kind: policy, over: next_token or canvas, reward: ...} (docs/rl.md)"
MOVED: dict[Key, str] = {
    ("rl",): _RL,
    ("objective", "draft_for"): "objective: {kind: drafter, target: MODEL}",
    ("objective", "targets"): "objective: {kind: drafter, labels: tokens or distribution}",
    ("objective", "distil"): "objective: {kind: distil}, with teacher: MODEL for another one",
    ("objective", "router"): "model.router",
    ("objective", "images"): "model.images",
    ("objective", "policy"): "objective.over: next_token or canvas",
    ("objective", "group"): "objective.answers",
    ("objective", "prompts"): "objective.prompts_per_round",
    ("objective", "epochs"): "objective.passes",
    ("objective", "clip"): "objective.ratio_clip",
}
# The keys that take sources of rows.
SOURCES = (("data", "train"), ("data", "heldout"), ("evaluation", "prompts"))


def one_line(error: ValidationError, keys: Keys, kinds_with: Keys, origins: Origins, path: str, above: Key = ()) -> str:
    """Report the most useful error of a validation in one line: unknown keys first, wrong types last.

    keys: the names of the keys below each key of a recipe.
    kinds_with: the kinds of run that have each key of `objective`.
    origins: the file or override that sets each key.
    path: what to name for keys without an origin.
    above: the key of the section, if that was validated alone.
    """
    first = min(error.errors(), key=lambda each: (each["type"] not in UNKNOWN, each["type"].endswith("_type")))
    kind, value, reason = first["type"], first["input"], first["msg"].removeprefix("Value error, ")
    words = [*above, *(word for word in first["loc"] if isinstance(word, str))]
    key = tuple(word for index, word in enumerate(words) if index < 2 or not OF_UNIONS.fullmatch(word))
    given_key = next((key[:end] for end in range(len(key), 0, -1) if key[:end] in origins), None)
    is_pair = kind in ("tuple_type", "too_long") or (kind == "missing" and isinstance(first["loc"][-1], int))
    origin = path if given_key is None or (kind == "missing" and not is_pair) else origins[given_key][0]
    name = ".".join(filter(None, key))
    number = next((word for word in first["loc"] if isinstance(word, int)), None)
    if number is not None and key[:2] in SOURCES:
        name = f"{'.'.join(key[:2])}: source {number + 1}" + "".join(f": {word}" for word in key[2:])
    if kind in UNKNOWN and key in MOVED:
        return f"{origin}: unknown key {name}; write {MOVED[key]}"
    if kind in UNKNOWN and len(key) == 2 and key[0] == "objective" and key[1] in kinds_with:
        having = kinds_with[key[1]]
        return f"{origin}: unknown key {name} of this kind of run; objective.kind: {' or '.join(having)} has it"
    if kind in UNKNOWN:
        return f"{origin}: unknown key {name}; {_nearest(key, keys)}"
    if is_pair:
        reason = "should be a list of two numbers"
    elif kind == "missing":
        return f"{origin}: {name}: missing; every recipe needs it"
    elif kind in ("model_type", "dataclass_type", "dict_type"):
        reason = f"should be a mapping with the keys {', '.join(keys.get(key, ()))}"
    elif kind == "too_short":
        reason = "should have at least one source"
    has_value = kind == "value_error" and (isinstance(value, Mapping) or "got " in reason)
    got = "" if has_value else f" (got {shorten(repr(value), 100)}{SWITCH if isinstance(value, bool) else ''})"
    return f"{origin}: {name}: {reason[:1].lower()}{reason[1:]}{got}"


def paths(keys: Keys) -> list[str]:
    """The paths of all keys that have a value: `section.key`, or `key` outside of sections."""
    return [f"{name}.{key}" for name in keys[()] for key in keys.get((name,), ())] + [
        name for name in keys[()] if (name,) not in keys
    ]


def _nearest(key: Key, keys: Keys) -> str:
    """Suggest a key for an unknown one.

    It looks in this order for words of other toolkits, similar keys of the same section, and similar keys elsewhere.
    """
    *above, word = key
    all_paths = paths(keys)
    if word.lower() in OTHER_TOOLKITS:
        ours, _, remark = OTHER_TOOLKITS[word.lower()].partition(": ")
        if ours in all_paths or (ours,) in keys:
            return f"did you mean {ours}{f' ({remark})' if remark else ''}?"
        return ours
    words = [path.rpartition(".")[2] for path in all_paths]
    if word in words:
        return f"did you mean {all_paths[words.index(word)]}?"
    siblings = keys.get(tuple(above), [])
    if near := difflib.get_close_matches(word, [*siblings, "extends"] if not above else siblings, 1):
        return f"did you mean {'.'.join([*above, near[0]]) if len(above) < 2 else near[0]}?"
    if near := difflib.get_close_matches(word, words, 1, cutoff=0.8):
        return f"did you mean {all_paths[words.index(near[0])]}?"
    return f"{'.'.join(filter(None, above)) or 'a recipe'} has {', '.join(siblings) or 'no keys'}"


# -- the words of other toolkits, which people type, and our keys for them -------------------------------------------

_ALL_ROWS = "train.batch_size: the rows of an optimiser step over all processes and micro-batches"
_FEWER_ROWS = "train.micro_batch_size: the rows of one forward; the number of accumulated micro-batches follows from it"
_PRECISION = "train.autocast: bfloat16, or null for the model's own"
_RESUME = "it is no key of a recipe; use --resume (from Python resume=True)"
_RESPONSES = "objective.ar_loss: canvases learn responses alone; {scope: response} lets next tokens do so, too"
_KERNELS = "model.kernels: by default attention reads only the keys that its queries see"

# A word, in lower case -> our key and, after a colon, a remark; or a sentence if there is no such key.
OTHER_TOOLKITS: dict[str, str] = {
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "max_epochs", "n_epochs"), "train.epochs"),
    **dict.fromkeys(("max_steps", "num_steps", "num_train_steps", "max_iters", "train_iters"), "train.steps"),
    **dict.fromkeys(("per_device_train_batch_size", "train_batch_size", "global_batch_size"), _ALL_ROWS),
    **dict.fromkeys(("gradient_accumulation_steps", "gradient_accumulation", "accumulate_grad_batches"), _FEWER_ROWS),
    **dict.fromkeys(("local_batch_size", "per_device_batch_size"), _FEWER_ROWS),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpoint"), "train.activation_checkpointing"),
    **dict.fromkeys(("bf16", "fp16", "mixed_precision", "precision"), _PRECISION),
    "logging_steps": "train.log_every",
    "eval_steps": "train.eval_every",
    "save_steps": "train.save_every",
    "save_total_limit": "train.keep",
    "report_to": "train.trackers",
    **dict.fromkeys(("resume", "resume_from_checkpoint"), _RESUME),
    **dict.fromkeys(("learning_rate", "max_lr", "peak_lr"), "optim.lr"),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "beta1", "beta2"), "optim.betas: both in a list"),
    **dict.fromkeys(("adam_epsilon", "adam_eps"), "optim.eps"),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "gradient_clip_val", "clip_grad_norm"), "optim.clip"),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type", "lr_decay_style", "lr_schedule"), "optim.schedule"),
    **dict.fromkeys(("warmup", "num_warmup_steps", "lr_warmup_steps"), "optim.warmup_steps"),
    "warmup_ratio": "optim.warmup_steps: a number of optimiser steps",
    **dict.fromkeys(("ema_decay", "use_ema"), "optim.ema"),
    **dict.fromkeys(("optimizer", "optimiser"), "optim.name"),
    **dict.fromkeys(("output_dir", "run_dir", "save_dir"), "output"),
    **dict.fromkeys(("model_name_or_path", "model_name", "base_model", "pretrained_model_name_or_path"), "model.path"),
    **dict.fromkeys(("tokenizer_name", "tokenizer_name_or_path"), "model.tokenizer"),
    **dict.fromkeys(("torch_dtype", "model_dtype", "bnb_4bit_compute_dtype"), "model.dtype"),
    **dict.fromkeys(("load_in_4bit", "bnb_4bit_quant_type", "qlora"), "model.quantize: nvfp4 under lora"),
    "bnb_4bit_use_double_quant": "model.quantize: in nvfp4 the scales of blocks have 8 bits already",
    "load_in_8bit": "model.quantize: fp8 under lora",
    "quantization_config": "model.quantize: nvfp4 or fp8; a checkpoint that is stored so needs no key",
    **dict.fromkeys(("dataset", "datasets", "dataset_name", "train_file", "train_data", "train_dataset"), "data.train"),
    **dict.fromkeys(("eval_dataset", "validation_file", "val_data", "valid_data", "test_data"), "data.heldout"),
    **dict.fromkeys(("max_seq_length", "max_seq_len", "seq_length", "seq_len", "sequence_len"), "data.max_length"),
    **dict.fromkeys(("cutoff_len", "block_size", "max_len"), "data.max_length"),
    **dict.fromkeys(("packing", "sample_packing", "packed_sequence_size"), "data.pack: the tokens of a packed row"),
    **dict.fromkeys(("metric_for_best_model", "load_best_model_at_end"), "evaluation.best: the metric that decides"),
    "early_stopping_patience": "evaluation.patience",
    "random_seed": "seed",
    **dict.fromkeys(("lora", "peft", "adapter", "lora_config", "peft_config"), "lora"),
    **dict.fromkeys(("r", "lora_r", "lora_rank"), "lora.rank"),
    "target_modules": "lora.parts: the parts of the model with a rank for each",
    "val_set_size": "data.heldout: a file of rows, or a part of a file's",
    **dict.fromkeys(("train_on_inputs", "train_on_responses_only"), _RESPONSES),
    **dict.fromkeys(("flash_attention", "flash_attn", "attn_implementation"), _KERNELS),
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
}
