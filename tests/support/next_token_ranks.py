"""Next tokens over the four ranks of `test_tensor.py`."""

from __future__ import annotations

from pathlib import Path

from torch.distributed.device_mesh import init_device_mesh

from blockdiff.parallel.ranks import Ranks
from blockdiff.parallel.tensor import tensor_parallel
from blockdiff.sampling import Generation, Request, Sampler
from blockdiff.sampling.strategies import NextToken
from tests.support.families import small_model


def next_tokens(ranks: Ranks, directory: Path) -> None:
    """A group of all ranks, and groups of two, give the tokens of one process."""
    settings = Generation(max_new_tokens=5, eos_ids=(2,), pad_id=0)
    requests = [Request(n, tokens=list(range(5, 9 + 5 * n))) for n in range(2)]
    meshes = init_device_mesh("cpu", (ranks.world,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    models = [small_model("llama") for _ in range(3)]
    for model, mesh in zip(models, meshes, strict=False):
        tensor_parallel(model, mesh)
    for strategy in (NextToken(), NextToken(1.5, top_k=7)):
        of_models = [
            [each.tokens for each in Sampler(model, None, settings, strategy=strategy).generate(requests, seed=4)]
            for model in models
        ]
        assert of_models[0] == of_models[1] == of_models[2]
        assert not strategy.temperature or all(len(set(tokens)) > 1 for tokens in of_models[0])
