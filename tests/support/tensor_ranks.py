"""The ranks of `test_tensor.py`: one model over them, beside one process that has all of it."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import blockdiff
from blockdiff import memory
from blockdiff.data.rows import Row
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear
from blockdiff.evals import task
from blockdiff.kernels import IN_TORCH
from blockdiff.kernels.span_attention import torch as span_attention
from blockdiff.kernels.vocabulary import Classes, Penalty, Shaping, Stats, pack_allowed
from blockdiff.layers.lora import LowRank
from blockdiff.layers.vocabulary import Vocabulary
from blockdiff.layers.weights import local_part
from blockdiff.models.adapters import adapt, adapters_of, draw_adapters, targets
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.pages import Pages
from blockdiff.models.stored import forms_of
from blockdiff.objective import Objective
from blockdiff.parallel.mesh import Mesh
from blockdiff.parallel.ranks import Ranks
from blockdiff.parallel.shard import load_split
from blockdiff.parallel.signals import Interrupted
from blockdiff.parallel.tensor import split_vocabulary, tensor_parallel
from blockdiff.sampling import Generation, Request, Result, Sampler
from blockdiff.sampling import engine as engines
from blockdiff.training.freeze import freeze
from blockdiff.training.kinds.canvas_heldout import heldout
from blockdiff.training.samples import sample_prompts
from tests.objective.test_objective import L, V, batch_of, rows
from tests.support.expert_ranks import assert_same, error
from tests.support.families import CONFIGS, small_model
from tests.support.oracle import TWO_LAYERS, oracle, our_config, ours, tiny_config
from tests.support.recorder import Looker
from tests.support.rounded import rounded

Found = dict[str, Tensor]
OVER_FOUR = ("diffusion_gemma, adapted", "llada2, adapted", "llama", "minimax_m3, adapted", "qwen3 sliding, denoising")


def adapted(name: str, noisy_only: bool = False) -> BlockDiffusionModel:
    """A model with adapters wherever they may be, and unless they are of noisy tokens, rows of the table that train."""
    model = ours(oracle(tiny_config(canvas_length=L, **TWO_LAYERS))) if name == "diffusion_gemma" else small_model(name)
    parts = model.config.adapted_parts
    low_rank, tokens = LowRank(3, 6, noisy_only=noisy_only), [] if noisy_only else [5, model.vocab_size - 1]
    adapt(model, targets(model, dict.fromkeys(parts, low_rank)), tokens)
    draw_adapters(model, 0, torch.device("cpu"), model.dtype)
    draw = torch.Generator().manual_seed(7)
    for module in adapters_of(model).values():
        for name, parameter in module.named_parameters(recurse=False):
            if name.endswith("lora_B"):
                parameter.data.normal_(0.0, 0.1, generator=draw)
    return model.double()


def adapted_over_rounded() -> BlockDiffusionModel:
    """A model with experts in NVFP4, other layers in fp8, and adapters over them."""
    model = rounded(ours(oracle(tiny_config(canvas_length=L, **TWO_LAYERS))), "nvfp4")
    adapt(model, targets(model, {"attention": LowRank(3, 6), "experts": LowRank(3, 6)}))
    draw_adapters(model, 0, torch.device("cpu"), model.dtype)
    return model.double()


def gradients(model: nn.Module) -> Found:
    """The whole gradients of what trains."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            grad = parameter.grad
            assert grad is not None, name
            found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


def trained(model: BlockDiffusionModel) -> Found:
    """Losses and gradients of the objective."""
    losses = [*Objective(model, Linear(), UniformCorruption(V), 5)(batch_of(rows())).values()]
    sum(losses).backward()
    return {"losses": torch.stack([loss.detach() for loss in losses]), **gradients(model)}


def run_through(model: BlockDiffusionModel) -> Found:
    """Hidden states, losses and gradients of every pass that a model of any family has."""
    tokens = torch.arange(3, 45).view(2, 21)
    spans = {name: kind.encode_spans(torch.zeros_like(tokens)) for name, kind in model.kinds.items()}
    hidden, _ = model(tokens, torch.arange(21).expand(2, 21), spans)
    found, canvas = {"hidden": hidden}, tokens[:, :8] + 40
    if model.denoises:
        past = model.encode(tokens).layers()
        start = torch.full((2, 1), 21)
        spans = {name: kind.denoise_spans(start, 0 * start, 0 * start + 8, 8) for name, kind in model.kinds.items()}
        soft = model.vocabulary.soft_embedding(hidden[:, :8].detach())
        found["soft"] = soft
        found["noisy"], _ = model(canvas, torch.arange(21, 29).expand(2, 8), spans, past, True, soft)
    losses = [model.vocabulary.cross_entropy(x[:, :8].flatten(0, 1), canvas.flatten()) for x in found.values()]
    torch.cat(losses).sum().backward()
    return {name: x.detach() for name, x in found.items()} | {"loss": torch.cat(losses).detach()} | gradients(model)


def cases() -> dict[str, tuple[Callable[[], BlockDiffusionModel], Callable[[BlockDiffusionModel], Found]]]:
    """Models and what each is to compute: one of every family that is split, and one with adapters."""
    split = [name for name, config in CONFIGS.items() if our_config(config()).tensor_parts]
    assert len(split) >= 5
    return {name: (partial(small_model, name), run_through) for name in split} | {
        "diffusion_gemma, rounded": (adapted_over_rounded, trained),
        "diffusion_gemma, adapted": (partial(adapted, "diffusion_gemma"), trained),
        "llada2, adapted": (partial(adapted, "llada2"), run_through),
        "minimax_m3, adapted": (partial(adapted, "minimax_m3 denoising", noisy_only=True), run_through),
    }


def computed_alone(directory: Path) -> None:
    """Write what one process computes of every case, and tokens, steps and score of what each model answers."""
    found = {name: [[list(one.tokens), one.steps, one.score] for one in answers(name, None)] for name in SAMPLED}
    (directory / "sampled.json").write_text(json.dumps(found))
    for name, (make, compute) in cases().items():
        one = make()
        freeze(one, ())
        save_file({key: x.detach().clone().contiguous() for key, x in compute(one).items()}, directory / name)


def whole_models(ranks: Ranks, directory: Path, alone: Path) -> None:
    """The numbers of one process (`computed_alone`), computed by ranks with about their share of the weights each.

    Four ranks, which are more than the kv heads, compute one case of each family, and two ranks the others.
    """
    mesh = init_device_mesh("cpu", (ranks.world,))
    for name, (make, compute) in cases().items():
        if (ranks.world == 4) != (name in OVER_FOUR):
            continue
        expected, model = load_file(alone / name), make()
        freeze(model, ())
        tensor_parallel(model, mesh)
        held = sum(local_part(parameter).numel() for parameter in model.parameters())
        of_all = held / sum(parameter.numel() for parameter in model.parameters())
        assert of_all < 1 / ranks.world + 0.25, name  # norms, routers and kv heads fewer than ranks are held by all
        got = compute(model)
        # a scalar before a norm has a gradient that is all rounding
        seen = [key for key, x in expected.items() if x.numel() > 1 or float(x.abs()) > 1e-2]
        assert len(seen) > len(expected) - 3
        assert_same({key: got[key] for key in seen}, {key: expected[key] for key in seen}, 1e-10)


@torch.no_grad()
def read_rounded(ranks: Ranks, directory: Path, base: Path, stored: Path) -> None:
    """Each rank holds its part of the codes, whether the checkpoint is rounded on reading or stored so."""
    mesh = Mesh(ranks, tensor=ranks.world, tensors=init_device_mesh("cpu", (ranks.world,)))
    tokens = torch.arange(3, 24)[None]
    for path, quantize in ((base, "nvfp4"), (stored, None)):
        whole = blockdiff.load(path, dtype="float32", device="cpu", kernels="torch", quantize=quantize)
        split = load_split(path, mesh, "float32", "torch", quantize=quantize)
        assert forms_of(split) == ("fp8", "nvfp4")
        held = sum(local_part(x).numel() for x in split.buffers() if x.dtype == torch.uint8)
        assert 0 < held < sum(x.numel() for x in whole.buffers() if x.dtype == torch.uint8) * (1 / ranks.world + 0.25)
        off = error(split.encode(tokens).hidden, whole.encode(tokens).hidden)
        assert off < 1e-5, (quantize, off)


def vocabularies(ranks: Ranks, directory: Path) -> None:
    """Every op of a vocabulary whose tokens do not divide evenly, and every gradient."""
    tokens, N = 103, 24
    mesh = init_device_mesh("cpu", (ranks.world,))
    draw = torch.Generator().manual_seed(3)
    table, hidden = torch.randn(tokens, 8, generator=draw), torch.randn(4, N // 4, 8, generator=draw)
    target = torch.randint(0, tokens, (N,), generator=draw)
    observed, bonus = torch.where(torch.arange(N) % 2 == 0, target, 7), torch.linspace(0.0, 12.0, N)
    uniform = torch.rand(4, N // 4, generator=draw)
    is_allowed = torch.rand(4, N // 4, tokens, generator=draw) < 0.05
    is_allowed[..., 17] = is_allowed[0, :, 60:] = True
    is_allowed[1, :, 30:] = False  # some ranks have no allowed token there
    allowed = pack_allowed(is_allowed.flatten(0, 1)).view(4, N // 4, -1)
    temperature = torch.tensor([0.5, 1.0, 0.8, 2.0])
    shapings = (Shaping(top_k=5, min_p=0.01), Shaping(top_p=0.9))
    classes = Classes.of(torch.randint(0, 6, (tokens,), generator=draw), 5)
    is_seen = torch.rand(4, tokens, generator=draw) < 0.3
    penalty = Penalty(is_seen, torch.tensor([1.0, 1.5, 0.5, 2.0]), torch.arange(4).repeat_interleave(N // 4))

    def vocabulary(is_shared: bool, softcap: float | None) -> Vocabulary:
        made = Vocabulary(tokens, 8, softcap, IN_TORCH)
        made.table.data.copy_(table)
        if is_shared:
            split_vocabulary(made, mesh)
        return made

    for softcap in (30.0, None):
        one, other = vocabulary(True, softcap), vocabulary(False, softcap)
        found = []
        for each in (one, other):
            x = hidden.flatten(0, 1).clone().requires_grad_()
            losses = [
                each.cross_entropy(x, target),
                each.cross_entropy(x, target, observed, bonus),
            ]
            soft = each.soft_embedding(x.detach())
            terms = [*losses, soft * hidden.flatten(0, 1), each.embed(target)]
            torch.stack([term.sum() for term in terms]).sum().backward()
            assert x.grad is not None and each.table.grad is not None
            whole = each.table.grad.full_tensor() if isinstance(each.table.grad, DTensor) else each.table.grad
            values = {f"loss {n}": loss for n, loss in enumerate(losses)}
            values |= {"soft": soft, "hidden": x.grad, "table": whole, "logits": each.logits(hidden)}
            values["divergence"] = each.divergence(x.detach(), x.detach().flip(0))
            values |= {"soft of": each.soft_embedding_of(values["logits"]), "embed": each.embed(target)}
            scores, argmax = each.scores(x.detach(), target, observed, bonus)
            found.append((values | {"scores": scores}, argmax))
            for masks in (None, allowed):
                found[-1] += (each.stats(hidden, temperature, uniform, masks),)
            for shaping in shapings:
                found[-1] += (each.stats(hidden, temperature, uniform, allowed, shaping),)
            of_classes = each.class_stats(hidden, temperature, uniform, classes, penalty, 3)
            best = of_classes.argmax, of_classes.maximum - of_classes.log_sum
            found[-1] += (Stats(*(getattr(of_classes, name) for name in Stats._fields[:-2]), *best),)
        (values, argmax, *stats), (expected, expected_argmax, *expected_stats) = found
        assert_same(*({name: x.detach() for name, x in each.items()} for each in (values, expected)), 2e-6)
        assert torch.equal(argmax, expected_argmax)
        for a, b in zip(stats, expected_stats, strict=True):
            assert torch.equal(a.argmax, b.argmax) and torch.equal(a.sample, b.sample) and torch.equal(a.best, b.best)
            assert error(a.best_log_probability.exp(), b.best_log_probability.exp()) < 5e-6
            assert error(a.entropy, b.entropy) < 5e-6 and error(a.soft_embedding, b.soft_embedding) < 5e-6
            assert error(a.log_probability.exp(), b.log_probability.exp()) < 5e-6  # of what is not allowed 0


SAMPLED: dict[str, Callable[[], BlockDiffusionModel]] = {
    "diffusion_gemma": lambda: ours(oracle(tiny_config(canvas_length=L, **TWO_LAYERS))),
    **{name: partial(small_model, name) for name in ("minimax_m3", "minimax_m3 denoising")},
}


def answers(name: str, mesh: DeviceMesh | None) -> list[Result]:
    """Answers of a model, over a mesh or on one process; kv heads fewer than ranks are among them.

    A response is held to what may stand in it, one is drawn from few tokens, and causal models sample, too.
    """
    model = SAMPLED[name]()
    end, length = model.vocab_size - 1, model.canvas_length
    if mesh is not None:
        tensor_parallel(model, mesh)
    sampler = Sampler(model, None, Generation(max_steps=2, max_new_tokens=10, eos_ids=(end,)))
    requests = [Request(n, tokens=list(range(5, 9 + 3 * n)), scores=n == 0) for n in range(3)]
    requests.append(Request(3, tokens=[7, 8, 9], repetition_penalty=1.5, banned=[11, 40]))
    strategy = f"{'entropy_bound' if model.denoises else 'next_token'}:top_k=9"
    requests.append(Request(4, tokens=[9, 8], strategy=strategy))
    found = sampler.generate(requests, seed=4)
    assert length == model.canvas_length and all(result.error is None for result in found)
    return found


def capturable(ranks: Ranks, directory: Path) -> None:
    """In a step of two ranks that would be captured the host waits for nothing, and the answers are those of others."""
    model = ours(oracle(tiny_config(canvas_length=L, **TWO_LAYERS)))
    tensor_parallel(model, init_device_mesh("cpu", (ranks.world,)))
    span_attention.SMALL_SCORES = -1
    asked = [Request(n, tokens=list(range(5, 9 + 3 * n)), banned=[11] * (n > 2)) for n in range(6)]
    expected = Sampler(model, None, Generation(max_steps=6, max_new_tokens=10)).generate(asked, seed=4, batch_size=3)
    looker = Looker()
    engines.step_capture = lambda _: looker
    found = Sampler(model, None, Generation(max_steps=6, max_new_tokens=10)).generate(asked, seed=4, batch_size=3)
    assert [result.tokens for result in found] == [result.tokens for result in expected] and looker.captures > 2


def least_pages(ranks: Ranks, directory: Path) -> None:
    """Ranks whose devices have unequal memory free keep equally many pages, as the fullest device has room for."""
    model = ours(oracle(tiny_config(canvas_length=L, **TWO_LAYERS)))
    tensor_parallel(model, init_device_mesh("cpu", (ranks.world,)))
    pages = Pages(model, page_tokens=8, capacity=0)
    with patch.object(memory, "available_bytes", lambda _: (1 + ranks.rank) << 20):
        pages.grow(rows=2)
    counts = {name: pool.most for name, pool in pages.pools.items()}
    assert all(ranks.gather(count) == [count] * ranks.world for count in counts.values())
    assert min(counts.values()) > 0


def stopped_together(ranks: Ranks, mesh: DeviceMesh) -> None:
    """Where one rank alone is asked to stop, all leave an evaluation, and a sampling, after the same piece of work."""
    model = ours(oracle(tiny_config(canvas_length=L, **TWO_LAYERS)))
    tensor_parallel(model, mesh)
    objective = Objective(model, Linear(), UniformCorruption(V), 5)
    sampler = Sampler(model, character_tokenizer("ab"), Generation(max_steps=2, eos_ids=(1,)))
    prompts = [Row(f"f:{n}", prompt="ab" * n, response="b") for n in range(1, 4)]
    for measure in (
        lambda asked: heldout(objective, [batch_of(rows())] * 3, asked),
        lambda asked: sample_prompts(sampler, prompts, task("exact"), asked, batch_size=1),
    ):
        signals = chain([0], repeat(signal.SIGTERM if ranks.rank else 0))
        try:
            measure(replace(ranks, ranks_per_row=ranks.world, is_stopping=partial(next, signals)))
        except Interrupted:
            continue
        raise AssertionError("was not interrupted")


def sampled(ranks: Ranks, directory: Path, alone: Path) -> None:
    """Evaluation and sampling give the tokens of one process (`computed_alone`), and leave together."""
    mesh = init_device_mesh("cpu", (ranks.world,))
    if ranks.world == 2:
        stopped_together(ranks, mesh)
    expected = json.loads((alone / "sampled.json").read_text())
    for name in expected if ranks.world == 2 else ["minimax_m3 denoising"]:
        found = answers(name, mesh)
        for one, (tokens, steps, _) in zip(found, expected[name], strict=True):
            assert (list(one.tokens), one.steps) == (tokens, steps)
        assert abs(found[0].score - expected[name][0][2]) < 1e-5
