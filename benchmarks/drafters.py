"""Drafters: what they gain over next tokens one by one, on addition with its working and on arithmetic in sentences.

    python -m benchmarks.drafters runs/drafters --output FILE.json

Targets and drafters that the directory lacks are trained there first, by recipes/word_problems.yaml and
recipes/drafter_cpu.yaml, each drafter on answers of its target to rows of the training split; addition has the same
recipes with its own rows and characters. A training that was stopped goes on. Then every way answers the same test
prompts greedily, in turns, at batch 1 and 8, and its tokens must be those of next-token sampling. Beside the times
stand tokens a round and the share of repeated 8-grams in the texts, which makes drafting easy.

With the reference package (`pip install --no-deps dflash==0.1.0`) its generation with the same weights is timed, too,
and our oracle (tests/oracles/dflash.py) is held to it: hidden states of 20 random drafters in fp64 within 1e-10, and
the tokens of their greedy rounds. With speculators (`pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0
loguru`) the oracle of EAGLE3 heads (tests/oracles/eagle3.py) is held to its model: the logits of 10 random heads over
three passes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import blockdiff
from benchmarks import machine
from blockdiff.data.tokenizer import character_tokenizer, write_tokenizer
from blockdiff.recipes import addition, word_problems
from blockdiff.sampling import Request, Result, Sampler
from blockdiff.training.recipe_files import read_recipe

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
MASK = "_"  # of addition, whose characters use every row of the embedding
ROWS, REPEATS, LONGEST = 6000, 3, 160
BLOCK, LAYERS = 8, 2
WAYS = {  # by name: strategy, and whether the drafter is loaded
    "next_token": ("next_token", False),
    "drafted": ("speculative", True),
    "drafted, whole blocks": (f"speculative:block={BLOCK}", True),
}


def command(*words: object) -> None:
    """Run `blockdiff` in a separate process."""
    subprocess.run([sys.executable, "-m", "blockdiff", *map(str, words)], check=True)


def write_rows(task: str, to: Path) -> None:
    """Write the rows and the tokenizer of a task."""
    counts = {"train": 20_000, "test": 300}
    if task == "prose":
        word_problems.write_splits(to, counts)
        return
    addition.write_splits(to, counts)
    write_tokenizer(character_tokenizer(addition.ALPHABET + MASK), to / "tokenizer")


def trained(task: str, to: Path, seed: int) -> tuple[Path, Path]:
    """Return the directories of a target and its drafter; train them if they are missing."""
    if not (to / "tokenizer").exists():
        write_rows(task, to)
    target, drafter = to / "target" / "model", to / f"drafter-{seed}" / "model"
    if not target.exists():
        own = [f"data.train={to}/train.jsonl", f"data.heldout={to}/test.jsonl", f"model.tokenizer={to}/tokenizer"]
        blockdiff.train(RECIPES / "word_problems.yaml", own, target.parent, resume=True)
    for name, source, count in (("rows", "train", ROWS), ("heldout_rows", "test", 200)) if not drafter.exists() else ():
        prompts = to / f"{name}.prompts.jsonl"
        prompts.write_text("".join((to / f"{source}.jsonl").read_text().splitlines(keepends=True)[:count]))
        options = ("--max-new-tokens", LONGEST, "--batch-size", 64, "--output", to / f"{name}.jsonl")
        command("sample", target, "--prompts", prompts, "--as-rows", *options)
    if not drafter.exists():
        draft = to / f"draft-{seed}"
        if not draft.exists():
            named = ("--mask-token", MASK) if task == "addition" else ()
            shape = ("--layers", LAYERS, "--block", BLOCK, "--seed", seed, "--output", draft)
            command("init", "--drafter-for", target, *named, *shape)
        own = [f"data.train={to}/rows.jsonl", f"data.heldout={to}/heldout_rows.jsonl", f"seed={seed}"]
        own += [f"model.path={draft}", f"objective.target={target}"]
        blockdiff.train(read_recipe(RECIPES / "drafter_cpu.yaml", own), output=drafter.parent, resume=True)
    return target, drafter


def repeated(texts: list[list[int]], n: int = 8) -> float:
    """Return the share of n-grams of tokens that occurred before in the same text."""
    total = again = 0
    for tokens in texts:
        seen = set[tuple[int, ...]]()
        for at in range(len(tokens) - n + 1):
            gram = tuple(tokens[at : at + n])
            again += gram in seen
            total += 1
            seen.add(gram)
    return again / max(1, total)


def measure(target: Path, drafter: Path, prompts: list[str], batch_size: int) -> dict[str, Any]:
    """Time every way over the same prompts, in turns; report the best repeat.

    Returns `ways` (tokens per second, tokens per round, and texts that differ from next-token sampling, by way), the
    share of repeated 8-grams, and the mean tokens of an answer.
    """
    samplers = {
        name: Sampler.from_pretrained(target, strategy=strategy, draft_model=drafter if has_drafter else None)
        for name, (strategy, has_drafter) in WAYS.items()
    }
    requests = [Request(n, prompt=text, max_new_tokens=LONGEST) for n, text in enumerate(prompts)]
    seconds: dict[str, list[float]] = {name: [] for name in samplers}
    results: dict[str, list[Result]] = {}
    for _ in range(REPEATS + 1):
        for name, sampler in samplers.items():
            began = time.perf_counter()
            results[name] = sampler.generate(requests, batch_size=batch_size)
            seconds[name].append(time.perf_counter() - began)
    truth = [each.tokens for each in results["next_token"]]
    found = {}
    for name, of_way in results.items():
        tokens, rounds = sum(len(each.tokens) for each in of_way), sum(each.forwards.verify for each in of_way)
        found[name] = {
            "tokens_per_second": tokens / min(seconds[name][1:]),
            "tokens_per_round": tokens / rounds if rounds else 1.0,
            "texts_that_differ": sum(a.tokens != b for a, b in zip(of_way, truth, strict=True)),
        }
    return {"ways": found, "repeated_8_grams": repeated(truth), "tokens": statistics.mean(map(len, truth))}


def reference(target: Path, drafter: Path, prompts: list[list[int]], eos: int) -> dict[str, Any]:
    """Return the reference package's tokens per second at batch 1, and its texts."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    package = import_module("dflash.model")
    theirs = Qwen3ForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    config = Qwen3Config(**json.loads((drafter / "config.json").read_text()))
    draft = package.DFlashDraftModel.from_pretrained(drafter, config=config, dtype=torch.float32).eval()
    best, texts = float("inf"), list[list[int]]()
    for _ in range(REPEATS):
        began, texts = time.perf_counter(), []
        for tokens in prompts:
            found = package.dflash_generate(draft, theirs, torch.tensor([tokens]), LONGEST, [eos], 0.0)
            texts.append(found[0, len(tokens) :].tolist())
        best = min(best, time.perf_counter() - began)
    return {"tokens_per_second": sum(map(len, texts)) / best, "texts": texts}


def agreement() -> dict[str, Any]:
    """Compare our oracle with the package over 20 random drafters, in fp64.

    Returns the worst relative error of hidden states, and how many greedy runs had other tokens. Asserts that both are
    within bounds.
    """
    from transformers import Qwen3Config

    package = import_module("dflash.model")
    plain, made, small = map(
        import_module, ("tests.oracles.dflash", "tests.support.drafters", "tests.support.families")
    )
    llama, conftest = map(import_module, ("tests.models.test_llama", "tests.conftest"))
    theirs, worst, others = llama.oracle(Qwen3Config(**small.SMALL)), 0.0, 0
    for number in range(20):
        rng = random.Random(number)
        drafter = made.drafter_for(llama.ours(theirs), made.drafter_values(theirs.config, rng), seed=number)
        weights, L = made.hub_weights(drafter), drafter.canvas_length
        values = {key: value for key, value in drafter.config.to_dict().items() if key != "architectures"}
        model = package.DFlashDraftModel(Qwen3Config(**values)).double().eval()
        model.load_state_dict(weights)
        prompt = torch.randint(6, 90, (1, rng.randint(1, 24)), generator=torch.Generator().manual_seed(number))
        with torch.no_grad(), conftest._KeepDouble():
            shown = theirs(prompt, output_hidden_states=True).hidden_states
            features = plain.features_of(shown, list(drafter.target_layers))
            noisy: Tensor = theirs.get_input_embeddings()(torch.tensor([[7] + [5] * (L - 1)]))
            places = torch.arange(prompt.shape[1] + L)[None]
            hidden = model(position_ids=places, noise_embedding=noisy, target_hidden=features[None])[0]
            error = (hidden - plain.block_hidden(weights, drafter.config, features, noisy[0])).norm() / hidden.norm()
            tokens = package.dflash_generate(model, theirs, prompt, 12, None, 0.0)[0, prompt.shape[1] :].tolist()
            others += tokens != plain.generate(weights, drafter.config, theirs, prompt[0].tolist(), 12)[0]
        worst = max(worst, float(error))
    assert worst < 1e-10 and not others, (worst, others)
    return {"drafters": 20, "worst_error": worst, "runs_of_other_tokens": others}


def agreement_of_heads() -> dict[str, Any]:
    """Return the worst relative error of the EAGLE3 oracle's logits against speculators' model, in fp64.

    That model runs all passes from every token. In place of drafts it uses the row's own tokens, with zeros after them.
    """
    from transformers import LlamaConfig, Qwen3Config

    package, made = import_module("speculators.models.eagle3"), import_module("tests.support.drafters")
    plain, small, conftest = map(import_module, ("tests.oracles.eagle3", "tests.support.families", "tests.conftest"))
    worst, passes = 0.0, 3
    for number in range(10):
        rng = random.Random(100 + number)
        values = made.head_values(Qwen3Config(**small.SMALL), rng)
        weights, given = made.head_weights(values, number), values.get("transformer_layer_config", values)
        layer = {"llama": LlamaConfig, "qwen3": Qwen3Config}[given["model_type"]](
            **{key: given[key] for key in ("rope_theta", *small.SMALL.keys() & given.keys())},
            rms_norm_eps=given["rms_norm_eps"],
        )
        layer._attn_implementation = "eager"
        options = {key: values[key] for key in values.keys() & package.Eagle3SpeculatorConfig.model_fields.keys()}
        options |= {"transformer_layer_config": layer, "architectures": []}
        model = package.Eagle3DraftModel(package.Eagle3SpeculatorConfig(**options)).double().eval()
        state = {key.replace("midlayer", "layers.0"): x for key, x in weights.items()}
        assert not model.load_state_dict(state, strict=False).unexpected_keys  # missing keys are only for training
        T, draw = rng.randint(5, 12), torch.Generator().manual_seed(number)
        tokens = torch.randint(6, 90, (T + 1,), generator=draw)
        shown, logits = torch.randn(T, 96, generator=draw, dtype=torch.float64), list[Tensor]()
        model.lm_head.register_forward_hook(lambda *call, into=logits: into.append(call[2][0]))
        with torch.no_grad(), conftest._KeepDouble():
            drafts = model(shown[None], tokens[None, 1:], torch.zeros(1, T, dtype=torch.int64), ttt_steps=passes)
        features = plain.features_of(weights, values, given["rms_norm_eps"], shown.chunk(3, -1))
        for q in range(1, T + 1):
            row, forced = tokens[: q + 1].tolist(), [*tokens[q + 1 :].tolist(), 0, 0, 0]
            drafted, truth = plain.draft(weights, layer, values, torch.empty(0), features[:q], row, passes, forced)
            for n in range(passes):
                worst = max(worst, float((logits[n][q - 1] - truth[n]).norm() / truth[n].norm()))
                likeliest = int(drafts[n][0, q - 1])
                likeliest += int(weights["d2t"][likeliest]) if "d2t" in weights else 0
                assert drafted[n] == likeliest, (number, q, n)
    assert worst < 1e-10, worst
    return {"heads": 10, "worst_error": worst}


def measured(to: Path, target: Path, drafter: Path, count: int) -> dict[int, dict[str, Any]]:
    """Return the results of `measure` by batch size; batch 1 also has the reference package, if it is installed."""
    prompts = [json.loads(line)["prompt"] for line in (to / "test.jsonl").read_text().splitlines()[-count:]]
    found = {size: measure(target, drafter, prompts, size) for size in (1, 8)}
    if importlib.util.find_spec("dflash") is not None:
        sampler = Sampler.from_pretrained(target)
        requests = [Request(0, prompt=text) for text in prompts]
        tokens = [each.as_tokens(sampler.tokenizer, sampler.model.vocab_size).tokens for each in requests]
        package = reference(target, drafter, tokens, sampler.settings.generation.eos_ids[0])
        texts = [each.tokens for each in sampler.generate(prompts, max_new_tokens=LONGEST)]
        package["texts_that_differ"] = sum(a != b for a, b in zip(package.pop("texts"), texts, strict=True))
        found[1]["ways"]["reference package"] = package
    return found


def table(task: str, seed: int, found: dict[int, dict[str, Any]]) -> list[str]:
    """Return the lines of a table: tokens per second of each way, and relative to next tokens."""
    lines = []
    for size, of_size in found.items():
        answers = f"{of_size['tokens']:.0f} tokens an answer, {of_size['repeated_8_grams']:.1%} of 8-grams repeated"
        lines += [f"\n**{task}, seed {seed}, batch {size}**: {answers}\n"]
        lines += ["| | tokens/s | times | tokens a round | texts that differ |", "|---" * 5 + "|"]
        base = of_size["ways"]["next_token"]["tokens_per_second"]
        for name, way in of_size["ways"].items():
            rounds = f"{way['tokens_per_round']:.2f}" if "tokens_per_round" in way else ""
            speed, others = way["tokens_per_second"], way["texts_that_differ"]
            lines.append(f"| {name} | {speed:.0f} | {speed / base:.2f} | {rounds} | {others} |")
    return lines


def main() -> None:
    """Train what is missing, measure, and print tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drafters", description=__doc__)
    parser.add_argument("directory", type=Path, help="of targets, rows and drafters, made where it is missing")
    parser.add_argument("--task", choices=("addition", "prose"), action="append", help="(default: both)")
    parser.add_argument("--seeds", default="0,1,2", help="of the drafters (default 0,1,2); a target has seed 0")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--output", type=Path, help="FILE.json; the tables go beside it as .md")
    asked = parser.parse_args()
    torch.manual_seed(0)
    record = machine.describe(torch.device("cpu"))
    report: dict[str, Any] = {"machine": record, "wait_policy": os.environ.get("OMP_WAIT_POLICY"), "runs": []}
    text = [f"{machine.place(record)}; OMP_WAIT_POLICY {report['wait_policy'] or 'is not set'}"]
    for name, package, agrees in ("dflash", "DFlash", agreement), ("speculators", "EAGLE3", agreement_of_heads):
        if importlib.util.find_spec(name) is not None:
            report[agrees.__name__] = agrees()
            text.append(f"\nOur oracle of {package} beside the package {name}: {report[agrees.__name__]}")
    print("\n".join(text))
    for task in asked.task or ("addition", "prose"):
        for seed in map(int, asked.seeds.split(",")):
            to = asked.directory.absolute() / task
            target, drafter = trained(task, to, seed)
            found = measured(to, target, drafter, asked.prompts)
            report["runs"].append({"task": task, "seed": seed, "batches": found})
            lines = table(task, seed, found)
            print("\n".join(lines), flush=True)
            text += lines
    if asked.output is not None:
        machine.write(asked.output, report, "\n".join(text) + "\n")


if __name__ == "__main__":
    main()
