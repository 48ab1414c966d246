"""The wheel: everything a user needs is inside, and it works from any directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A wheel built from a copy of the sources, unpacked: what `pip install .` puts in place."""
    source = tmp_path_factory.mktemp("source")
    for folder in ("blockdiff", "cli", "docs", "recipes"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    build = [sys.executable, "-m", "pip", "wheel", "-q", *offline, "--wheel-dir", source / "dist", source]
    subprocess.run(build, check=True)
    place = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(next((source / "dist").glob("blockdiff-*.whl"))) as wheel:
        wheel.extractall(place)
    return place


def test_the_wheel_holds_every_module_preset_template_and_the_licence(installed):
    def files(folder: Path, *suffixes: str) -> set[str]:
        found = {f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.suffix in suffixes}
        return {name for name in found if "__pycache__" not in name}

    inside = installed / "blockdiff"
    package = {file.suffix for file in (ROOT / "blockdiff").rglob("*") if file.is_file()} - {".pyc"}
    assert files(ROOT / "blockdiff", *package) <= files(inside, *package)
    of_recipes = (".py", ".json", ".yaml", ".sh")
    assert files(ROOT / "cli", ".py") == files(inside / "cli", ".py")
    assert files(ROOT / "recipes", *of_recipes) == files(inside / "recipes", *of_recipes)
    assert files(ROOT / "docs", ".md") == files(inside / "docs", ".md")
    assert (inside / "py.typed").exists()
    assert list(installed.glob("blockdiff-*.dist-info/licenses/LICENSE"))
    assert sorted(p.name for p in installed.iterdir() if p.suffix != ".dist-info") == ["blockdiff"]


def test_the_command_runs_from_the_wheel_in_any_directory(installed, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    where = "import blockdiff.cli.main as m, blockdiff.checkpoint as c; print(m.__file__, c.presets())"
    for command in ([sys.executable, "-m", "blockdiff", "--help"], [sys.executable, "-c", where]):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert str(installed / "blockdiff") in "".join(done.stdout.split())
    assert "sudoku4" in done.stdout
