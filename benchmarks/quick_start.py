"""Part "start" of the quick run: the machine and its ceilings, kernels compiled ahead, layers compared with torch's.

All floors are computed by `Ceilings`, from the rates at which this device copies and multiplies.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import machine
from benchmarks.models import Size
from benchmarks.quick import ROOT
from benchmarks.quick_compile import Pool
from benchmarks.quick_figures import Figures
from blockdiff.kernels import Kernels, resolve
from blockdiff.models.family import Family
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.pages import Pages
from blockdiff.models.stored import frozen_weights, quantised_layers, store

COMPILING = 75.0  # seconds for the processes that compile
FACTOR = 2.0  # a step may take this multiple of its floor
CLOSE = 1.5  # our error may be this multiple of torch's in bf16


@dataclass(frozen=True)
class Ceilings:
    """The best rates of a device: bytes per second that a copy reads and writes, and operations of a bf16 product."""

    bytes_per_second: float
    operations_per_second: float

    @staticmethod
    def of(device: torch.device) -> Ceilings:
        """Measure a copy of 4 GB and a product of 8192 x 8192 x 8192; smaller ones on a CPU."""
        is_cuda = device.type == "cuda"
        size, count = (8192, 4 << 30) if is_cuda else (256, 1 << 24)
        source = torch.ones(count, dtype=torch.uint8, device=device)
        into = torch.empty_like(source)
        copied = _seconds(lambda: into.copy_(source), device)
        a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
        multiplied = _seconds(lambda: a @ b, device)
        return Ceilings(2 * count / copied, 2 * size**3 / multiplied)

    def floor_ms(self, nbytes: float, operations: float) -> float:
        """Return the least milliseconds for reading `nbytes` bytes, or for `operations` of products if that is more."""
        return 1e3 * max(nbytes / self.bytes_per_second, operations / self.operations_per_second)

    def pass_ms(self, model: BlockDiffusionModel, tokens: int, sweeps: int = 1, vocabulary: int = 2) -> float:
        """Return the floor of a pass over tokens: all weights are read, and multiplied with the tokens that use them.

        sweeps: how often the layers' weights are read and multiplied; vocabulary: how often the table is (logits, the
        signal). Attention is left out.
        """
        table, config = model.vocabulary.table, model.config
        tensors = [x for x in (*model.parameters(), *model.buffers()) if x.dim() > 1 and x is not table]
        nbytes, weights = sum(x.nbytes for x in tensors), 0.0
        shapes = [x.shape for x in model.parameters() if x.dim() > 1 and x is not table]
        for shape in [*shapes, *(module.held(name).shape for module, name in frozen_weights(model).values())]:
            is_experts = len(shape) == 3
            weights += math.prod(shape) * (config.experts_per_token / config.experts if is_experts else 1)
        of_table = vocabulary * table.numel()
        return self.floor_ms(sweeps * nbytes + vocabulary * table.nbytes, 2 * tokens * (sweeps * weights + of_table))


def _seconds(work: Any, device: torch.device, repeats: int = 8) -> float:
    """Return the fewest seconds of `repeats` runs."""
    found = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - begin)
    return min(found)


def ceilings_of(figures: Figures) -> Ceilings:
    """Return the ceilings, measured once per process."""
    if "ceilings" not in figures.kept:
        figures.kept["ceilings"] = Ceilings.of(figures.device)
        figures.free()
    ceilings: Ceilings = figures.kept["ceilings"]
    return ceilings


def config_of(preset: str, layers: int | None = None) -> Any:
    """Return the config of a preset without images.

    layers: their number, the last of which sees all tokens (None: all layers of the preset).
    """
    text: dict[str, Any] = {}
    if layers is not None:
        kinds = ["sliding_attention"] * (layers - 1) + ["full_attention"]
        text = dict(num_hidden_layers=layers, layer_types=kinds)
    return Size("", preset, rows=1, prompt=1, steps=(1, 2), text=text).config()


def random_model(
    config: Family, device: torch.device, quantize: str | None = None, kernels: str | Kernels = "auto"
) -> BlockDiffusionModel:
    """Return a model of a config with weights drawn on the device, in bf16 (on a CPU in fp32)."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with torch.device("meta" if quantize else device):
            model: BlockDiffusionModel = config.model_class(config, kernels=kernels)
        if quantize:
            store(model, quantised_layers(model, quantize))
            model = model.to_empty(device=device)
    finally:
        torch.set_default_dtype(default)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dtype in (torch.uint8, torch.float8_e4m3fn):
                tensor.view(torch.uint8).random_(0, 0x48)  # codes and block scales of finite numbers
            elif tensor.is_floating_point() and tensor.dim() > 1:
                tensor.normal_(std=0.02)
            elif tensor.is_floating_point() and quantize:
                tensor.fill_(1.0)
    return model.eval()


@torch.no_grad()
def calm(model: BlockDiffusionModel) -> None:
    """Give attention scores a deviation of 1, since sharp scores amplify every rounding. Fewer experts are chosen."""
    for name, weight in model.named_parameters():
        if name.endswith("q_norm.weight"):
            weight.fill_(len(weight) ** -0.5)


def released(figures: Figures, quantize: str | None = None) -> BlockDiffusionModel:
    """Return the model of the run's preset, made once per process."""
    name = f"{quantize} model" if quantize else "model"
    if name not in figures.kept:
        figures.kept[name] = random_model(config_of(figures.preset), figures.device, quantize)
    model: BlockDiffusionModel = figures.kept[name]
    return model


def start(figures: Figures) -> None:
    """Describe the machine and measure its ceilings; draw the model and compile kernels before any timing."""
    device, pool, updates = figures.device, None, None
    figures.make("machine", lambda: machine.describe(device))
    if figures.is_cuda and f"{figures.part}: kernels" not in figures.done:
        properties = torch.cuda.get_device_properties(device)
        pool = Pool(10 * properties.major + properties.minor, properties.multi_processor_count)
        # kernels of updates are compiled by updates of two layers, on the device
        words = ["-m", "benchmarks.quick_figures", "updates", "--layers", "2", "--preset", figures.preset]
        words += ["--rows", "2"]
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        updates = subprocess.Popen([sys.executable, *words], cwd=ROOT, **quiet)  # type: ignore[call-overload]

    def ceilings() -> dict[str, Any]:
        found = ceilings_of(figures)
        return dict(copy_gb_s=found.bytes_per_second / 1e9, product_tflop_s=found.operations_per_second / 1e12)

    def made() -> dict[str, Any]:
        model = released(figures)
        nbytes = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
        return dict(gib=nbytes / 2**30, floor_ms_of_a_step=ceilings_of(figures).pass_ms(model, model.canvas_length))

    def compiled() -> dict[str, Any]:
        if pool is None or updates is None:
            return dict(found="there is no GPU to compile for")
        line, begin = pool.wait(COMPILING), time.monotonic()
        try:
            updates.wait(max(1.0, COMPILING - (begin - pool.begin)))
            return line | dict(updates_code=updates.returncode)
        except subprocess.TimeoutExpired:
            return line | dict(updates_code="ended")
        finally:
            updates.kill()
            updates.wait()

    figures.make("ceilings", ceilings)
    figures.make("model", made)
    figures.make("kernels", compiled, limit=2 * COMPILING + 30)
    for tokens in (40, 600):  # enough that a few differently chosen experts do not decide
        figures.make(f"two layers, a prefix of {tokens}", lambda tokens=tokens: close_to_torch(figures, tokens))  # type: ignore[misc]
        figures.free()


@torch.no_grad()
def close_to_torch(figures: Figures, tokens: int) -> dict[str, Any]:
    """Compare two layers at the released shapes with torch's; return both errors.

    Ours and torch's in the same dtype are compared with torch in fp32. A prefix is encoded into pages, and two canvases
    are denoised after it.
    """
    device = figures.device
    model = random_model(config_of(figures.preset, 2), device)
    calm(model)
    for name, each in model.named_parameters():  # so that routers choose
        if each.dim() > 1:
            each.mul_(1.0 if "table" in name else 50 * each.shape[-1] ** -0.5)
    mine = model.kernels
    L, draws = model.canvas_length, torch.Generator().manual_seed(0)
    prefix, canvas = (torch.randint(3, model.vocab_size, (2, n), generator=draws) for n in (tokens, L))
    signal = 0.02 * torch.randn(2, L, model.vocabulary.table.shape[1], generator=draws)

    def hidden(kernels: Kernels, dtype: torch.dtype) -> list[torch.Tensor]:
        of = model.to(dtype)
        for module in of.modules():
            if isinstance(getattr(module, "kernels", None), Kernels):
                module.kernels = kernels  # type: ignore[assignment]
        pages = Pages(of, capacity=4 * (tokens + 2 * L + 128))
        rows = [pages.open() for _ in range(2)]
        encoded = pages.encode(rows, prefix, [tokens] * 2)
        denoised = pages.denoise(rows, canvas.to(device), signal.to(device, dtype))
        return [encoded.float(), denoised.float()]

    half = model.dtype
    ours, torchs = hidden(mine, half), hidden(resolve("torch"), half)
    truth = hidden(resolve("torch"), torch.float32)
    line, shorts = dict[str, Any](), []
    for name, x, y, exact in zip(("encoded", "denoised"), ours, torchs, truth, strict=True):
        errors = [float((each - exact).norm() / exact.norm()) for each in (x, y)]
        line |= {f"{name}_error": errors[0], f"{name}_error_of_torch": errors[1]}
        if not errors[0] <= CLOSE * errors[1] + 1e-5:
            shorts.append(f"{name}: {errors[0]:.2g} from fp32, torch {errors[1]:.2g}")
    return line | dict(short="; ".join(shorts))
