"""Files that `auto_map` of a config.json names: carried as bytes, never imported, and told where they are missing."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest

import blockdiff
from blockdiff.checkpoint import export
from blockdiff.checkpoint.remote_code import code_files, named_code, words_of_missing

pytestmark = pytest.mark.quick
GOLDEN = Path(__file__).parents[1] / "data/families/sdar/dense"
CODE = {
    "configuration_sdar.py": b"raise SystemExit('it was imported')\n",
    "modeling_sdar.py": b"from .kernels import x\r\n\xff\x00",
    "kernels.py": b"",
}


@pytest.fixture
def released(tmp_path) -> Path:
    """A checkpoint with the code that its config names, and what that imports."""
    directory = tmp_path / "released"
    directory.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name, directory)
    for name, content in CODE.items():
        (directory / name).write_bytes(content)
    return directory


def test_checkpoints_and_exports_have_the_code_byte_for_byte(released, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        blockdiff.save(blockdiff.load(released, device="cpu", kernels="torch"), tmp_path / "saved")
        export(tmp_path / "saved", tmp_path / "exported")
    for directory in (tmp_path / "saved", tmp_path / "exported"):
        assert {file.name: file.read_bytes() for file in directory.glob("*.py")} == CODE


def test_code_that_is_named_and_missing_is_told(released, tmp_path):
    (released / "modeling_sdar.py").unlink()
    model = blockdiff.load(released, device="cpu", kernels="torch")
    with pytest.warns(UserWarning, match=r"modeling_sdar\.py \(auto_map\)"):
        blockdiff.save(model, tmp_path / "saved")


def test_code_that_a_config_does_not_name_or_that_lies_elsewhere_is_left(released):
    values = json.loads((released / "config.json").read_text())
    assert named_code(values) == ["configuration_sdar.py", "modeling_sdar.py"]
    elsewhere = {"auto_map": {"AutoModel": "owner/name--modeling_sdar.SDARModel"}}
    for others in ({}, {"auto_map": "modeling_sdar.A"}, {"auto_map": {"AutoModel": ["../x.A", 1]}}, elsewhere):
        assert code_files(others, released) == () and words_of_missing(others, ()) is None
