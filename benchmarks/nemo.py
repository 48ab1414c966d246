"""A training step beside NeMo AutoModel's DiffusionGemma, which lays all canvases of a row out and masks between them.

    python -m benchmarks.nemo --sizes quickstart,15m --repeats 5

Encode, pass one, pass two, both losses and the backward pass on rows with four canvases, all of them scored. Losses and
gradients are compared before anything is timed; the exit code is 1 if they differ. Without NeMo it says so and exits
with 0. `pip install --no-deps nemo_automodel==0.7.0` is enough on a CPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import math
import sys
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import machine
from benchmarks.models import Pair, Size, pair, sizes
from benchmarks.result import Agreement, Result, table
from benchmarks.timing import interleaved, once
from benchmarks.training_step import GRADIENT_BOUND, LOSS_BOUND, gradient_step, loss_error, rows_of
from blockdiff.canvas import Batch
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear
from blockdiff.models.diffusion_gemma.names import NAMES
from blockdiff.objective import Objective
from blockdiff.terminal import quiet
from tests.support.peaks import peak_memory

PACKAGE, VERSION = "nemo_automodel", "0.7.0"
CANVASES = 4
ROWS = {"quickstart": (16, 18), "15m": (4, 64)}  # rows and tokens of a prompt


def nemo_model(models: Pair) -> nn.Module:
    """Return NeMo's model with the weights of both others; its routing is trained as theirs is.

    NeMo folds the scale per expert into the experts and has one scalar per layer: both are made equal first.
    """
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.diffusion_gemma.model import DiffusionGemmaForBlockDiffusion

    class OnCPU(DiffusionGemmaForBlockDiffusion):
        def _grouped_mm_can_dispatch(self) -> bool:
            return True

    config = type(models.peer.config)(**models.peer.config.to_dict())
    config._experts_implementation = "eager"
    backend = BackendConfig(attn="sdpa", linear="torch", experts="torch", dispatcher="torch")
    model = OnCPU(config, backend=backend, freeze_router=False)
    model.initialize_weights(buffer_device=torch.device("cpu"), dtype=torch.float32)
    model.state_dict_adapter.dtype = torch.float32
    state = {name: x for name, x in models.peer.state_dict().items() if "vision" not in name}
    model.load_state_dict(model.state_dict_adapter.from_hf(dict(state)), strict=False)
    return model.train()


def equalise(models: Pair) -> None:
    """Reduce both of our models to what NeMo can represent.

    Scales per expert become 1, and both passes of a layer share one scalar.
    """
    with torch.no_grad():
        for name, value in models.ours.state_dict(keep_vars=True).items():
            if name.endswith("per_expert_scale"):
                value.fill_(1.0)
            if name.endswith("encoder_scalar"):
                value.copy_(models.ours.state_dict()[name.replace("encoder_scalar", "decoder_scalar")])
        theirs = models.peer.state_dict(keep_vars=True)
        for name, value in models.ours.state_dict().items():
            theirs[NAMES.to_hub(name)].copy_(value)


class Step:
    """NeMo's forward of the objective: `step() -> (canvas loss, AR loss)`; its masks are made before any timing."""

    def __init__(self, model: Any, batch: Batch, noisy_BCL: Tensor, window: int):
        from nemo_automodel.components.models.diffusion_gemma.attention_mask import build_block_diffusion_training_mask

        self.model, self.batch = model, batch
        B, C, L = noisy_BCL.shape
        start = int(batch.start_BC[0, 0])
        full, sliding = build_block_diffusion_training_mask(
            start, C * L, batch.tokens_BS.shape[1], L, sliding_window=window, batch_size=B, dtype=torch.float32
        )
        self.inputs = dict(
            input_ids=batch.tokens_BS,
            canvas_ids=noisy_BCL.flatten(1),
            decoder_position_ids=(start + torch.arange(C * L)).expand(B, -1),
            decoder_attention_mask={"full_attention": full, "sliding_attention": sliding},
            do_self_conditioning=batch.coin_BC[:, 0],
        )

    def __call__(self) -> tuple[Tensor, Tensor]:
        out = self.model(**self.inputs)
        canvas = F.cross_entropy(out.logits.flatten(0, 1), self.batch.canvas_BCL.flatten())
        ar = F.cross_entropy(out.encoder_logits[:, :-1].flatten(0, 1), self.batch.tokens_BS[:, 1:].flatten())
        return canvas, ar


def gradient_error(models: Pair, model: Any) -> float:
    """Return the distance of our gradients from NeMo's, all as one vector.

    Parameters that NeMo does not train are left out.
    """
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    theirs = model.state_dict_adapter.to_hf(grads)
    squared_error = squared_norm = 0.0
    for name, parameter in models.ours.named_parameters():
        truth = theirs.get(NAMES.to_hub(name))
        if name.endswith("per_expert_scale"):
            continue  # folded into the experts
        assert truth is not None and parameter.grad is not None
        ours = parameter.grad.clone()
        if name == "vocabulary.table":
            ours[0] = truth[0]  # of pad, which gets no gradient as an input there
        squared_error += float((ours - truth).norm()) ** 2
        squared_norm += float(truth.norm()) ** 2
    return math.sqrt(squared_error / squared_norm)


def measure(size: Size, repeats: int) -> Result:
    """Compare, then time in turns, then trace the memory; return the line."""
    device = torch.device("cpu")
    rows, prompt = ROWS[size.name]
    size = replace(size, rows=rows, prompt=prompt)
    models = pair(size, device)
    equalise(models)
    theirs = nemo_model(models)
    vocabulary, L = models.ours.vocab_size, models.ours.canvas_length
    objective = Objective(models.ours, Linear(), UniformCorruption(vocabulary), seed=0, sweep=True)
    batch = rows_of(size, vocabulary, L, CANVASES)
    alpha_BC = objective.schedule.alpha(batch.t_BC)
    noisy_BCL, _ = objective.corruption.corrupt(batch.canvas_BCL, alpha_BC, batch.address_BC3, objective.seed)

    def losses() -> tuple[Tensor, Tensor]:
        sums = objective(batch)
        return sums["canvas"] / batch.canvas_count(), sums["ar"] / batch.ar_count()

    step = Step(theirs, batch, noisy_BCL, models.peer.config.text_config.sliding_window)
    ours = gradient_step(models.ours, losses, nullcontext(), None)
    peer = gradient_step(theirs, step, nullcontext(), None)
    error = loss_error(ours(), peer())
    of_gradients = gradient_error(models, theirs)
    agreement = Agreement({"losses": (error, LOSS_BOUND), "gradients": (of_gradients, GRADIENT_BOUND)})
    case = f"fp32, {rows} rows of {prompt} + {CANVASES} x {L}, all scored"
    result = Result("training step, NeMo", size.name, case, agreement)
    if not agreement.is_met:
        return result
    times = interleaved({"ours": once(ours, device), PACKAGE: once(peer, device)}, repeats)
    memory = tuple(peak_memory(work, device, m.zero_grad) for work, m in ((ours, models.ours), (peer, theirs)))
    return replace(result, ours=times["ours"], peers={PACKAGE: times[PACKAGE]}, memory=(memory[0], memory[1]))


def main(words: list[str] | None = None) -> int:
    """Measure and print; return 1 if anything disagrees, else 0 (also if NeMo is not installed)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nemo", description=__doc__)
    parser.add_argument("--sizes", default=",".join(ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="FILE.json; the table goes beside it")
    options = parser.parse_args(words)
    if importlib.util.find_spec(PACKAGE) is None:
        print(f"{PACKAGE} is not installed: nothing is measured (pip install --no-deps {PACKAGE}=={VERSION})")
        return 0
    quiet()
    warnings.filterwarnings("ignore")
    device = torch.device("cpu")
    known = sizes(device)
    results = [measure(known[name], options.repeats) for name in options.sizes.split(",")]
    record = machine.describe(device)
    record["versions"][PACKAGE] = importlib.metadata.version(PACKAGE)
    report = f"{machine.heading(record, options.repeats)}\n\n{table(results, PACKAGE)}\n"
    print(report)
    if options.output is not None:
        contents = {"machine": record, "repeats": options.repeats, "results": [line.to_record() for line in results]}
        machine.write(options.output, contents, report)
    return 0 if all(result.agreement.is_met for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
