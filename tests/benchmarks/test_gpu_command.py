"""`make gpu`: what is missing is said, and neither a test file nor a suite takes others with it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import attempts, gpu, training_step
from benchmarks.models import Size
from benchmarks.result import Agreement, Result
from benchmarks.settings import Settings
from benchmarks.timing import Times
from benchmarks.training_step import Case

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


NOT_ON_A_GPU = {
    "test_launch.py": "looks at launches, of which none is made",
    "test_adapted_products.py": "looks at what is recorded for a backward, on the CPU",
    "test_second_derivatives.py": "looks at what autograd refuses, whatever the device",
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
    "test_quick.py": "runs on the CPU what a GPU runs in the quick run",
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
