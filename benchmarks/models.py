"""The sizes that are measured, and both models with the same weights.

The weights are roughly those at the start of training. All scales are moved away from 1, so that a mistake in one
shows, and all values are large enough that neither model ever computes with denormals.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

from blockdiff.models.diffusion_gemma import DiffusionGemma, DiffusionGemmaFamily
from blockdiff.models.diffusion_gemma.names import NAMES
from tests.support.presets import changed_preset

GIB = 2**30
T = TypeVar("T")
# Two fp32 implementations give a token's router scores (of unit size) up to 5e-6 apart. If the last chosen expert and
# the first rejected one are nearer than that, each side may choose another, and everything after it differs.
MARGIN, TRIES = 1.5e-5, 100


@dataclass(frozen=True)
class Size:
    """A model, and the rows on which it is measured.

    preset: in recipes/presets; text: changes of its text config; rows x (prompt + canvas) tokens make a training batch;
    steps: (fewer, more) denoising steps whose difference is timed.
    """

    name: str
    preset: str
    rows: int
    prompt: int
    steps: tuple[int, int]
    text: dict[str, Any] = field(default_factory=dict)

    def config(self) -> DiffusionGemmaFamily:
        """Return the config of this size."""
        return changed_preset(self.preset, self.text)


class Pair(NamedTuple):
    """Our model and the peer's (transformers'), with equal weights in separate memory."""

    ours: DiffusionGemma
    peer: DiffusionGemmaForBlockDiffusion

    def peer_parameter(self, name: str) -> Tensor:
        """Return the peer's parameter that corresponds to our parameter `name`."""
        return self.peer.get_parameter(NAMES.to_hub(name))


def sizes(device: torch.device) -> dict[str, Size]:
    """Return by name the sizes worth measuring on a device.

    The windows of the small presets are widened beyond the rows: only then can transformers encode a whole row once and
    crop its cache to the prompt. A GPU with enough memory also gets some layers of the released model.
    """
    listed = [
        Size("quickstart", "sudoku4", rows=64, prompt=18, steps=(4, 36), text=dict(sliding_window=128)),
        Size("15m", "15m", rows=4, prompt=128, steps=(2, 10), text=dict(sliding_window=512)),
    ]
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory / GIB
        # two models with gradients, and for a while fp32 copies of them, take about 20 GiB a layer
        layers, rows = (3, 2) if room > 120 else (2, 1) if room > 70 else (0, 0)
        if layers:
            kinds = ["sliding_attention"] * (layers - 1) + ["full_attention"]
            text = dict(num_hidden_layers=layers, layer_types=kinds)
            released = "diffusiongemma-26b-a4b"
            listed.append(Size("released", released, rows=rows, prompt=3840, steps=(4, 20), text=text))
    return {size.name: size for size in listed}


def pair(
    size: Size,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    kernels: str = "auto",
) -> Pair:
    """Return both models of a size, in training mode."""
    config = size.config()
    with torch.device(device):
        peer = DiffusionGemmaForBlockDiffusion(DiffusionGemmaConfig(**config.to_dict()))
    peer.set_attn_implementation("sdpa")
    for module in (peer.model.decoder.embed_tokens, peer.model.encoder.get_input_embeddings()):
        # transformers gives pad no gradient as an input, not even if it is noise; we do. Here neither does.
        module.padding_idx = None
    _draw(peer, torch.Generator(device).manual_seed(seed))
    _cast(peer, dtype)
    with torch.device("meta"):
        ours = DiffusionGemma(config, kernels=kernels)
    state = peer.state_dict()
    weights = {name: state[NAMES.to_hub(name)].detach().clone() for name in ours.state_dict()}
    ours.load_state_dict(weights, assign=True)
    return Pair(ours.train(), peer.train())


def in_fp32(peer: DiffusionGemmaForBlockDiffusion) -> DiffusionGemmaForBlockDiffusion:
    """Return a copy of the peer that computes in fp32 with the same (rounded) weights: the truth for bf16."""
    reference = copy.deepcopy(peer)
    reference.zero_grad(set_to_none=True)
    _cast(reference, torch.float32)
    return reference


def with_wide_margins(model: DiffusionGemma, draw: Callable[[int], T], run: Callable[[T], object]) -> T:
    """Return `draw(seed)` for the first seed (1, 2, ...) with which no router is close to a tie in `run`."""
    for seed in range(1, TRIES):
        drawn = draw(seed)
        if router_margin(model, lambda drawn=drawn: run(drawn)) >= MARGIN:  # type: ignore[misc]
            return drawn
    raise RuntimeError(f"router margins stay below {MARGIN} with {TRIES} seeds: fewer tokens are needed")


@torch.no_grad()
def router_margin(model: DiffusionGemma, run: Callable[[], object]) -> float:
    """Return the smallest distance between the last chosen and the first rejected expert, over all routers in `run`."""
    margins: list[float] = []

    def measure(router: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
        scores = F.linear(inputs[0].double(), (router.proj.weight * (router.scale * router.root)).double())
        best = scores.topk(router.top_k + 1, -1).values
        margins.append(float((best[..., -2] - best[..., -1]).min()))

    hooks = [layer.router.register_forward_hook(measure) for layer in model.layers]  # type: ignore[union-attr]
    run()
    for hook in hooks:
        hook.remove()
    return min(margins)


def _cast(model: DiffusionGemmaForBlockDiffusion, dtype: torch.dtype) -> None:
    """Cast the tensors that a checkpoint has; `.to()` would round the RoPE frequencies too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.data = buffer.data.to(dtype)


@torch.no_grad()
def _draw(model: DiffusionGemmaForBlockDiffusion, draw: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        if "vision" in name:
            continue
        if parameter.dim() < 2:  # norms and scales
            parameter.uniform_(0.7, 1.3, generator=draw)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                # attention scores of unit size, as in a trained model; else every rounding is amplified
                parameter.mul_(parameter.shape[0] ** -0.25)
        else:
            # a router multiplies unit vectors: scores of unit size, and distances comparable with `MARGIN`
            std = 1.0 if name.endswith("router.proj.weight") else 0.5 * parameter.shape[-1] ** -0.5
            parameter.normal_(0.0, std, generator=draw)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.8, 1.2, generator=draw)
