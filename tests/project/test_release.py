"""Builds for others: the release, the image, the reference."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import blockdiff

ROOT = Path(__file__).resolve().parents[2]
PAGES = "'blockdiff', 'blockdiff.errors'"  # of the reference; all of them take some seconds
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of what a release is built from."""
    for folder in ("blockdiff", "cli", "docs", "recipes"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    files = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "constraints.txt")
    for file in (*files, "Makefile", "CHANGELOG.md"):
        shutil.copy(ROOT / file, tmp_path)
    return tmp_path


def release(sources: Path) -> subprocess.CompletedProcess[str]:
    words = ["make", "release", f"PY={sys.executable}", "INSTALLED="]
    return subprocess.run(words, cwd=sources, capture_output=True, text=True, timeout=600)


def test_a_release_needs_the_section_of_its_version_and_builds_wheel_and_sdist_of_it(sources: Path) -> None:
    changes = sources / "CHANGELOG.md"
    text = changes.read_text()
    changes.write_text(re.sub(r"^## .*", "## Unreleased", text, count=1, flags=re.M))
    refused = release(sources)
    assert refused.returncode and "begins with '## Unreleased', not with '## " in refused.stderr
    assert not (sources / "dist").exists()
    version = "7.8.9"
    init = sources / "blockdiff" / "__init__.py"
    init.write_text(init.read_text().replace(f'"{blockdiff.__version__}"', f'"{version}"'))
    changes.write_text(re.sub(r"^## .*", f"## {version} - 2030-01-01", text, count=1, flags=re.M))
    done = release(sources)
    assert done.returncode == 0, done.stderr
    wheel, sdist = sorted((sources / "dist").iterdir(), key=lambda path: path.suffix != ".whl")
    assert (wheel.name, sdist.name) == (f"blockdiff-{version}-py3-none-any.whl", f"blockdiff-{version}.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(sources / "unpacked", filter="data")
    unpacked = sources / "unpacked" / f"blockdiff-{version}"
    assert (unpacked / "CHANGELOG.md").read_text() == changes.read_text()
    build = "from setuptools.build_meta import build_wheel; build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=unpacked, check=True, capture_output=True)
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(unpacked / wheel.name) as other:
        of_attention = {f"kernels/span_attention/{name}" for name in ("blocks.h", "backward.c")}
        data = {
            "recipes/presets/tiny.json",
            "kernels/loops.h",
            "kernels/norm_rope/norm_rope.c",
            "serving/page.js",
            *of_attention,
        }
        assert set(one.namelist()) == set(other.namelist()) >= {f"blockdiff/{name}" for name in data}


@pytest.mark.quick
def test_the_version_stands_in_one_place() -> None:
    assert "version" in PROJECT["dynamic"]
    assert blockdiff.__version__ in (ROOT / "blockdiff" / "__init__.py").read_text()


@pytest.mark.quick
def test_the_image_copies_what_an_install_needs_and_installs_this_package_on_a_python_it_allows() -> None:
    lines = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text()).splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    python = next(re.search(r"python:(\d+)\.(\d+)", rest) for word, rest in steps if word == "FROM")
    least = re.search(r">=(\d+)\.(\d+)", PROJECT["requires-python"])
    assert python and least and tuple(map(int, python.groups())) >= tuple(map(int, least.groups()))
    copied = {name for word, rest in steps if word == "COPY" for name in rest.split()[:-1]}
    setup = ast.parse((ROOT / "setup.py").read_text())
    (beside,) = (each.value for each in ast.walk(setup) if isinstance(each, ast.keyword) and each.arg == "package_dir")
    folders = {"blockdiff", *ast.literal_eval(beside).values()}
    assert copied == {*folders, "pyproject.toml", "setup.py", "constraints.txt", PROJECT["readme"], "LICENSE"}
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == allowed and all((ROOT / name).exists() for name in copied)
    (install,) = (rest for word, rest in steps if word == "RUN" and "pip install" in rest)
    assert install.endswith('pip install --no-cache-dir --constraint constraints.txt $index ".[serve]"')
    assert json.loads(dict(steps)["ENTRYPOINT"]) == [*PROJECT["scripts"]]
    assert "DEVICE=cpu" in dict(steps)["ARG"]
    (compiler,) = (rest for word, rest in steps if word == "RUN" and " gcc " in rest)
    assert "DEVICE" not in compiler  # the C functions are for a CPU
    variables = dict(each.split("=") for word, rest in steps if word == "ENV" for each in rest.split())
    caches = {name: place for name, place in variables.items() if name not in ("HOME", "USER")}
    assert {"XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR"} <= caches.keys()
    assert all(place.startswith(f"{dict(steps)['WORKDIR']}/") for place in caches.values())


@pytest.mark.quick
def test_every_development_tool_has_an_exact_version() -> None:
    lines = (ROOT / "constraints.txt").read_text().lower().replace("_", "-").splitlines()
    pinned = {line.partition("==")[0] for line in lines}
    extras = PROJECT["optional-dependencies"]
    asked = [*PROJECT["dependencies"], *extras["serve"], *extras["dev"]]
    names = {re.match(r"[\w-]+", each)[0].lower().replace("_", "-") for each in asked}  # type: ignore[index]
    assert names - pinned <= {"triton", "blockdiff"}  # the file says why; extras name the package


def test_the_reference_shows_every_public_name_with_its_docstring_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    words = ["-W", "error::UserWarning:pdoc", "-c", f"import reference; reference.write({str(tmp_path)!r}, {PAGES})"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=600, cwd=ROOT / "docs")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "blockdiff.html").read_text()
    for name in blockdiff.__all__:
        assert f'id="{name}"' in page, name
        sentence = re.split(r"[:`.('<]", getattr(blockdiff, name).__doc__ or "")[0]
        assert " ".join(sentence.split()) in " ".join(page.split()) or name == "__version__", name
    for file in tmp_path.glob("*.html"):
        for link in re.findall(r'href="([^"#:]+\.html)', file.read_text()):
            assert (file.parent / link).exists(), (file.name, link)
