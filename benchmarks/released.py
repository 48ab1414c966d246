"""The released checkpoint on this machine, beside transformers: `python -m benchmarks.released MODEL`.

A table says of the checkpoint which tensors it has against those that transformers' class has, how far our logits are
from transformers' on fixed inputs, what a sampling gives, and what memory that takes; the exit code is 1 where a check
fails. The two models are loaded one after the other. Without MODEL a model of the released shape is drawn, with two
layers and a small vocabulary, and goes through the same checks.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import machine
from benchmarks.models import Size
from blockdiff import checkpoint
from blockdiff.checkpoint.files import find, stored_tensors
from blockdiff.checkpoint.read import resolve_dtype
from blockdiff.devices import resolve_device
from blockdiff.errors import BlockdiffError
from blockdiff.memory import size
from blockdiff.models.family import Family
from blockdiff.sampling import Generation, Request, Sampler
from blockdiff.training.plan.sampling import plan_sampling
from tests.support.peaks import peak_memory

PROMPT = 64  # tokens of the fixed inputs
# How far logits may be apart on average, as a share of their spread: rounding, and in bf16 also changed experts.
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class Check:
    """A line of the table; is_met: None if the line only informs."""

    name: str
    found: str
    is_met: bool | None = None


def drawn(directory: Path, preset: str, layers: int, vocabulary: int, experts: int | None, dtype: torch.dtype) -> Path:
    """Write a checkpoint of a preset's shape with fewer layers, the last with full attention, and random weights."""
    text: dict[str, Any] = {"num_hidden_layers": layers, "eos_token_id": 1}
    text["layer_types"] = ["sliding_attention"] * (layers - 1) + ["full_attention"]
    text |= {"num_experts": experts} if experts else {}
    config: Family = Size("drawn", preset, rows=1, prompt=PROMPT, steps=(1, 2), text=text).config()
    special = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    config = config.with_tokens(vocabulary, special)
    model = checkpoint.init(config, dtype=dtype, device="cpu")
    return checkpoint.save(model, directory / "drawn")


def of_tensors(directory: Path, config: Family) -> list[Check]:
    """Compare the tensors of the files with the parameters and buffers of transformers' class, by name and shape."""
    import transformers

    with torch.device("meta"):
        theirs = getattr(transformers, config.architecture)(transformers.AutoConfig.from_pretrained(directory))
    needed = {name: tuple(x.shape) for name, x in theirs.state_dict().items()}
    stored = {name: tuple(place.shape) for name, place in stored_tensors(directory).items()}
    ties = [name for name in needed if (end := config.names.tied_to(name)) is not None and end in stored]
    missing = sorted(needed.keys() - stored.keys() - set(ties))
    unknown = sorted(stored.keys() - needed.keys())
    wrong = sorted(name for name in needed.keys() & stored.keys() if needed[name] != stored[name])
    numbers = sum(torch.Size(shape).numel() for shape in stored.values())
    checks = [Check("tensors stored", f"{len(stored):,}, {numbers:,} numbers")]
    for title, names in (("missing", missing), ("not known", unknown), ("of another shape", wrong)):
        found = f"{len(names)}: {', '.join(names[:3])}" if names else "0"
        checks.append(Check(f"tensors {title}", found, not names))
    return checks


def inputs(vocab_size: int, canvas_length: int) -> tuple[Tensor, Tensor]:
    """Return fixed tokens of a prompt [1, S] and of a canvas [1, L]."""
    draw = torch.Generator().manual_seed(0)
    high = min(vocab_size, 100_000)
    return tuple(torch.randint(3, high, (1, n), generator=draw) for n in (PROMPT, canvas_length))  # type: ignore[return-value]


@torch.no_grad()
def our_logits(model: Any, prompt_BS: Tensor, canvas_BL: Tensor) -> Tensor:
    """Return our logits fp32 [1, L, V] on the host, from a denoise without a signal."""
    prefix = model.encode(prompt_BS.to(model.device))
    return model.unembed(model.denoise(canvas_BL.to(model.device), prefix)).float().cpu()


@torch.no_grad()
def their_logits(directory: Path, config: Family, dtype: torch.dtype, device: torch.device, inputs: Any) -> Tensor:
    """Return transformers' logits for the inputs of `our_logits`."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    kind = getattr(transformers, config.architecture)
    model = kind.from_pretrained(directory, dtype=dtype, device_map=str(device)).eval()
    prompt_BS, canvas_BL = (x.to(device) for x in inputs)
    return model(input_ids=prompt_BS, decoder_input_ids=canvas_BL).logits.float().cpu()


def of_logits(ours_BLV: Tensor, theirs_BLV: Tensor, dtype: torch.dtype) -> list[Check]:
    """Check the distance of two sets of logits."""
    apart = (ours_BLV - theirs_BLV).abs().mean() / theirs_BLV.std()
    agree = (ours_BLV.argmax(-1) == theirs_BLV.argmax(-1)).float().mean()
    bound = BOUNDS[dtype]
    return [
        Check("logits: mean difference / spread", f"{float(apart):.2e}, at most {bound:g}", bool(apart <= bound)),
        Check("logits: same argmax", f"{float(agree):.1%}"),
    ]


def of_sampling(model: Any, prompt_BS: Tensor) -> list[Check]:
    """Sample a canvas, and check its memory in addition to the weights against the plan."""
    sampler = Sampler(model, None, Generation(max_new_tokens=model.canvas_length, max_steps=16))
    answers: list[Any] = []

    def work() -> None:
        answers.extend(sampler.generate([Request("fixed", tokens=prompt_BS[0].tolist())], seed=0))

    began = time.perf_counter()
    peak = peak_memory(work, model.device)
    seconds = (time.perf_counter() - began) / len(answers)
    steps, tokens = sum(answers[-1].steps), len(answers[-1].tokens)
    weights = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    device = "cuda" if model.device.type == "cuda" else "cpu"
    plan = plan_sampling(model.config, model.dtype, device)
    return [
        Check("sampling", f"{tokens} tokens in {steps} steps, {seconds:.2f} s", 0 < steps <= 16),
        Check("the same tokens twice", "yes" if answers[0].tokens == answers[-1].tokens else "no"),
        Check("weights", size(weights), weights == plan.weights),
        Check("peak beside them", f"{size(peak)}, planned {size(plan.step[0])} and a cache of {size(plan.cache)}"),
    ]


def checked(directory: Path, dtype: torch.dtype, device: torch.device) -> list[Check]:
    """Return all checks of a checkpoint."""
    config = checkpoint.read_config(directory)
    checks = of_tensors(directory, config)
    model: Any = checkpoint.load(directory, dtype=dtype, device=device)
    drawn_inputs = inputs(model.vocab_size, model.canvas_length)
    ours = our_logits(model, *drawn_inputs)
    checks += of_sampling(model, drawn_inputs[0])
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return checks + of_logits(ours, their_logits(directory, config, dtype, device, drawn_inputs), dtype)


def main(arguments: list[str] | None = None) -> int:
    """Check and print; the exit code is 1 if a check fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.released", description=str(__doc__).split("\n")[0])
    parser.add_argument("model", nargs="?", help="a checkpoint directory or hub id; without it one is drawn")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--preset", default="diffusiongemma-26b-a4b", help="the shape of the drawn model")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--experts", type=int, help="fewer experts, where memory is scarce")
    o = parser.parse_args(arguments)
    dtype, device = resolve_dtype(o.dtype), resolve_device(o.device)
    with tempfile.TemporaryDirectory() as folder:
        try:
            if o.model is None:
                directory = drawn(Path(folder), o.preset, o.layers, o.vocabulary, o.experts, dtype)
            else:
                directory = find(o.model)
            checks = checked(directory, dtype, device)
        except BlockdiffError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    what = o.model or f"{o.preset} with {o.layers} layers, drawn"
    print(f"{what}, {o.dtype}, {machine.name(device)}")
    for check in checks:
        verdict = {None: "", True: "ok", False: "FAILED"}[check.is_met]
        print(f"  {check.name:34} {check.found:60} {verdict}".rstrip())
    return 0 if all(check.is_met is not False for check in checks) else 1


if __name__ == "__main__":
    raise SystemExit(main())
