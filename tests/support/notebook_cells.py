"""The cells of a notebook, executed as Jupyter's kernel executes them, in the process that this is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import nbformat
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output


class Shell(InteractiveShell):
    """IPython without a terminal: figures are shown inline, and no window needs an event loop."""

    def enable_gui(self, gui: str | None = None) -> None:
        """Nothing to enable."""


def execute(notebook: Path, folder: Path) -> None:
    """Run the cells of code from top to bottom in `folder`, whose outputs.json then lists what they showed.

    A list of three: what was printed, what went to stderr, and the number of pictures. Raises what a cell raises.
    """
    os.chdir(folder)
    shell: Any = Shell.instance()
    shell.enable_matplotlib("inline")
    printed, errors, pictures = "", "", 0
    for cell in nbformat.read(notebook, as_version=4).cells:
        if cell.cell_type == "code":
            with capture_output() as shown:
                result = shell.run_cell(cell.source)
                shell.events.trigger("post_execute")
            result.raise_error()
            printed, errors = printed + shown.stdout, errors + shown.stderr
            pictures += sum("image/png" in each.data for each in shown.outputs)
    (folder / "outputs.json").write_text(json.dumps([printed, errors, pictures]), encoding="utf-8")
