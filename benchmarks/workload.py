"""The quickstart's test puzzles, prompts to texts: our `generate` in batches of 100, transformers' at its best size.

The model is runs/quickstart/model, or one trained by the same recipe into runs/workload. Both sides draw different
noise, so the shares of solved puzzles are compared: of puzzles with one solution, and of the same puzzles without a
given that tells two solutions apart. OMP_WAIT_POLICY (whether idle threads of OpenMP spin or sleep) changes the ratio,
so lines name it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from transformers import DiffusionGemmaForBlockDiffusion

import blockdiff
from benchmarks.attempts import attempt
from benchmarks.models import Size
from benchmarks.peer import EXPERTS
from benchmarks.result import Agreement, Result
from benchmarks.sampling_peer import Peer
from benchmarks.settings import Settings
from benchmarks.timing import contenders, interleaved, once, probe
from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.recipes import sudoku
from blockdiff.sampling import Request, Sampler

SUITE = "workload"
BATCH, PEER_BATCHES = 100, (32, 100, 250, 1000)
COUNT, PUZZLES = 1000, 60_000  # numbers of test puzzles and of training puzzles
BOUND = 0.05  # largest difference between the shares of solved puzzles
RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "quickstart.yaml"


def run(sizes: list[Size], settings: Settings, done: Callable[[Result], object]) -> None:
    """Measure both kinds of puzzles, if `sizes` have `quickstart` and on a CPU."""
    if settings.device.type != "cpu" or "quickstart" not in [size.name for size in sizes]:
        return
    with attempt(SUITE):
        model = trained(Path("runs/quickstart"), Path("runs/workload"))
        prompts = [row["prompt"] for row in sudoku.make_splits(4, {"train": PUZZLES, "test": COUNT})["test"]]
        policy = os.environ.get("OMP_WAIT_POLICY", "not set")
        for kind, some in (
            ("one solution", prompts),
            ("two solutions", ambiguous(prompts)),
        ):
            case = f"{len(some)} puzzles with {kind}, OMP_WAIT_POLICY {policy}, {torch.get_num_threads()} threads"
            done(measure(model, some, case, settings))


def ambiguous(prompts: Iterable[str]) -> list[str]:
    """Return prompts blanked at the first given without which they have two solutions.

    Prompts without such a given are dropped.
    """
    found = []
    for prompt in prompts:
        for place in range(16):
            cells = prompt[:place] + "." + prompt[place + 1 : 16]
            numbers = tuple(int(cell) if cell.isdigit() else 0 for cell in cells)
            if prompt[place] != "." and len(list(sudoku.solutions(numbers))) == 2:
                found.append(cells + "=")
                break
    return found


def trained(run: Path, own: Path) -> Path:
    """Return the directory of a run's model; if there is none, train one into `own`, once."""
    if (run / "model").exists():
        return run / "model"
    if not (own / "model").exists():
        data = own / "data"
        sudoku.write_splits(data, 4, {"train": PUZZLES, "test": COUNT})
        files = {"train": data / "train.jsonl", "heldout": data / "test.jsonl"}
        overrides = [f"data.{name}={path}" for name, path in files.items()]
        blockdiff.train(RECIPE, [*overrides, f"model.tokenizer={data / 'tokenizer'}"], own, resume=True)
    return own / "model"


def measure(
    model: Path, prompts: Sequence[str], case: str, settings: Settings, batches: Sequence[int] = PEER_BATCHES
) -> Result:
    """Compare the shares solved, then time both sides in turns, from prompts as texts to answers as texts."""
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    ours = blockdiff.load(model, dtype="float32", device="cpu", kernels=settings.kernels).eval()
    theirs = DiffusionGemmaForBlockDiffusion.from_pretrained(model, dtype=torch.float32).eval()
    sampler = Sampler(ours, tokenizer)
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]

    def ours_once() -> list[str]:
        return [result.text for result in Sampler(ours, tokenizer).generate(prompts, batch_size=BATCH)]

    def theirs_once(batch: int, experts: str) -> list[str]:
        peer = Peer(theirs, sampler.generation, experts=experts)
        tokens = tokenizer(list(prompts), add_special_tokens=False)["input_ids"]
        requests = [Request(n, tokens=begin + its) for n, its in enumerate(tokens)]
        answers = peer.answer(requests, batch)
        return tokenizer.batch_decode([answers[n][0] for n in range(len(prompts))], skip_special_tokens=True)

    def solved(texts: Sequence[str]) -> float:
        return sum(map(sudoku.is_solved, prompts, texts)) / len(prompts)

    torch.manual_seed(0)
    shares = solved(ours_once()), solved(theirs_once(BATCH, EXPERTS[0]))
    agreement = Agreement({f"solved {shares[0]:.1%} and {shares[1]:.1%}": (abs(shares[0] - shares[1]), BOUND)})
    if not agreement.is_met:
        return Result(SUITE, "quickstart", case, agreement)
    variants = {
        f"batch {batch}, {experts}": once(lambda b=batch, e=experts: theirs_once(b, e), settings.device)  # type: ignore[misc]
        for batch in dict.fromkeys(min(batch, len(prompts)) for batch in batches)
        for experts in EXPERTS
    }
    probed = probe(variants, tries=1)
    timed = {name: variants[name] for name in contenders(probed)}
    times = interleaved({"ours": once(ours_once, settings.device), **timed}, settings.repeats, warmup=0)
    mine = times.pop("ours")
    return Result(SUITE, "quickstart", case, agreement, mine, times, probed)
