"""The notebooks run from top to bottom, and the copies in the repository are as they should be."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import nbformat
import pytest

from tests.support.forked import HUNG, started
from tests.support.notebook_cells import execute

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOKS / name, as_version=4)


def outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


# With three seeds in three kinds of arithmetic 3 or 4 of 4 are solved, 2 to 5 and then 13 to 16 of 19 are right, and a
# round has 3.5 to 3.8 tokens. With a learning rate of 0 none is solved, and a round has 1.0.
@pytest.mark.portable
@pytest.mark.parametrize(
    ("name", "pictures", "said"),
    [
        ("quickstart.ipynb", 4, [r"train: [2-4] of 4 solved"]),
        ("adapt.ipynb", 0, [r"first loss: True", r"at most \de-0[5-9]", r"transformers: [12] of 2 right"]),
        ("pixel_sudoku.ipynb", 2, [r"[2-4] of 4 solved"]),
        ("steer.ipynb", 1, [r"entropy_bound +[34] of 4 solved", r"pinned (\d+) of \1 givens kept", r"4321[1-4]{12} "]),
        ("draft.ipynb", 1, [r"held out: 15 texts, all equal, [3-6]\.", r"untrained drafter: 15 texts, all equal, 1\."]),
        ("reward.ipynb", 1, [r"before: [0-7] of 19 right", r"after: 1\d of 19 right"]),
    ],
)
def test_a_notebook_runs_and_its_model_learns(
    name: str, pictures: int, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(folder, str(tmp_path / folder.lower()))
    variables = {name: os.environ[name] for name in os.environ if name.startswith(("JUPYTER", "IPYTHON"))}
    with started(execute, NOTEBOOKS / name, tmp_path, log=tmp_path / "log", **variables) as process:
        process.join(HUNG)
    assert process.exitcode == 0, (tmp_path / "log").read_text()
    printed, errors, shown = json.loads((tmp_path / "outputs.json").read_text())
    assert shown == pictures and not errors
    assert all(re.search(words, printed) for words in said), printed


@pytest.mark.parametrize("name", [file.name for file in sorted(NOTEBOOKS.glob("*.ipynb"))])
def test_the_stored_outputs_show_no_place_of_the_machine_they_come_from(name: str) -> None:
    stored = outputs(read(name))
    assert all(output.output_type != "error" and output.get("name") != "stderr" for output in stored)
    for output in stored:
        texts = [output.get("text", ""), *(v for k, v in output.get("data", {}).items() if k != "image/png")]
        assert not re.search(r"/(home|tmp|root|usr|opt|Users)/|site-packages", "".join(texts))


@pytest.mark.parametrize("name", [file.name for file in sorted(NOTEBOOKS.glob("*.ipynb"))])
def test_the_documents_that_it_names_exist(name: str) -> None:
    text = "".join(cell.source for cell in read(name).cells if cell.cell_type == "markdown")
    named = re.findall(r"`((?:docs|recipes)/[\w./-]+)`", text)
    assert named and all((ROOT / name).exists() for name in named)
