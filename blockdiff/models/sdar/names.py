"""The names of SDAR's tensors on the Hub: as in Qwen3; SDAR-MoE's as in Qwen3-MoE, expert by expert."""

from __future__ import annotations

from blockdiff.models.llama import TABLE
from blockdiff.models.names import Names

TIES = (("lm_head.weight", "model.embed_tokens.weight"),)
# `{}` is the layer number.
EXPERTS: tuple[tuple[str, str], ...] = (
    # ours                                      Hub
    ("layers.{}.router.proj.weight", "model.layers.{}.mlp.gate.weight"),
    ("layers.{}.experts.gate_up_proj", "model.layers.{}.mlp.experts.gate_up_proj"),
    ("layers.{}.experts.down_proj", "model.layers.{}.mlp.experts.down_proj"),
)

DENSE = Names(TABLE, ties=TIES)
MOE = Names(
    (*(row for row in TABLE if ".mlp." not in row[0]), *EXPERTS),
    ties=TIES,
    # files have the matrices of each expert separately; `[]` is the expert's number
    pieces=(
        ("experts.gate_up_proj", ("experts.[].gate_proj.weight", "experts.[].up_proj.weight")),
        ("experts.down_proj", ("experts.[].down_proj.weight",)),
    ),
    experts_apart=True,
)
