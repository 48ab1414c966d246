"""Training on rows with images, from files to held-out losses, is the same packed or not."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from transformers import DiffusionGemmaForBlockDiffusion
from typer.testing import CliRunner

import blockdiff
from blockdiff.cli.inspect_recipe import image_text
from blockdiff.cli.main import app
from blockdiff.data.example import ExampleImage
from blockdiff.data.images import ImageReader
from blockdiff.errors import DataError, RecipeError
from blockdiff.metrics import read, reproducible
from blockdiff.sampling import Request
from tests.support.seeing import PROCESSOR, seeing_checkpoint


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that takes images of 8 x 8 pixels for each token, and rows of images beside it."""
    folder = tmp_path_factory.mktemp("images")
    file, side = seeing_checkpoint(folder / "model") / "processor_config.json", 8
    as_they_are = PROCESSOR["image_processor"] | {"do_resize": False}
    file.write_text(json.dumps(PROCESSOR | {"image_processor": as_they_are}))
    rows = []
    for number in range(6):
        noise = torch.randint(0, 256, (side * (1 + number % 2), side * 2, 3), dtype=torch.uint8)
        Image.fromarray(noise.numpy()).save(folder / f"{number}.png")
        rows.append({"prompt": "a" * number, "response": "b" * (3 + number), "images": [f"{number}.png", "0.png"]})
    rows.append({"prompt": "no picture", "response": "c"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def recipe(base: Path, output: Path, images: str = "trained", **sections: dict) -> dict:
    data = {"train": str(base / "rows.jsonl"), "heldout": str(base / "rows.jsonl"), "cache": "off"}
    train = {"steps": 1, "batch_size": 3, "log_every": 1, "eval_every": 1}
    return {
        "model": {"path": str(base / "model"), "images": images},
        "lora": "none",
        "data": data | sections.get("data", {}),
        "train": train | sections.get("train", {}),
        "optim": {"lr": 1e-2},
        "output": str(output),
    }


def test_training_on_images_from_files_to_held_out_losses_packed_or_not(base, tmp_path):
    runs = [blockdiff.train(recipe(base, tmp_path / str(pack), data={"pack": pack})) for pack in (None, 200)]
    one, packed = (reproducible(read(run.directory / "metrics.jsonl")) for run in runs)
    assert [record["kind"] for record in one] == ["heldout", "train", "heldout"]
    for of_one, of_packed in zip(one, packed, strict=True):
        name = {"train": "canvas_loss", "heldout": "heldout_canvas_loss"}[of_one["kind"]]
        assert of_one[name] == pytest.approx(of_packed[name], rel=1e-4)
    written = runs[0].directory / "model"
    before, after = (load_file(model / "model.safetensors") for model in (base / "model", written))
    name = next(name for name in before if "vision_tower" in name and name.endswith("q_proj.linear.weight"))
    assert not torch.equal(after[name], before[name])  # learnt through the pictures
    assert (written / "processor_config.json").is_file()
    report = json.loads((runs[0].directory / "data.json").read_text())
    assert report["train"]["sources"][0]["images"] == 12
    with pytest.raises(DataError, match=r"rows\.jsonl:1, .*model\.images"):
        blockdiff.train(recipe(base, tmp_path / "none", images="none"))


def test_sampled_prompts_of_a_run_from_a_preset_see_their_images(base, tmp_path):
    shutil.copytree(base / "model", tmp_path / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors"))
    wanted = recipe(base, tmp_path / "run")
    del wanted["lora"]
    wanted["model"] = {"preset": str(tmp_path / "tokenizer" / "config.json"), "tokenizer": str(tmp_path / "tokenizer")}
    wanted["model"]["images"] = "trained"
    wanted["evaluation"] = {"prompts": str(base / "rows.jsonl"), "prompts_count": 2}
    wanted["generation"] = {"max_steps": 1}
    run = blockdiff.train(wanted)
    assert [each["finish_reason"] == "error" for each in read(run.directory / "samples.jsonl")] == [False, False]
    preset = [str(tmp_path / "made"), "--tokenizer", str(tmp_path / "tokenizer")]
    assert CliRunner().invoke(app, ["init", "pixel-sudoku", *preset]).exit_code == 0
    assert all((made / "processor_config.json").is_file() for made in (run.directory / "model", tmp_path / "made"))


def test_adapters_from_rows_with_images_are_sampled_merged_and_loaded_by_transformers(base, tmp_path):
    asked = recipe(base, tmp_path / "run", images="frozen") | {"lora": {"rank": 2}}
    blockdiff.train(asked)
    merged = blockdiff.export(tmp_path / "run", tmp_path / "merged")
    requests = [Request(0, prompt="ab", images=[base / "1.png"], max_new_tokens=4)]
    answers = [blockdiff.Sampler.from_pretrained(each).generate(requests) for each in (tmp_path / "run", merged)]
    assert answers[0][0].tokens == answers[1][0].tokens
    kept, before = load_file(merged / "model.safetensors"), load_file(base / "model" / "model.safetensors")
    tower = [name for name in before if "vision" in name]
    assert tower and all(torch.equal(kept[name], before[name]) for name in tower)
    _, loading = DiffusionGemmaForBlockDiffusion.from_pretrained(merged, output_loading_info=True)
    assert not any(loading.values())


def test_inspect_shows_the_images_of_a_row_beside_it(base, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(base, tmp_path / "run", data={"pack": 200}, train={"batch_size": 7})))
    said = CliRunner().invoke(app, ["inspect", str(path)]).stdout
    assert "12 images of 30 tokens" in said and "6 different images" in said
    assert said.count("‹|image›‹image of") == said.count("  image at column") == 12
    assert "3.png, 16 x 16, 4 tokens" in said
    reader = ImageReader(base / "model", (0, 1, 2))
    Image.fromarray(np.array([[[255, 0, 0]], [[0, 0, 255]]], dtype=np.uint8)).save(base / "two.png")
    text = image_text(reader, 2, ExampleImage("two.png", 2, 1, b""), f"{base}/rows.jsonl:1", is_terminal=True)
    assert text.plain.endswith("1 x 2, 1 tokens\n  ▀") and str(text.spans[-1].style) == "#ff0000 on #0000ff"


def test_adapters_of_the_image_side_train_alone(base, tmp_path):
    lora = {"lora": {"parts": {"images": 2}}}
    run = blockdiff.train(recipe(base, tmp_path / "run", images="frozen") | lora)
    adapter = load_file(run.directory / "adapter" / "adapter_model.safetensors")
    assert adapter and all("vision" in name for name in adapter)
    assert all(tensor.any() for tensor in adapter.values())


@pytest.mark.parametrize(
    ("images", "sections", "message"),
    [
        ("none", {"lora": {"parts": {"images": 2}}}, "lora.parts: images adapts"),
        ("trained", {"lora": 2}, "model.images: trained"),
    ],
)
def test_recipes_whose_image_side_cannot_work_are_refused_in_one_line(images, sections, message, base, tmp_path):
    with pytest.raises(RecipeError, match=re.escape(message)):
        blockdiff.train(recipe(base, tmp_path / "run", images) | sections)
