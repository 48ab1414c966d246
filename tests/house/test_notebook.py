"""The notebooks run from top to bottom, and the copies in the repository are as they should be."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"


class ThisPython(KernelSpecManager):
    """Whatever kernel a notebook asks for, it runs in the interpreter of the tests."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        start = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=start, display_name=kernel_name, language="python")


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOKS / name, as_version=4)


def outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


@pytest.mark.parametrize(
    ("name", "pictures", "said"),
    [
        ("quickstart.ipynb", 4, [r"train: [34] of 4 solved"]),
        ("adapt.ipynb", 0, [r"first loss: True", r"at most \de-0[5-9]", r"transformers: [12] of 2 right"]),
        ("pixel_sudoku.ipynb", 2, [r"[34] of 4 solved"]),
        ("steer.ipynb", 1, [r"entropy_bound +[34] of 4 solved", r"pinned (\d+) of \1 givens kept", r"4321[1-4]{12} "]),
    ],
)
def test_a_notebook_runs_and_its_model_learns(
    name: str, pictures: int, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(folder, str(tmp_path / folder.lower()))
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = read(name)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    kernel = AsyncKernelManager(kernel_spec_manager=ThisPython())
    # Generous: the time limit is there for a kernel that hangs.
    NotebookClient(notebook, timeout=400, km=kernel, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert sum("image/png" in output.get("data", {}) for output in outputs(notebook)) == pictures
    printed = "".join(output.get("text", "") for output in outputs(notebook))
    assert all(re.search(words, printed) for words in said)
    assert not [output for output in outputs(notebook) if output.get("name") == "stderr"]


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
