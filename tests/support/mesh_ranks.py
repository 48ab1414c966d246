"""The ranks of `test_mesh.py`, one process and several, over every mesh: the same batches, losses and weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import blockdiff
from blockdiff.canvas import PADDING_ROW, Batch, Canvas, CleanRow, joined, lay_out
from blockdiff.checkpoint import draw_weights, empty, init, read_config, save
from blockdiff.checkpoint.added import fill
from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear
from blockdiff.layers.lora import LowRank
from blockdiff.models.adapters import adapt, adapters_of, draw_adapters, targets
from blockdiff.models.dflash import DFlashFamily
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.objective import Objective
from blockdiff.parallel.mesh import Mesh
from blockdiff.parallel.ranks import Ranks
from blockdiff.parallel.shard import replicate, split
from blockdiff.recipes.sudoku import alphabet, make_splits
from blockdiff.sampling import Result
from blockdiff.tensor_pieces import Block, Piece, gathered, piece_of
from blockdiff.training.freeze import freeze
from blockdiff.training.optimiser import trainable
from blockdiff.training.recipe import ParallelSection
from blockdiff.training.recomputation import checkpoint_activations
from blockdiff.training.step import Counts, Loss, backpropagate
from tests.support.families import CONFIGS
from tests.support.little_model import LITTLE, save_preset
from tests.support.oracle import TWO_LAYERS, our_config, tiny_config

L, ROWS = 8, 6


def held(tensor: Tensor, ranks: Ranks) -> Piece:
    """The part of a tensor on this rank: to gather tensor by tensor takes longer than to train."""
    piece = piece_of(tensor, ranks.rank)
    return replace(piece, local=piece.local.clone())


def made(mesh: Mesh, name: str, dtype: torch.dtype, is_adapted: bool, one_sweep: bool) -> Objective:
    """A model of a family whose routers have wide margins, with recomputation, with or without adapters everywhere."""
    model = empty(our_config(MODELS[name]()), kernels="torch")
    if is_adapted:
        ranks_of = {"attention": LowRank(4, 8), "mlp": LowRank(2, 4), "experts": LowRank(4, 8)}
        there = {part: how for part, how in ranks_of.items() if part in model.config.adapted_parts}
        adapt(model, targets(model, there), [7])
    freeze(model, ())
    checkpoint_activations(model)
    if mesh.is_split:
        split(model, mesh, dtype)
    draw_weights(model, 3, str(dtype).removeprefix("torch."), mesh.ranks.device)
    generator, to_hub = torch.Generator().manual_seed(5), model.config.names.to_hub
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("router.proj.weight", "indexer.q_proj.weight", "indexer.k_proj.weight")):  # wide margins
            fill(model, name, 2 * torch.randn(tensor.shape, generator=generator).to(dtype))
        elif name.endswith("router.bias") or (to_hub(name) is None and name.endswith("decoder_scalar")):
            fill(model, name, gathered(tensor) + (0.2 * torch.rand(tensor.shape, generator=generator) - 0.1).to(dtype))
        elif to_hub(name) is None and name.endswith("down_proj.weight"):  # 0 at first: the MLP would have no gradient
            fill(model, name, 0.1 * torch.randn(tensor.shape, generator=generator).to(dtype))
    if is_adapted:
        draw_adapters(model, 4, mesh.ranks.device, dtype)
        for name in adapters_of(model):  # B is 0 at first, and then A has no gradient
            for leaf, parameter in list(model.get_submodule(name).named_parameters(recurse=False)):
                if leaf.endswith("lora_B"):
                    values = 0.1 * torch.randn(parameter.shape, generator=generator)
                    fill(model, f"{name}.{leaf}", values.to(torch.promote_types(dtype, torch.float32)))
    corruption = UniformCorruption(model.vocab_size)
    return Objective(model.train(), Linear(), corruption, seed=11, sweep=one_sweep)


def row(sample: int, model: BlockDiffusionModel) -> CleanRow:
    """A document with one or two canvases, of which every other one has the signal; sample 4 has none."""
    tokens = [2, *((7 * sample + 3 * i) % min(300, model.vocab_size - 7) + 3 for i in range(19 + sample))]
    starts = (3, 11)[: 0 if sample == 4 or not model.denoises else 1 + sample % 2]
    canvases = [
        Canvas(tokens[s : s + L], s, t=0.1 + sample / 10, coin=sample % 3 == 0, address=(0, sample, k))
        for k, s in enumerate(starts)
    ]
    return CleanRow(tokens, canvases, sample_id=sample)


def batches(ranks: Ranks, step: int, is_packed: bool, model: BlockDiffusionModel) -> list[Batch]:
    """This rank's micro-batches of one row: in even steps there are three rows, and the last of four ranks has none.

    The same rows are micro-batches on any number of ranks, so that their arithmetic is the same, too.
    """
    rows = [row(sample, model) for sample in range(ROWS if step % 2 else 3)]
    if is_packed:
        rows = [joined(rows[first : first + 2]) for first in range(0, len(rows), 2)]
    return [lay_out([one], L, pad_id=0) for one in rows[ranks.row_rank :: ranks.row_world] or [PADDING_ROW]]


def losses_of(objective: Objective) -> dict[str, Loss]:
    canvas = {"canvas": Loss(Batch.canvas_count)} if objective.model.denoises else {}
    return canvas | {"ar": Loss(Batch.ar_count, 0.5)}


def trained(mesh: Mesh, name: str, scenario: str, one_sweep: bool) -> dict[str, Piece]:
    """Losses and norms of some plain SGD steps, their gradients and the last weights."""
    dtype, is_adapted, is_packed, steps = SCENARIOS[scenario]
    objective = made(mesh, name, dtype, is_adapted, one_sweep)
    return stepped(
        objective, mesh, (batches(mesh.ranks, step, is_packed, objective.model) for step in range(1, steps + 1))
    )


def stepped(objective: Objective, mesh: Mesh, windows: Iterable[Sequence[Batch]]) -> dict[str, Piece]:
    """Losses and norms of a plain SGD step for each window of batches, their gradients and the last weights."""
    module, weights = replicate(objective, mesh), trainable(objective)
    optimiser = torch.optim.SGD(list(weights.values()), lr=1e-2)
    losses, found = losses_of(objective), list[list[float]]()
    pieces: dict[str, Piece] = {}
    for step, window in enumerate(windows, 1):
        optimiser.zero_grad(set_to_none=True)
        counts = Counts.over_ranks(window, losses, mesh.ranks)
        gradient = backpropagate(module, list(weights.values()), window, losses, counts, None, mesh)
        found.append([*gradient.losses.values(), gradient.norm])
        for name, parameter in weights.items():
            assert parameter.grad is not None
            pieces[f"gradient {step} {name}"] = held(parameter.grad, mesh.ranks)
        optimiser.step()
    pieces["losses"] = held(torch.tensor(found, dtype=torch.float64), mesh.ranks)
    return pieces | {f"weight {name}": held(parameter, mesh.ranks) for name, parameter in weights.items()}


def write_pieces(file: Path, pieces: dict[str, Piece]) -> None:
    """Write what a rank holds, and as metadata of which shape and where it begins."""
    places = {name: json.dumps([piece.shape, piece.block.offsets]) for name, piece in pieces.items()}
    save_file({name: piece.local.contiguous() for name, piece in pieces.items()}, file, places)


def read_whole(files: Iterable[Path]) -> dict[str, Tensor]:
    """The tensors whose pieces ranks have written; where no rank has anything they are NaN.

    AssertionError where ranks that hold the same have other numbers there.
    """
    tensors: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            for name, place in opened.metadata().items():
                shape, offsets = json.loads(place)
                local = opened.get_tensor(name)
                made = tensors.setdefault(name, torch.full(shape, float("nan"), dtype=local.dtype))
                there = made[Block(tuple(offsets), tuple(local.shape)).slices] if shape else made
                assert torch.equal(there.where(there == there, local), local), (name, file)
                there.copy_(local)
    return tensors


MODELS: dict[str, Callable[[], Any]] = {
    **CONFIGS,
    "diffusion_gemma": lambda: tiny_config(canvas_length=L, **TWO_LAYERS),
}
# A denoiser of each family over every mesh that it supports; of the others what differs from them, which is gathering.
TRAINED: dict[str, tuple[str, ...] | None] = {
    "diffusion_gemma": None,
    "llama tied, denoising": ("FSDP2", "tensor"),
    "minimax_m3": ("FSDP2",),
    "minimax_m3 denoising": ("experts", "tensor"),
    "llada2": ("FSDP2", "experts"),
    "sdar_moe": ("FSDP2", "experts"),
    "qwen3 sliding, denoising": ("FSDP2",),
}
SCENARIOS = {
    "all weights, fp64": (torch.float64, False, False, 2),
    "adapters, packed, fp32": (torch.float32, True, True, 2),
}
MESHES: dict[str, dict[str, Any]] = {
    "DDP": {},
    "FSDP2": {"shard": "full"},
    "experts": {"experts": 2},
    "tensor": {"tensor": 2},
    "FSDP2 x experts": {"shard": "full", "experts": 2},
    "FSDP2 x tensor": {"shard": "full", "tensor": 2},
}


# Adapters and packed rows are laid over a mesh in the same way whatever the family is, and over two ways as over each.
ADAPTED = {("minimax_m3 denoising", "experts"), *(("diffusion_gemma", mesh) for mesh in ("FSDP2", "experts", "tensor"))}


def cases(world: int) -> list[tuple[str, str, str]]:
    """The trainings over so many ranks: a model, a mesh and a scenario each."""
    plain, adapted = SCENARIOS
    found = [(name, mesh) for name in TRAINED for mesh in meshes_of(name, world)]
    return [(*case, each) for case in found for each in (plain, adapted) if each == plain or case in ADAPTED]


def meshes_of(name: str, world: int) -> list[str]:
    """The meshes of so many ranks over which a model is trained here."""
    there, chosen = set(our_config(MODELS[name]()).meshes), TRAINED[name]
    sizes = {mesh: 4 if len(said) == 2 else 2 for mesh, said in MESHES.items()}
    supported = [mesh for mesh, said in MESHES.items() if set(ParallelSection(**said).names) <= there]
    assert set(chosen or ()) <= set(supported)
    return [mesh for mesh in chosen or supported if sizes[mesh] == world]


def all_meshes(ranks: Ranks, directory: Path, runs: dict[str, list[str]]) -> None:
    """Train every model over every mesh, of which each rank writes what it has, and whole runs from recipes."""
    for name, each, scenario in cases(ranks.world):
        mesh = Mesh.of(replace(ranks, ranks_per_row=MESHES[each].get("tensor", 1)), **MESHES[each])
        found = trained(mesh, name, scenario, mesh.is_split)
        write_pieces(directory / f"{name}: {each}: {scenario}: {ranks.rank}", found)
    train_runs(directory, runs)


def write_recipes(directory: Path) -> None:
    """Recipes of two steps with all that a run may do: a model from scratch, adapters of one, a drafter for it."""
    character_tokenizer(alphabet(4)).save_pretrained(directory / "tokenizer")
    save_preset(directory / "little.json", LITTLE)
    tokenizer = load_tokenizer(directory / "tokenizer")
    save(init(str(directory / "little.json"), seed=3), directory / "base", tokenizer=tokenizer)
    for name, rows in make_splits(4, {"train": 24, "test": 3}, seed=0).items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe: dict[str, Any] = {
        "seed": 1,
        "model": {"preset": str(directory / "little.json"), "tokenizer": str(directory / "tokenizer")},
        "data": {"train": "train.jsonl", "heldout": "test.jsonl", "cache": "off"},
        "optim": {"lr": 1e-2, "schedule": "constant", "warmup_steps": 1, "ema": 0.9},
        "train": {"steps": 2, "batch_size": 6, "micro_batch_size": 2, "log_every": 1, "eval_every": 2, "save_every": 2},
        "evaluation": {"prompts": "test.jsonl", "task": "sudoku", "best": "heldout_canvas_loss"},
        "generation": {"max_steps": 4},
    }
    (directory / "all.yaml").write_text(json.dumps(recipe))
    lora = {"parts": {"attention": 4, "experts": 2}, "tokens": ["1"]}
    (directory / "adapters.yaml").write_text(json.dumps({**recipe, "model": {"path": "base"}, "lora": lora}))
    base = read_config(directory / "base")
    config = DFlashFamily.for_target(base, 1, 4, 3, 16**0.5, 30.0)
    save(init(config, seed=5), directory / "draft")
    drafter = {**recipe, "model": {"path": "draft"}, "objective": {"kind": "drafter", "target": "base", "anchors": 3}}
    drafter |= {"evaluation": {"best": "heldout_draft_loss"}, "generation": {}}
    (directory / "drafter.yaml").write_text(json.dumps(drafter))
    save(init(CONFIGS["minimax_m3"](), seed=3), directory / "m3", tokenizer=tokenizer)
    reinforced = {**recipe, "data": {"train": "train.jsonl"}, "generation": {"max_steps": 3, "max_new_tokens": 18}}
    reinforced |= {"evaluation": {"prompts": "test.jsonl", "task": "sudoku"}}
    reinforced |= {"train": recipe["train"] | {"eval_every": 0}, "optim": recipe["optim"] | {"lr": 2e-3}}
    for name, model, more in (
        ("canvas", "base", {"kl": 0.1, "sft": 0.5}),
        ("head", "base", {"passes": 2, "kl": 0.1}),
        ("m3 head", "m3", {}),
    ):
        policy = {"kind": "policy", "over": "canvas" if name == "canvas" else "next_token", **more}
        policy |= {"reward": "tests.support.mesh_ranks:checksum", "prompts_per_round": 2, "answers": 3}
        adapted = {"lora": "none"} if model == "m3" else {"lora": {"rank": 2}}
        asked = {**reinforced, "model": {"path": model}, "objective": policy, **adapted}
        asked |= {} if name == "canvas" else {"generation": {"max_new_tokens": 4}}
        (directory / f"{name}.yaml").write_text(json.dumps(asked))
    wide = {**LITTLE, "text_config": {**LITTLE["text_config"], "moe_intermediate_size": 32}}  # a block for each of two
    save_preset(directory / "wide.json", wide)
    save(init(str(directory / "wide.json"), seed=3), directory / "wide", tokenizer=tokenizer)
    four_bits = {"path": "wide", "quantize": "nvfp4"}
    (directory / "adapters over four bits.yaml").write_text(json.dumps({**recipe, "model": four_bits, "lora": lora}))


def checksum(row: dict[str, Any], result: Result) -> float:
    """A reward that differs from answer to answer."""
    return float(sum(result.tokens) % 7)


def train_runs(directory: Path, runs: dict[str, list[str]]) -> None:
    """Train the recipes that names of runs begin with, each with what it changes."""
    for name, changes in runs.items():
        blockdiff.train(directory / f"{name.split(',')[0]}.yaml", changes, directory / name)
