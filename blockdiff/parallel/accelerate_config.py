"""Settings of an Accelerate config that do more than start processes: refused unless the recipe sets the same.

`accelerate launch` hands its settings to the processes in environment variables, which accelerate/utils/launch.py sets.
Accelerate decides how many processes there are and where they run; the recipe decides everything else, so that a run
directory describes what was trained. No setting is silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping

from blockdiff.errors import RunError

# Accelerate itself applies these, or they concern code of Accelerate that does not run here.
HONOURED = (
    *("ACCELERATE_USE_CPU", "ACCELERATE_CPU_AFFINITY", "ACCELERATE_TORCH_DEVICE", "ACCELERATE_LOG_LEVEL"),
    *("ACCELERATE_ENABLE_RICH", "ACCELERATE_BYPASS_DEVICE_MAP", "ACCELERATE_CONFIG_DS_FIELDS"),
)
_SETTINGS = ("ACCELERATE_", "XLA_USE_BF16", "XLA_DOWNCAST_BF16")  # prefixes of their names
_OFF = ("", "no", "none", "false", "0", "default")


def refuse_settings(environment: Mapping[str, str], *, autocast: str | None, compiles: bool, clip: float) -> None:
    """Raise one RunError that lists every Accelerate setting in `environment` that differs from the recipe.

    autocast, compiles, clip: the recipe's `train.autocast`, `model.compile` and `optim.clip`.
    """
    equivalents = {
        "ACCELERATE_MIXED_PRECISION": "bf16" if autocast == "bfloat16" else "no",
        "ACCELERATE_DYNAMO_BACKEND": "inductor" if compiles else "no",
        "ACCELERATE_GRADIENT_CLIPPING": str(clip),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",  # train.micro_batch_size accumulates
    }
    refused = [
        f"{name}={text}"
        for name, text in sorted(environment.items())
        if name.startswith(_SETTINGS)
        and name not in HONOURED
        and text.strip().lower() not in (*_OFF, equivalents.get(name))
    ]
    if refused:
        raise RunError(
            f"Accelerate would not do what is asked of it: {', '.join(refused)}; the recipe says how a model trains; "
            "take that out of its config or the environment (distributed_type: MULTI_GPU or NO)"
        )
