"""The files of recipes/launch/: the Slurm script starts two nodes, which share no cache, and they train as one process.

Slurm's two commands are played, and the launcher's processes are started with what the script tells the launcher.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from safetensors.torch import load_file
from typer.testing import CliRunner

from blockdiff.cli.main import app, main
from blockdiff.metrics import read
from tests.support.forked import HUNG, ROOT, finish, started
from tests.support.little_model import LITTLE, save_preset
from tests.support.meeting import meeting

LAUNCH = ROOT / "recipes" / "launch"
STEPS = 5
# Adam divides by the gradient's size, and with it by rounding; not with an epsilon far above.
RECIPE = f"""\
seed: 1
model: {{preset: FOLDER/preset.json, tokenizer: FOLDER/puzzles/tokenizer}}
data: {{train: FOLDER/puzzles/train.jsonl, heldout: FOLDER/puzzles/train.jsonl}}
optim: {{lr: 0.1, eps: 1.0, schedule: constant, warmup_steps: 0}}
train: {{steps: {STEPS}, batch_size: 6, log_every: 1, save_every: 2, eval_every: 2}}
"""
SRUN = """\
#!/bin/bash
# What Slurm's does: starts the command on every node, each in a folder of its own.
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do (cd "$NODES/$node" && exec env SLURM_NODEID=$node "$@") & done
wait -n && wait -n
"""
SCONTROL = """\
#!/bin/bash
[[ "$*" == "show hostnames nodes[0-1]" ]] && printf '%s\\n' 127.0.0.1 other-node
"""
ACCELERATE = """\
#!/bin/bash
printf '%s\\n' "$@" > words
"""
SBATCH = [
    *("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task"),
    *("time", "output", "open-mode", "signal", "requeue"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows, a recipe, and in `one` what a single process makes of it."""
    folder = tmp_path_factory.mktemp("cluster")
    words = ["data", "sudoku", "--split", "train=24", "--output", str(folder / "puzzles")]
    assert CliRunner().invoke(app, words).exit_code == 0
    save_preset(folder / "preset.json", LITTLE)
    made = next((folder / "puzzles").glob("*.jsonl"))
    recipe = RECIPE.replace("FOLDER", str(folder)).replace("train.jsonl", made.name)
    (folder / "recipe.yaml").write_text(recipe)
    for name, steps in (("one", STEPS), ("two", 2)):  # the other goes on after two steps
        words = ["train", str(folder / "recipe.yaml"), "--output", str(folder / name), "--set", "data.cache=off"]
        result = CliRunner().invoke(app, [*words, "--set", f"train.steps={steps}"])
        assert result.exit_code == 0, result.output
    return folder


def submit(folder: Path, run: Path) -> list[list[str]]:
    """Run the Slurm script as a job of two nodes, with a process each: the words that each gives its launcher."""
    nodes = folder / "nodes"
    for node in ("0", "1"):
        (nodes / node).mkdir(parents=True)
    commands = nodes / "bin"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("accelerate", ACCELERATE)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "nodes[0-1]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1"}
    job |= {"SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_ID": str(os.getpid()), "CONFIG": str(LAUNCH / "several_nodes.yaml")}
    done = subprocess.run(
        [str(LAUNCH / "slurm.sh"), str(folder / "recipe.yaml"), str(run)],
        env={**os.environ, **job, "NODES": str(nodes), "PATH": f"{commands}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=HUNG,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return [(nodes / node / "words").read_text().splitlines() for node in ("0", "1")]


def train(node: Path, words: list[str]) -> None:
    """Be the process of a node, which accelerate would start with what `meeting` says."""
    os.chdir(node)
    sys.argv = ["blockdiff", *words]
    main()


def check(folder: Path, run: Path, said: str) -> None:
    """Two nodes went on from two steps of one process, and ended where one process ends."""
    assert "saved by 1 process, resumed by 2" in said
    expected, found = read(folder / "one" / "metrics.jsonl"), read(run / "metrics.jsonl")
    assert [(record["step"], record["kind"]) for record in found] == [(r["step"], r["kind"]) for r in expected]
    for one, two in zip(expected, found, strict=True):
        for name in one.keys() & {"loss", "grad_norm", "heldout_canvas_loss", "heldout_ar_loss"}:
            assert two[name] == pytest.approx(one[name], rel=1e-5), name
    ours, theirs = (load_file(each / "model" / "model.safetensors") for each in (run, folder / "one"))
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-5, atol=1e-6)
    for node in ("0", "1"):
        place = folder / "nodes" / node
        assert list((place / "cache").rglob("tokens.arrow")), node
        assert sorted(path.name for path in place.iterdir()) == ["cache", "words"]


def test_two_nodes_that_share_neither_folder_nor_cache_train_as_one_process(folder, tmp_path):
    """The launcher itself is run by test_distributed.py."""
    with meeting(2) as variables, contextlib.ExitStack() as stack:
        processes, logs = [], []
        for rank, (launch, *words) in enumerate(submit(folder, folder / "two")):
            assert launch == "launch"
            given = launch_command_parser().parse_args(words)
            assert (given.config_file, given.machine_rank) == (str(LAUNCH / "several_nodes.yaml"), rank)
            assert (given.num_machines, given.num_processes, given.main_process_ip) == (2, 2, "127.0.0.1")
            assert given.main_process_port == 20000 + os.getpid() % 20000
            assert given.module and given.training_script == "blockdiff"
            node = folder / "nodes" / str(rank)
            own = variables[rank] | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            logs.append(tmp_path / f"rank-{rank}.log")
            made = started(
                train, node, given.training_script_args, log=logs[-1], **own, BLOCKDIFF_CACHE=f"{node}/cache"
            )
            processes.append(stack.enter_context(made))
        finish(processes, logs)
    check(folder, folder / "two", "".join(log.read_text() for log in logs))


@pytest.mark.quick
def test_the_slurm_script_parses_and_its_options_are_slurms():
    script = LAUNCH / "slurm.sh"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=HUNG)
    options = re.findall(r"^#SBATCH --([\w-]+)", script.read_text(), re.M)
    assert options == SBATCH
    assert set(re.findall(r"srun (.*?) bash", script.read_text())[0].split()) == {
        *('--cpus-per-task="$SLURM_CPUS_PER_TASK"', "--kill-on-bad-exit=1"),
    }


@pytest.mark.quick
@pytest.mark.parametrize(("name", "nodes", "processes"), [("one_node", 1, 8), ("several_nodes", 2, 16)])
def test_the_configs_are_accelerates_and_leave_training_to_the_recipe(name, nodes, processes):
    path = LAUNCH / f"{name}.yaml"
    config = ClusterConfig.from_yaml_file(str(path))  # refuses keys that it does not know
    assert (config.num_machines, config.num_processes, config.mixed_precision) == (nodes, processes, "no")
    assert nodes == 1 or (config.rdzv_backend, config.same_network) == ("c10d", False)
    assert (
        yaml.safe_load(path.read_text())
        .keys()
        .isdisjoint(
            {
                "fsdp_config",
                "deepspeed_config",
                "megatron_lm_config",
                "parallelism_config",
                "dynamo_config",
                "fp8_config",
            }
        )
    )
