"""The benchmarks: both sides compute the same thing, and nothing is quoted where they do not."""

from __future__ import annotations

import gc
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import denoise_step, gpu, models, training_step
from benchmarks.quick_tests import RELEASED_TESTS
from benchmarks.result import Agreement, Result, table
from benchmarks.settings import Settings
from benchmarks.timing import Times, contenders, interleaved, probe
from benchmarks.training_step import Case
from tests.project.test_imports import LIGHT_DATA
from tests.support.peaks import peak_memory, peak_of_one_call

CPU = torch.device("cpu")
QUICK = [f"benchmarks.quick_{name}" for name in ("compile", "policy", "sampling", "start", "tests")]
FOLDER = Path(command.__file__).parent
OUTSIDE = ("blockdiff.cli", "blockdiff.training.recipe", "blockdiff.data")  # what a benchmark has no business with
# prompts longer than the window of 16: the peer cannot crop its cache and must encode in two calls
TINY = models.Size("tiny", "tiny", rows=3, prompt=24, steps=(2, 4))
WIDE = replace(TINY, text=dict(sliding_window=128))


@pytest.fixture
def only_tiny(monkeypatch):
    monkeypatch.setattr(models, "sizes", lambda device: {"tiny": TINY})
    monkeypatch.setattr(training_step, "cases", lambda size, device: [Case()])
    monkeypatch.setattr(denoise_step, "BATCHES", (2,))


def test_one_command_compares_times_and_writes_all_suites(only_tiny, tmp_path, capsys):
    file = tmp_path / "out.json"
    assert command.main(["--device", "cpu", "--repeats", "2", "--output", str(file)]) == 0
    written = json.loads(file.read_text())
    assert [result["suite"] for result in written["results"]] == ["training step", "denoising step"]
    for result in written["results"]:
        assert result["agrees"] and result["speedup"] is not None
        assert len(result["ours_seconds"]) == 2
        assert result["fastest_peer"] in result["peer_seconds"]
        assert min(result["peak_bytes"].values()) > 0
    assert written["machine"]["versions"]["torch"] == torch.__version__
    printed = capsys.readouterr().out
    assert printed == file.with_suffix(".md").read_text() + "\n"
    assert printed.count("| tiny |") == 2


def test_every_command_answers_help_under_its_name_and_every_measurement_is_documented():
    documented = (FOLDER / "README.md").read_text(encoding="utf-8")
    texts = {file.stem: file.read_text(encoding="utf-8") for file in FOLDER.glob("*.py")}
    commands = {name for name, text in texts.items() if 'if __name__ == "__main__":' in text} - {"__main__"}
    assert len(commands) > 8
    assert [name for name in commands if f'ArgumentParser(prog="python -m benchmarks.{name}"' not in texts[name]] == []
    assert [name for name in commands if f"`{name}`" not in documented and f"`{name}.py`" not in documented] == []
    suites = {run.__module__.partition(".")[2] for run in command.SUITES.values()}
    assert [name for name in suites if f"`{name}.py`" not in documented] == []


@pytest.mark.quick
def test_garbage_of_an_earlier_call_does_not_lower_a_peak():
    def leave_garbage() -> None:
        cycle: list[object] = [torch.ones(5_000)]
        cycle.append(cycle)

    def look_for_garbage() -> None:
        gc.collect()  # as the interpreter does at some moment or other
        torch.ones(1_000)

    assert peak_memory(leave_garbage, CPU) == 20_000
    assert peak_of_one_call(look_for_garbage, CPU) == 4_000


@pytest.mark.quick
def test_a_wrong_gradient_leaves_no_speed_up_to_quote(monkeypatch):
    pair = models.pair(TINY, CPU)
    broken = pair.ours.layers[1].attention.q_norm.weight
    broken.register_hook(lambda gradient: gradient * 1.01)
    result = training_step.measure(pair, TINY, Case(), Settings(CPU, 1))
    loss_error, loss_bound = result.agreement.errors["losses"]
    assert loss_error <= loss_bound  # only a gradient is wrong
    assert not result.agreement.is_met
    assert result.speedup is None and result.ours is None and result.to_record()["speedup"] is None
    assert "DISAGREES" in table([result])


def test_a_wrong_weight_fails_the_whole_command(only_tiny, monkeypatch, tmp_path):
    def planted(*arguments, **options):
        pair = models.pair(*arguments, **options)
        with torch.no_grad():
            pair.ours.norm.weight.mul_(1.001)
        return pair

    monkeypatch.setattr(denoise_step, "pair", planted)
    file = tmp_path / "out.json"
    assert command.main(["--device", "cpu", "--only", "denoise", "--repeats", "1", "--output", str(file)]) == 1
    (result,) = json.loads(file.read_text())["results"]
    assert not result["agrees"] and result["speedup"] is None and result["ours_seconds"] is None


@pytest.mark.parametrize(
    "case",
    [Case(canvases=4), Case(autocast=True), Case(torch.bfloat16), Case(lora=True), Case(torch.bfloat16, lora=True)],
    ids=str,
)
def test_other_cases_agree_with_the_peer(case, monkeypatch):
    monkeypatch.setattr(training_step, "once", lambda work, device: lambda: 1.0)  # nothing is timed or traced here
    monkeypatch.setattr(training_step, "peak_memory", lambda *_, **__: 0)
    result = training_step.measure(models.pair(WIDE, CPU, case.dtype), WIDE, case, Settings(CPU, 1))
    assert result.agreement.is_met, result.agreement


def test_rows_are_compared_only_where_no_router_is_near_a_tie():
    ours = models.pair(WIDE, CPU).ours
    layer = ours.layers[1]

    def rows(seed: int) -> tuple[int, torch.Tensor]:
        return seed, torch.randint(3, ours.vocab_size, (3, 5), generator=torch.Generator().manual_seed(seed))

    def run(drawn: tuple[int, torch.Tensor]) -> None:
        with torch.no_grad():
            # experts 0 and 1 get equal scores for the first two seeds
            kept = layer.router.proj.weight.clone()
            if drawn[0] < 3:
                layer.router.proj.weight[1:] = layer.router.proj.weight[0]
            ours.encode(drawn[1])
            layer.router.proj.weight.copy_(kept)

    seed, tokens = models.with_wide_margins(ours, rows, run)
    assert seed >= 3
    assert models.router_margin(ours, lambda: ours.encode(tokens)) >= models.MARGIN
    assert models.router_margin(ours, lambda: run(rows(1))) < models.MARGIN


@pytest.mark.quick
def test_a_speed_up_is_the_median_ratio_of_neighbours_against_the_fastest_variant():
    agreement = Agreement({"losses": (0.0, 1.0)})
    peers = {"slow": Times((9.0, 9.0, 9.0)), "fast": Times((2.0, 6.0, 4.0))}
    result = Result("suite", "size", "case", agreement, Times((1.0, 2.0, 4.0)), peers)
    assert result.fastest_peer == "fast"
    assert result.speedup == pytest.approx((2.0, 1.5, 2.5))
    assert replace(result, agreement=Agreement({"losses": (math.nan, 1.0)})).speedup is None


@pytest.mark.quick
def test_repeats_are_taken_in_turns_after_the_warm_up():
    calls = []

    def stopwatch(name):
        return lambda: calls.append(name) or float(len(calls))

    times = interleaved({name: stopwatch(name) for name in "AB"}, repeats=2, warmup=1)
    assert "".join(calls) == "ABABAB"
    assert times["A"].seconds == (3.0, 5.0)


def test_slow_variants_of_the_peer_are_dropped():
    probed = probe({"slow": lambda: 2.0, "fast": lambda: 1.0, "near": lambda: 1.01})
    assert list(probed) == ["fast", "near", "slow"]
    assert contenders(probed) == ["fast", "near"]
    assert contenders({"noise": -0.1, "slow": 2.0}) == ["noise"]  # differences of times can be negative


def test_a_variant_that_cannot_run_is_left_out_unless_it_is_the_last_hope(capsys):
    def refuse():
        raise NotImplementedError("not on this device")

    assert probe({"broken": refuse, "fine": lambda: 1.0}) == {"fine": 1.0}
    assert "broken: left out, NotImplementedError: not on this device" in capsys.readouterr().err
    with pytest.raises(NotImplementedError):
        probe({"broken": refuse, "broken too": refuse})


def test_peak_memory_counts_what_is_held_at_once():
    def work():
        first = torch.ones(2**18)  # 1 MiB
        del first
        return [torch.ones(2**18) for _ in range(2)]

    assert peak_memory(work, CPU) == 2 * 2**20


BARE = """
import importlib, sys
for name in ("accelerate", "datasets", "matplotlib", "outlines_core", "pyarrow", "pydantic", "typer"):
    sys.modules[name] = None
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in str(each)]
import benchmarks.__main__, pytest
print(*sys.modules)
for name in sys.argv[1:]:
    importlib.import_module(name)
sys.exit(pytest.main(["-q", "-m", "gpu", "--collect-only", "tests", "-p", "no:cacheprovider"]))
"""


@pytest.fixture(scope="module")
def bare() -> tuple[str, str]:
    """A process in a checkout that is not installed, with what kernels, models and sampling need: the modules of the
    benchmarks, and the GPU tests that are found; all that `make gpu` runs can be imported."""
    files = [".".join(path.relative_to(gpu.ROOT).with_suffix("").parts) for path in gpu.test_files()]
    words = [sys.executable, "-c", BARE, "tests.conftest", *files, "benchmarks.quick_figures", *QUICK]
    run = subprocess.run(words, cwd=gpu.ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    modules, _, found = run.stdout.partition("\n")
    return modules, found


def test_the_benchmarks_need_nothing_that_a_bare_gpu_machine_lacks(bare):
    loaded = bare[0].split()
    assert "blockdiff.objective" in loaded
    light = {f"blockdiff.{name}" for name in LIGHT_DATA}
    assert not [name for name in loaded if name.startswith(OUTSIDE) and name not in light]


def test_the_gpu_tests_are_found_on_a_bare_gpu_machine(bare):
    assert all(f"tests/{room}/" in bare[1] for room in ("kernels", "checkpoint", "benchmarks"))
    found = bare[1].splitlines()
    for name in RELEASED_TESTS["cuda"]:  # which the quick run names
        assert any(line == name or line.startswith(f"{name}[") for line in found), name


@pytest.mark.gpu
@pytest.mark.parametrize("case", [Case(), Case(torch.bfloat16), Case(torch.bfloat16, update=True)], ids=str)
def test_training_steps_agree_on_the_gpu(case):
    cuda = torch.device("cuda")
    result = training_step.measure(models.pair(TINY, cuda, case.dtype), TINY, case, Settings(cuda, 1))
    assert result.agreement.is_met, result.agreement


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_denoising_steps_agree_on_the_gpu(dtype):
    cuda = torch.device("cuda")
    results = denoise_step.measure(models.pair(TINY, cuda, dtype), TINY, 2, Settings(cuda, 1))
    assert all(result.agreement.is_met for result in results), results[0].agreement
