"""Two processes of which one has rows with images and the other rows of text train as one process does."""

from __future__ import annotations

import pytest

from tests.support.expert_ranks import error
from tests.support.forked import run_ranks
from tests.support.image_ranks import MESHES, everything
from tests.support.mesh_ranks import read_whole


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    directory = tmp_path_factory.mktemp("found")
    for world in (1, 2):
        run_ranks(world, everything, directory)
    return directory


@pytest.mark.parametrize("trains_images", [True, False])
@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_with_and_without_images_have_the_losses_gradients_and_weights_of_one_process(found, mesh, trains_images):
    expected = read_whole([found / f": {trains_images}: 0"])
    got = read_whole(found / f"{mesh}: {trains_images}: {rank}" for rank in (0, 1))
    assert got.keys() == expected.keys()
    assert any("image_side" in key for key in got) == trains_images
    for name, wanted in expected.items():
        assert error(got[name], wanted) < 1e-10, name


def test_a_split_model_gets_its_image_side_with_the_first_image_and_sees_as_one_process_does(found):
    (expected,) = read_whole([found / ": seen: 0"]).values()
    for name in (mesh for mesh in MESHES if mesh != "FSDP2"):
        (hidden,) = read_whole([found / f"{name}: seen: 0"]).values()
        assert error(hidden, expected) < 1e-10, name
