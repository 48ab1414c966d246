"""The notebook runs from top to bottom, and the copy in the repository is as it should be."""

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
NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"


class ThisPython(KernelSpecManager):
    """Whatever kernel a notebook asks for, it runs in the interpreter of the tests."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        start = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=start, display_name=kernel_name, language="python")


def read() -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def test_the_notebook_runs_and_its_model_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(folder, str(tmp_path / folder.lower()))
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = read()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    kernel = AsyncKernelManager(kernel_spec_manager=ThisPython())
    # Generous: the time limit is there for a kernel that hangs.
    NotebookClient(notebook, timeout=400, km=kernel, resources={"metadata": {"path": str(tmp_path)}}).execute()
    pictures = [output for output in outputs(notebook) if "image/png" in output.get("data", {})]
    assert len(pictures) == 4
    printed = "".join(output.get("text", "") for output in outputs(notebook))
    assert re.search(r"train: [34] of 4 solved", printed)
    assert not [output for output in outputs(notebook) if output.get("name") == "stderr"]


def test_the_stored_outputs_show_no_place_of_the_machine_they_come_from() -> None:
    stored = outputs(read())
    assert all(output.output_type != "error" and output.get("name") != "stderr" for output in stored)
    for output in stored:
        texts = [output.get("text", ""), *(v for k, v in output.get("data", {}).items() if k != "image/png")]
        assert not re.search(r"/(home|tmp|root|usr|opt|Users)/|site-packages", "".join(texts))


def test_the_documents_that_it_names_exist() -> None:
    text = "".join(cell.source for cell in read().cells if cell.cell_type == "markdown")
    named = re.findall(r"`((?:docs|recipes)/[\w./-]+)`", text)
    assert named and all((ROOT / name).exists() for name in named)
