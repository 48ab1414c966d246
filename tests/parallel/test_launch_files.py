"""The files of recipes/launch/: the Slurm script starts two nodes, which share no cache, and they train as one process.

Only Slurm itself is played: its two commands, on loopback and, where one may make them, in two network namespaces.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from safetensors.torch import load_file
from typer.testing import CliRunner

from blockdiff.cli.main import app
from blockdiff.metrics import read
from tests.forked import HUNG, ROOT
from tests.little_model import LITTLE, save_preset

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
for node in 0 1; do
    (cd "$NODES/$node" && exec env SLURM_NODEID=$node BLOCKDIFF_CACHE="$NODES/$node/cache" ${ENTER//NODE/$node} "$@") &
done
wait -n && wait -n
"""
SCONTROL = """\
#!/bin/bash
[[ "$*" == "show hostnames nodes[0-1]" ]] && printf '%s\\n' "$FIRST" other-node
"""
SBATCH = [
    *("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task"),
    *("time", "output", "open-mode", "signal", "requeue"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows, a recipe, and in `one` what a single process makes of it."""
    folder = tmp_path_factory.mktemp("cluster")
    words = ["data", "sudoku", "--count", "24", "--output", str(folder / "puzzles")]
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


def submit(folder: Path, run: Path, first: str = "127.0.0.1", enter: str = "", **variables: str) -> str:
    """Run the Slurm script as a job of two nodes, with a process each: what it said."""
    nodes = folder / f"{run.name}-nodes"
    for node in ("0", "1"):
        (nodes / node).mkdir(parents=True)
    commands = nodes / "bin"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "nodes[0-1]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1"}
    job |= {"SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_ID": str(os.getpid()), "CONFIG": str(LAUNCH / "several_nodes.yaml")}
    job |= {"NODES": str(nodes), "FIRST": first, "ENTER": enter, "ACCELERATE_USE_CPU": "1", "PYTHONPATH": str(ROOT)}
    path = f"{commands}:{ROOT / '.venv' / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    usual = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE", "BLOCKDIFF"))}
    done = subprocess.run(
        [str(LAUNCH / "slurm.sh"), str(folder / "recipe.yaml"), str(run)],
        env={**usual, **job, "PATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=HUNG,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout + done.stderr


def check(folder: Path, run: Path, said: str) -> None:
    """Two nodes went on from two steps of one process, and ended where one process ends."""
    assert "saved by 1 process, resumed by 2" in said and "2 x cpu" in said
    expected, found = read(folder / "one" / "metrics.jsonl"), read(run / "metrics.jsonl")
    assert [(record["step"], record["kind"]) for record in found] == [(r["step"], r["kind"]) for r in expected]
    for one, two in zip(expected, found, strict=True):
        for name in one.keys() & {"loss", "grad_norm", "heldout_canvas_loss", "heldout_ar_loss"}:
            assert two[name] == pytest.approx(one[name], rel=1e-5), name
    ours, theirs = (load_file(each / "model" / "model.safetensors") for each in (run, folder / "one"))
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-5, atol=1e-6)
    for node in ("0", "1"):
        place = run.with_name(f"{run.name}-nodes") / node
        assert list((place / "cache").rglob("tokens.arrow")), node
        assert [path.name for path in place.iterdir()] == ["cache"]


@contextlib.contextmanager
def network() -> Iterator[str]:
    """The name of two network namespaces with an address each, joined by a cable; "" where one may not make them."""
    name = f"bd{os.getpid()}"
    end = "ip -n {0}-{1} addr add 10.213.0.{2}/24 dev cable{1}; ip -n {0}-{1} link set cable{1} up"
    lines = [f"ip netns add {name}-{node}; ip -n {name}-{node} link set lo up" for node in (0, 1)]
    lines += [f"ip link add cable0 netns {name}-0 type veth peer name cable1 netns {name}-1"]
    lines += [end.format(name, node, node + 1) for node in (0, 1)]
    try:
        made = subprocess.run(["bash", "-ec", "\n".join(lines).replace("; ", "\n")], capture_output=True, text=True)
        yield "" if made.returncode else name
    finally:
        for node in (0, 1):
            subprocess.run(["bash", "-c", f"ip netns del {name}-{node}"], capture_output=True)


def test_two_nodes_that_share_neither_folder_nor_cache_train_as_one_process(folder):
    """Where network namespaces can be made the nodes have addresses of their own; else both are on loopback."""
    with network() as name:
        apart = ("10.213.0.1", f"ip netns exec {name}-NODE env GLOO_SOCKET_IFNAME=cableNODE")
        check(folder, folder / "two", submit(folder, folder / "two", *(apart if name else ())))


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
