"""The words of other toolkits for what a recipe says: people type them, and are told ours."""

from __future__ import annotations

_ALL_ROWS = "train.batch_size: the rows of an optimiser step over all processes and micro-batches"
_FEWER_ROWS = "train.micro_batch_size: the rows of one forward; how often it is accumulated follows from it"
_PRECISION = "train.autocast: bfloat16, or null for the model's own"
_RESUME = "it is no key of a recipe; give --resume (from Python resume=True)"

# A word, in lower case -> our key and, after a colon, a remark; or a sentence where there is no such key.
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
    **dict.fromkeys(("torch_dtype", "model_dtype"), "model.dtype"),
    **dict.fromkeys(("dataset", "datasets", "dataset_name", "train_file", "train_data", "train_dataset"), "data.train"),
    **dict.fromkeys(("eval_dataset", "validation_file", "val_data", "valid_data", "test_data"), "data.heldout"),
    **dict.fromkeys(("max_seq_length", "max_seq_len", "seq_length", "seq_len", "sequence_len"), "data.max_length"),
    **dict.fromkeys(("cutoff_len", "block_size", "max_len"), "data.max_length"),
    **dict.fromkeys(("packing", "sample_packing", "packed_sequence_size"), "data.pack: the tokens of a packed row"),
    **dict.fromkeys(("metric_for_best_model", "load_best_model_at_end"), "evaluation.best: the metric that decides"),
    "early_stopping_patience": "evaluation.patience",
    "random_seed": "seed",
    **dict.fromkeys(("lora", "peft", "adapter", "lora_config", "peft_config", "target_modules"), "lora"),
    **dict.fromkeys(("lora_r", "lora_rank"), "lora.rank"),
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
}
