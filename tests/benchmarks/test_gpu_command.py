"""`make gpu`: what is missing is said, and neither a test file nor a suite takes others with it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import attempts, gpu, quick, training_step
from benchmarks.models import Size
from benchmarks.quick_sampling import memory_line, step_times
from benchmarks.result import Agreement, Result
from benchmarks.settings import Settings
from benchmarks.step_operations import STEPS
from benchmarks.timing import Times
from benchmarks.training_step import Case
from blockdiff.checkpoint.generation import Generation
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.sampling import Engine
from tests.families import small_model

pytestmark = pytest.mark.quick

AGREEMENT = Agreement({"losses": (0.0, 1.0)})
PEERS = {"peer": Times((3.0, 4.0))}
LINE = Result("a suite", "tiny", "one", AGREEMENT, Times((1.0, 2.0)), PEERS, {"peer": 3.0}, (1, 2))
MACHINE = dict(device="a GPU", cores=1, threads=1, versions={"torch": "2.11"}, commit="abc", dirty=False)


@pytest.fixture
def named(monkeypatch) -> None:
    """A machine with a GPU, as far as can be seen."""
    monkeypatch.setattr(gpu, "LOOK", 'print(\'["2.11", "13.0", ["NVIDIA H200", 9, 0]]\')')


@pytest.mark.parametrize(
    ("look", "said"),
    [
        ("print('[\"2.11\", null, null]')", "a GPU that torch finds (torch 2.11, CUDA None)"),
        ('print(\'["2.11", "13.0", ["A GPU", 7, 5]]\')', "of compute capability 8.0 or newer, A GPU has 7.5"),
        ("raise OSError('libcudart.so.13: not found')", "a torch that works: OSError: libcudart.so.13: not found"),
        ("import os; os.abort()", "a torch that works: it ended with code -6"),
    ],
)
def test_what_is_missing_is_said_in_one_line_each_and_nothing_is_run(look, said, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "LOOK", look)
    monkeypatch.setattr(gpu, "NEEDED", ("torch", "no_such_package"))
    monkeypatch.setattr(gpu.shutil, "which", lambda name: None)
    monkeypatch.setattr(gpu, "process", lambda *_: pytest.fail("something was run"))
    assert gpu.main([]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len([line for line in lines if line.startswith("make gpu needs")]) == 3
    assert said in "\n".join(lines) and "no_such_package" in lines[0] and "C compiler" in lines[1]


def test_a_process_that_dies_or_hangs_is_said():
    assert gpu.process(["-c", "pass"], 600) == ""
    assert gpu.process(["-c", "import sys; sys.exit(3)"], 600).startswith("ended with code 3")
    assert gpu.process(["-c", "import os; os.abort()"], 600).startswith("was ended by signal 6")
    assert gpu.process(["-c", "import time; time.sleep(3600)"], 1) == "was ended after 1 s"
    assert gpu.process(["-c", "import benchmarks, os; assert os.environ['A'] == 'b'"], 600, {"A": "b"}) == ""


def test_a_file_that_fails_is_run_again_with_launches_by_triton(named, monkeypatch, capsys):
    bad, runs = list(gpu.test_files())[1], []

    def process(words: list[str], limit: float, environment: dict[str, str] | None = None) -> str:
        runs.append((words[-1], environment))
        return "ended with code 1" if words[-1].endswith(bad.name) and not environment else ""

    monkeypatch.delenv("BLOCKDIFF_RELAUNCH", raising=False)
    monkeypatch.setattr(gpu, "process", process)
    assert gpu.main(["--no-benchmarks"]) == 1
    said = capsys.readouterr().out.rpartition("\n\n")[2]
    assert f"{bad.name}: ended with code 1; with BLOCKDIFF_RELAUNCH=0 it passes" in said
    assert said.count(": passed") == len(gpu.test_files()) - 1
    assert [environment for _, environment in runs if environment] == [{"BLOCKDIFF_RELAUNCH": "0"}]


def test_the_quick_run_ends_with_what_fell_short(named, monkeypatch, tmp_path, capsys):
    limits = list[float]()

    def process(words: list[str], limit: float, environment: Any = None) -> str:
        if words[1] != "benchmarks.quick":
            assert limit <= gpu.QUICK["tests"] / 2
            return "ended with code 1" if words[-1].endswith("test_triton_fp8.py") else ""
        limits.append(limit)
        with Path(words[-1]).open("a") as file:
            file.write(json.dumps(dict(part=words[2], figure="step", short="slow" if words[2] == "fp8" else "")) + "\n")
        return "was ended after 5 s" if words[2] == "nccl" else ""

    monkeypatch.setenv("BLOCKDIFF_RELAUNCH", "0")
    monkeypatch.setattr(gpu, "process", process)
    assert gpu.main(["--quick", "--output", str(tmp_path / "out.json")]) == 1
    fallen = capsys.readouterr().out.rpartition("|---|---|---|\n")[2].splitlines()[:-2]
    name = "tests/kernels/test_triton_fp8.py"
    assert fallen == [
        f"| tests | {name} | ended with code 1 |",
        "| fp8 | step | slow |",
        "| nccl | | was ended after 5 s |",
    ]
    lines = [json.loads(line) for line in (tmp_path / "out-quick.jsonl").read_text().splitlines()]
    assert len(lines) > 15 and {line["part"] for line in lines} == set(gpu.QUICK)
    # nothing took time here, so a part has its own seconds and those of all before it
    assert sum(gpu.QUICK.values()) <= 15 * 60 and limits == pytest.approx([480, 600, 690, 840, 900], abs=30)
    assert gpu.main(["--quick", "--only", "bf16", "--output", str(tmp_path / "one.json")]) == 0
    with pytest.raises(SystemExit):
        gpu.main(["--only", "bf16"])
    monkeypatch.setitem(gpu.QUICK, "tests", 5)
    assert gpu.main(["--quick", "--only", "tests", "--output", str(tmp_path / "late.json")]) == 1
    assert "was not run: the time for tests is over" in capsys.readouterr().out


def test_the_quick_parts_of_one_gpu_run_on_a_cpu(tmp_path):
    words = ["--device", "cpu", "--preset", "tiny", "--prompt", "20", "--rows", "2"]
    for part in ("bf16", "fp8", "drafted", "policy"):
        assert quick.main([part, *words, "--output", str(tmp_path / "out.jsonl")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    found = [(line["part"], line["rows"], line["kind"]) for line in lines if line["figure"] in ("step", "round")]
    rounds = [("drafted", rows, kind) for kind in ("next_token", "speculative:block=16") for rows in (1, 2)]
    assert found == [(part, rows, kind) for part in ("bf16", "fp8") for rows in (1, 2) for kind in STEPS] + rounds
    updates = {line["figure"]: line for line in lines if line["part"] == "policy"}
    assert list(updates) == ["rollouts", "update of the head", "update of canvases"]
    assert updates["update of the head"]["mean_difference"] < 1e-4  # the rollouts' own


def test_a_figure_that_fails_takes_none_of_the_others_with_it():
    def measurements() -> Any:
        yield "one", lambda: {"ms": 1}
        yield "two", lambda: [][0]
        yield "three", lambda: {"ms": 3}
        raise RuntimeError("no room\nfor more")

    shorts = [(line["figure"], line.get("short", "")) for line in quick.figures(measurements())]
    found = [("one", ""), ("two", "IndexError: list index out of range"), ("three", "")]
    assert shorts == [*found, ("start", "RuntimeError: no room")]


def test_rows_that_do_not_run_are_no_measurement():
    engine = Engine(
        small_model("diffusion_gemma"), character_tokenizer("abc"), Generation(eos_ids=(1,), pad_id=0), max_rows=2
    )
    with pytest.raises(RuntimeError, match="0 of 1 rows ran"):
        step_times(engine, 1, 4, {"max_new_tokens": 1, "strategy": "entropy_bound:bound=1e9,confidence=1e9"}, 3)


def test_what_calls_hold_is_compared_with_what_was_left_to_them():
    pool = SimpleNamespace(tensors=[torch.zeros(1000, dtype=torch.uint8)])
    engine = SimpleNamespace(pages=SimpleNamespace(pools={"full": pool}, kept_free=500, capacity=7))
    shorts = [memory_line(engine, 9000, after, 20_000)["short"] for after in (7600, 7400, 300)]  # type: ignore[arg-type]
    assert shorts == ["", "calls hold more than was kept free for them", shorts[2]] and "2 %" in shorts[2]


NOT_ON_A_GPU = {
    "test_launch.py": "looks at launches, of which none is made",
    "test_relaunch.py": "stands in for the GPU's driver",
    "test_ops.py": "says what GPU there is",
    "test_scratch.py": "looks at memory that a layer shares, of tensors of the CPU",
    "test_layer_launches.py": "counts launches in the interpreter",
    "test_compiled.py": "compiles without a GPU",
    "test_compiled_kernels.py": "compiles without a GPU",
    "test_compilations.py": "compiles without a GPU",
    "test_tiles.py": "compiles without a GPU",
    "test_family.py": "says what a family has",
    "test_static_steps.py": "takes the meta device",
    "test_launches.py": "counts launches in the interpreter",
    "test_cli.py": "asks for what there is",
    "test_plan.py": "plans",
    "test_exchange.py": "runs ranks on the CPU",
}
IN_TRITON = (
    r"kernels=.triton|resolve\(.triton|Kernels\(.triton|[. ]triton\b|(benchmarks|support)\.(launches|compil|tile|tune)"
)


def test_every_test_that_can_run_on_a_gpu_does_so_there():
    """All tests of a file that chooses its device run, not only marked ones, and no file with kernels of Triton lacks
    a device without a reason."""
    found = gpu.test_files()
    for path in {*(gpu.ROOT / "tests").rglob("test_*.py")} - {Path(__file__)}:
        text = path.read_text("utf-8")
        if "cuda.is_available() else" in text:
            assert found.get(path) == "", f"{path} chooses its device in another way than DEVICE = ..."
        if re.search(IN_TRITON, text):
            assert path in found or path.name in NOT_ON_A_GPU, f"{path} runs no kernel on a GPU"
    names = {path.name: mark for path, mark in found.items()}
    assert {"test_graphs.py", "test_benchmarks.py", "test_checkpoint.py"} <= {name for name in names if names[name]}
    assert names["test_triton_inference.py"] == names["test_triton_fp8.py"] == names["test_triton_step.py"] == ""


def test_a_suite_that_dies_leaves_its_lines_and_those_of_the_others(named, monkeypatch, tmp_path, capsys):
    def process(words: list[str], limit: float, environment: Any = None) -> str:
        suite, output = words[words.index("--only") + 1], Path(words[-1])
        assert words[words.index("--repeats") + 1] == "3"
        if suite != "denoise":
            lines = [replace(LINE, suite=suite).to_record()]
            output.write_text(json.dumps(dict(machine=MACHINE, repeats=3, results=lines)))
        return "was ended by signal 11 after 5 s" if suite == "experts" else ""

    monkeypatch.setattr(gpu, "process", process)
    file = tmp_path / "new" / "out.json"
    assert gpu.main(["--no-tests", "--repeats", "3", "--output", str(file)]) == 1
    lines = [Result.of_record(line) for line in json.loads(file.read_text())["results"]]
    assert [line.suite for line in lines] == [suite for suite in gpu.SUITES if suite != "denoise"]
    printed = capsys.readouterr().out
    assert file.with_suffix(".md").read_text() in printed and printed.count("| tiny") == len(lines)
    assert "experts: was ended by signal 11 after 5 s" in printed and f"denoise: {gpu.NOTHING}" in printed


def test_a_line_is_the_same_after_it_was_written_and_read():
    for line in (LINE, Result("a suite", "tiny", "two", Agreement({"losses": (2.0, 1.0)}))):
        assert Result.of_record(json.loads(json.dumps(line.to_record()))) == line


def test_a_line_that_fails_is_said_and_the_next_one_is_made(monkeypatch, capsys):
    def measure(pair: Any, size: Size, case: Case, settings: Settings) -> Result:
        if case.autocast:
            raise RuntimeError("an illegal memory access\nwas encountered")
        if case.update:
            raise torch.OutOfMemoryError("no room")
        return LINE

    cases = [Case(autocast=True), Case(update=True), Case()]
    monkeypatch.setattr(training_step, "cases", lambda size, device: cases)
    monkeypatch.setattr(training_step, "pair", lambda *_, **__: None)
    monkeypatch.setattr(training_step, "measure", measure)
    monkeypatch.setattr(attempts, "FAILED", [])
    found: list[Result] = []
    training_step.run([Size("tiny", "tiny", 1, 1, (1, 2))], Settings(torch.device("cpu")), found.append)
    assert found == [LINE]
    assert len(attempts.FAILED) == 1 and attempts.FAILED[0].startswith("training step, tiny, ")
    said = capsys.readouterr().err
    assert "FAILED: RuntimeError: an illegal memory access\n" in said and "not available: no room" in said
