"""`make gpu QUICK=1`: its path to the end on a CPU; errors, deaths and hangs take one figure and no other with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import quick, quick_tests
from benchmarks.quick import Report, Stage
from benchmarks.quick_figures import Figures
from benchmarks.quick_sampling import engine_of, memory_line, same_bits, step_times
from benchmarks.quick_start import Ceilings, config_of
from blockdiff.checkpoint.generation import Generation
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.sampling import Engine
from tests.support.families import small_model

pytestmark = pytest.mark.quick

ABSENT = ("accelerate", "bitsandbytes", "datasets", "fastapi", "outlines_core", "peft", "pyarrow", "pydantic", "typer")
HIDING = f"import sys; sys.modules.update(dict.fromkeys({ABSENT}))"
SMALL = ("--device", "cpu", "--preset", "tiny", "--prompt", "20", "--rows", "2")


def written(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "lines.jsonl").read_text().splitlines()]


def test_the_quick_run_goes_to_its_end_on_a_cpu_without_the_packages_that_a_rented_card_lacks(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDING)
    out = tmp_path / "out"
    words = ["-m", "benchmarks.gpu", "--quick", *SMALL, "--output", str(out)]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, *words], cwd=quick.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + (out / "log.txt").read_text()
    assert {path.name for path in out.iterdir()} == {"lines.jsonl", "table.md", "log.txt"}
    lines = written(out)
    parts = list(dict.fromkeys(line["part"] for line in lines))
    assert parts == ["start", "sampling", "graphs", "updates", "fp8", "nvfp4", "tests", "drafted", "left out"]
    assert {"pydantic", "datasets"} == {x["figure"] for x in lines if x["part"] == "left out"}
    figures = {f"{line['part']}: {line['figure']}": line for line in lines}
    for part in ("sampling", "fp8", "nvfp4"):
        assert {f"{part}: step, {rows} rows, {kind}" for rows in (1, 2) for kind in ("plain", "top_p", "JSON")} <= set(
            figures
        )
    assert figures["graphs: 16 steps of 2 rows"]["differ"] == {}
    assert figures["updates: update of the head"]["mean_difference"] < 1e-4  # from the rollouts' own
    assert figures["updates: update of canvases"]["gradient_norm"] > 0
    assert [line["at"] for line in lines] == sorted(line["at"] for line in lines)
    assert (out / "table.md").read_text() in done.stdout


# -- processes that make figures -----------------------------------------------------------------------------------

PROCESS = """
import json, os, sys, time
done = json.load(open(sys.argv[-1]))
def make(part, figure, work=lambda: None, limit=None):
    if f"{part}: {figure}" not in done and part not in done:
        print(json.dumps(dict(begins=f"{part}: {figure}", limit=limit)), flush=True)
        work()
        print(json.dumps(dict(part=part, figure=figure)), flush=True)
"""


def stage(tmp_path: Path, body: str, seconds: float = 60, parts: tuple[str, ...] = ("a",)) -> list[tuple[str, str]]:
    """The figures of a stage whose process runs `body`, each with what falls short."""
    report = Report(tmp_path / "out")
    (tmp_path / "process.py").write_text(PROCESS + body)
    Stage(parts, report, report.begin + seconds).run([str(tmp_path / "process.py")], dict(os.environ))
    return [(f"{line['part']}: {line['figure']}", line.get("short", "")) for line in written(tmp_path / "out")]


def test_a_process_that_dies_takes_only_its_figure_with_it(tmp_path):
    found = stage(tmp_path, "make('a', 'one'); make('a', 'two', lambda: os.kill(os.getpid(), 11)); make('a', 'three')")
    assert found == [("a: one", ""), ("a: two", "it died of signal 11; see log.txt"), ("a: three", "")]


def test_a_figure_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    body = "make('a', 'one', lambda: os.system(f'sleep 600'), limit=0.5); make('a', 'two')"
    begin = time.monotonic()
    assert stage(tmp_path, body) == [("a: one", "it took too long and was ended; see log.txt"), ("a: two", "")]
    assert time.monotonic() - begin < 30


def test_a_lost_gpu_is_followed_by_a_new_process_and_words_go_to_the_log(tmp_path):
    body = f"print('some words'); make('a', 'one'); 'a: one' in done or os._exit({quick.LOST}); make('a', 'two')"
    assert stage(tmp_path, body) == [("a: one", ""), ("a: two", "")]
    assert (tmp_path / "out" / "log.txt").read_text().count("some words") == 2


def test_at_the_end_of_the_time_what_is_missing_is_said(tmp_path):
    found = stage(tmp_path, "make('a', 'one', lambda: time.sleep(600))", seconds=1, parts=("a", "b"))
    assert found == [("a: one", "the time of the run was over; see log.txt"), ("b: start", "not begun")]


def test_a_process_that_never_begins_is_started_once(tmp_path):
    assert stage(tmp_path, "sys.exit('no such package')") == [
        ("a: start", "its process ended with code 1; see log.txt"),
        ("a: start", "not begun"),
    ]
    assert (tmp_path / "out" / "log.txt").read_text().count("no such package") == 1


def test_a_second_run_adds_to_the_first_and_kernels_keep_their_names(tmp_path):
    names = {f"{'long_' * 40}{n}": 0.5 for n in range(2)}
    for _ in range(2):
        report = Report(tmp_path)
        report.run += str(len(list(tmp_path.iterdir())))
        report.add(dict(part="sampling", figure="by kernel", ms=names, short="a|b"))
    assert [line["ms"] for line in written(tmp_path)] == [names, names]
    table = report.table.read_text()
    assert table.count("## 2") == 2 and table.count("| a/b |") == 2 and all(name in table for name in names)


# -- figures -------------------------------------------------------------------------------------------------------


def figures(**options: Any) -> Figures:
    return Figures(torch.device("cpu"), "tiny", 20, 2, **options)


def test_a_figure_that_fails_takes_none_of_the_others_with_it(capsys):
    made = figures(done=["a: four", "c"])

    def part(figures: Figures) -> None:
        figures.make("one", lambda: {"ms": 1})
        figures.make("two", lambda: [][0])
        figures.make("four", lambda: {"ms": 4})
        raise RuntimeError("no room\nfor more")

    for name in ("a", "b", "c"):
        made.run(name, part)
    lines = [line for line in map(json.loads, capsys.readouterr().out.splitlines()) if "begins" not in line]
    found = [(line["part"], line["figure"], line.get("short", "")) for line in lines]
    error = "IndexError: list index out of range"
    assert found == [
        ("a", "one", ""), ("a", "two", error), ("a", "start", "RuntimeError: no room"),
        ("b", "one", ""), ("b", "two", error), ("b", "four", ""), ("b", "start", "RuntimeError: no room"),
    ]  # fmt: skip


def test_floors_are_those_of_the_arithmetic():
    """26B in bf16: 52 GB are read for one canvas; for 32 each token meets 3.8 billion weights, and the table again."""
    config = config_of(quick.RELEASED)
    with torch.device("meta"):
        model = config.model_class(config, kernels="torch").bfloat16()
    ceilings = Ceilings(0.8 * 4.8e12, 0.6 * 990e12)  # of an H200
    assert ceilings.pass_ms(model, 256) == pytest.approx(13.6, rel=0.02)
    of_table = 262_144 * 2816
    products = 2 * 32 * 256 * (3.83e9 + of_table)
    assert ceilings.pass_ms(model, 32 * 256) == pytest.approx(1e3 * products / (0.6 * 990e12), rel=0.02)


def test_replayed_steps_that_differ_are_noticed(monkeypatch):
    engine = engine_of(
        Figures(torch.device("cpu"), "tiny", 300, 5)
    )  # of which a step encodes 160, and a page keeps 128
    assert same_bits(engine, 5, 300)["short"] == ""
    step, engine_step = engine._proposer._step, engine.step

    def other_step() -> bool:
        goes_on = engine_step()
        if not engine._graphs._is_refused:
            step.state.soft_BLD[1, 0, 0] += 1
        return goes_on

    monkeypatch.setattr(engine, "step", other_step)
    line = same_bits(engine, 2, 20)
    assert "replayed steps differ in" in line["short"] and "soft_BLD" in line["differ"]


def test_rows_that_do_not_run_are_no_measurement():
    engine = Engine(
        small_model("diffusion_gemma"), character_tokenizer("abc"), Generation(eos_ids=(1,), pad_id=0), max_rows=2
    )
    with pytest.raises(RuntimeError, match="0 of 1 rows ran"):
        step_times(engine, 1, 4, {"max_new_tokens": 1, "strategy": "entropy_bound:bound=1e9,confidence=1e9"}, 3)


def test_what_calls_hold_is_compared_with_what_was_left_to_them():
    pool = SimpleNamespace(tensors=[torch.zeros(1000, dtype=torch.uint8)])
    engine = SimpleNamespace(pages=SimpleNamespace(pools={"full": pool}, kept_free=500, capacity=7))
    shorts = [memory_line(engine, 9000, after, 20_000)["short"] for after in (7600, 7400)]  # type: ignore[arg-type]
    assert shorts == ["", "calls hold more than was kept free for them"]


# -- tests and kernels ---------------------------------------------------------------------------------------------


def test_a_test_that_fails_says_why_in_its_line(tmp_path, monkeypatch):
    file = tmp_path / "test_it.py"
    file.write_text("def test_good(): pass\ndef test_bad(): assert 1 == 2, 'they differ'\n")
    monkeypatch.setattr(quick_tests, "ROOT", tmp_path)
    good, bad = (quick_tests.run(f"test_it.py::test_{name}", "cpu") for name in ("good", "bad"))
    assert "short" not in good and "1 passed" in good["found"]
    assert "they differ" in bad["short"]


WORKER = """
import sys
from triton.runtime.jit import JITFunction
JITFunction._do_compile = lambda kernel, *rest: kernel
from benchmarks import compilations, quick_compile
compilations.ROWS, compilations.LONGEST = (1, 32), (700,)
for _ in range(2):
    quick_compile.main()
"""


def test_processes_that_compile_share_all_kernels_and_none_compiles_one_twice(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [sys.executable, "-W", "ignore", "-c", WORKER, str(tmp_path), "90", "132"]
    done = subprocess.run(words, cwd=quick.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["compiled"] > 40 and first["failed"] == [] and second == dict(compiled=0, failed=[])
    assert len(list(tmp_path.iterdir())) == first["compiled"]
