"""Experts in torch: every activation, the path of a GPU run on the CPU, and padding that goes to no expert."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from blockdiff.errors import BlockdiffError
from blockdiff.kernels import IN_C, IN_TORCH
from blockdiff.kernels.c_library import serves
from blockdiff.kernels.expert_mlp import c as in_c
from blockdiff.kernels.expert_mlp import torch as in_torch
from blockdiff.kernels.expert_mlp.activations import ACTIVATIONS
from blockdiff.spans import Spans, denoise_spans, encode_spans
from tests.oracles import expert_mlp as reference
from tests.support.closeness import relative_error
from tests.support.oracle import oracle, ours

pytestmark = pytest.mark.quick

ALL = (True,) * 4
DTYPES = [(torch.float64, 1e-12), (torch.float32, 3e-6)]


def case(N: int, E: int, k: int, D: int = 12, F: int = 8) -> tuple[list[Tensor], Tensor]:
    """x, gate_up, down and routing weights in fp64, and which experts; a third of the tokens are padding."""
    g = torch.Generator().manual_seed(N + 10 * E + k)
    shapes = (N, D), (E, 2 * F, D), (E, D, F), (N, k)
    tensors = [torch.randn(*shape, generator=g, dtype=torch.float64) for shape in shapes]
    index = torch.rand(N, max(E, k), generator=g).argsort(-1)[:, :k]
    return tensors, torch.where(torch.rand(N, 1, generator=g) < 0.3, E, index).clamp(max=E)


def compare(
    tensors: list[Tensor], index: Tensor, dtype: torch.dtype, tolerance: float, needs=ALL, activation="gelu_tanh"
) -> None:
    mine, truth = (
        [t.to(d).requires_grad_(need) for t, need in zip(tensors, needs, strict=True)] for d in (dtype, torch.float64)
    )
    outs = []
    for op, (x, gate_up, down, weight) in ((in_torch.expert_mlp, mine), (reference.expert_mlp, truth)):
        outs.append(op(x, gate_up, down, index, weight, activation))
        direction = torch.randn(outs[0].shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        (outs[-1] * direction).sum().backward()
    assert outs[0].dtype == dtype and relative_error(*outs) < tolerance
    for x, y in zip(mine, truth, strict=True):
        assert (x.grad is None) == (y.grad is None) and (x.grad is None or relative_error(x.grad, y.grad) < tolerance)


# -- activations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype,tolerance", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_matches_its_formula(activation, dtype, tolerance):
    (x, *rest), index = case(37, 3, 2)
    compare([x * 2, *rest], index, dtype, tolerance, activation=activation)
    if activation == "swiglu_oai":  # both sides of its clamps are met
        gate, up = (x * 2 @ rest[0][0].T).chunk(2, -1)
        assert (gate > 7).any() and (up > 7).any() and (up < -7).any()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_dense_path_has_every_activation(activation, monkeypatch):
    (x, gate_up, down, weight), index = case(9, 3, 2)
    monkeypatch.setattr(in_torch, "_ExpertMLP", None)
    with torch.no_grad():
        out = in_torch.expert_mlp(x * 2, gate_up, down, index, weight, activation)
    assert relative_error(out, reference.expert_mlp(x * 2, gate_up, down, index, weight, activation)) < 1e-12


def test_an_unknown_activation_names_the_known_ones():
    (x, gate_up, down, weight), index = case(3, 3, 2)
    with pytest.raises(BlockdiffError, match=r"'relu'.*gelu_tanh, silu, swiglu_oai"):
        in_torch.expert_mlp(x, gate_up, down, index, weight, "relu")


# -- the path of a GPU: no size is read back ------------------------------------------------------------------------


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots without an expert stay, and what no product writes is NaN."""
    monkeypatch.setattr(in_torch, "_trims", lambda index: False)
    new_empty, grouped_mm = Tensor.new_empty, torch.nn.functional.grouped_mm

    def grouped(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        out = grouped_mm(left, right, offs=offs)
        if right.dim() == 3:
            out[int(offs[-1]) :] = float("nan")
        return out

    monkeypatch.setattr(Tensor, "new_empty", lambda self, *s, **n: new_empty(self, *s, **n).fill_(float("nan")))
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", grouped)


@pytest.mark.parametrize("dtype,tolerance", DTYPES)  # fp32: grouped products, fp64: a loop
@pytest.mark.parametrize("N,E,k", [(0, 3, 2), (1, 1, 1), (37, 3, 2), (63, 8, 2)])
def test_without_trimming_the_result_is_the_same(as_on_a_gpu, N, E, k, dtype, tolerance):
    compare(*case(N, E, k), dtype, tolerance)
    tensors, index = case(N, E, k)
    compare(tensors, torch.full_like(index, E), dtype, tolerance)


@pytest.mark.parametrize("needs", [n for n in itertools.product([True, False], repeat=4) if any(n)])
def test_without_trimming_whatever_is_not_frozen_gets_its_gradient(as_on_a_gpu, needs):
    compare(*case(37, 3, 2), torch.float32, 3e-6, needs)


# -- padding goes to no expert -------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_padding", [True, False])
def test_a_model_sends_padding_tokens_to_no_expert_and_real_ones_where_they_were(with_padding, monkeypatch):
    model = ours(oracle())
    lengths = [20, 3 if with_padding else 20]
    tokens = torch.randint(3, 380, (2, 20), generator=torch.Generator().manual_seed(0))
    seen: list[Tensor] = []

    def spy(x_ND: Tensor, gate_up: Tensor, down: Tensor, index_Nk: Tensor, *rest: object) -> Tensor:
        seen.append(index_Nk)
        return in_torch.expert_mlp(x_ND, gate_up, down, index_Nk, *rest)

    for layer in model.layers:
        monkeypatch.setattr(layer.experts, "kernels", layer.experts.kernels.replaced(expert_mlp=spy))
    chosen: list[Tensor] = []
    for layer in model.layers:
        layer.router.register_forward_hook(lambda module, args, out: chosen.append(out[0]))
    with torch.no_grad():
        model.encode(tokens, torch.tensor(lengths))
    is_padding = (torch.arange(20) >= torch.tensor(lengths)[:, None]).flatten()
    E = model.config.experts
    assert len(seen) == len(model.layers) and is_padding.any() == with_padding
    for index_Nk, router_Nk in zip(seen, chosen, strict=True):
        assert (index_Nk[is_padding] == E).all()
        assert torch.equal(index_Nk[~is_padding], router_Nk[~is_padding])


def test_spans_know_their_padding():
    doc_start = torch.tensor([[0, 0, 2, -1], [0, -1, -1, -1]])
    expected = torch.tensor([[False, False, False, True], [False, True, True, True]])
    assert torch.equal(encode_spans(doc_start).padding_BT, expected)
    start, length = torch.tensor([[3, 9]]), torch.tensor([[2, 0]])
    canvases = denoise_spans(start, torch.zeros_like(start), length, canvas_length=3)
    assert torch.equal(canvases.padding_BT, torch.tensor([[False, False, True, True, True, True]]))
    assert encode_spans(torch.zeros(1, 4, dtype=torch.int64)).padding_BT is None
    assert Spans(canvases.bounds_BT4, sees_all=True).padding_BT is None  # promised, so it is not looked at


# -- low-rank matrices ---------------------------------------------------------------------------------------------


def low_rank_case(E: int, D: int, F: int, rank: int, dtype: torch.dtype) -> list[Tensor]:
    """A and B of gate_up, A and B of down."""
    g = torch.Generator().manual_seed(rank)
    shapes = (E, rank, D), (E, 2 * F, rank), (E, rank, F), (E, D, rank)
    return [torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("dtype,tolerance", DTYPES)
@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("module", [IN_TORCH, IN_C])
def test_low_rank_matrices_are_added_to_the_weights_of_every_expert(module, rank, dtype, tolerance, is_frozen):
    tensors, index = case(41, 5, 2)  # some experts get no token
    results = []
    for op, kind in ((module.expert_mlp, dtype), (reference.expert_mlp, torch.float64)):
        x, gate_up, down, weight = (t.to(kind) for t in tensors)
        inputs = [x.requires_grad_(), gate_up, down, weight.requires_grad_()]
        if not is_frozen:
            inputs = [tensor.requires_grad_() for tensor in inputs]
        low_rank = low_rank_case(5, 12, 8, rank, kind)
        out = op(x, gate_up, down, index, weight, low_rank=low_rank)
        (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(kind)).sum().backward()
        results.append([out, *(tensor.grad for tensor in [*inputs, *low_rank] if tensor.requires_grad)])
    assert len(results[0]) == (9 if not is_frozen else 7)
    for mine, truth in zip(*results, strict=True):
        assert relative_error(mine, truth) < tolerance * (1 if rank == 1 else 3)


@pytest.mark.parametrize("module", [IN_TORCH, IN_C])
@pytest.mark.parametrize("dtype,tolerance", DTYPES)
def test_low_rank_matrices_count_in_the_dense_products_of_few_tokens_too(module, dtype, tolerance):
    tensors, index = case(3, 5, 2)
    x, gate_up, down, weight = (t.to(dtype) for t in tensors)
    low_rank = low_rank_case(5, 12, 8, 4, dtype)
    with torch.no_grad():
        mine = module.expert_mlp(x, gate_up, down, index, weight, low_rank=low_rank)
        truth = reference.expert_mlp(*tensors[:3], index, tensors[3], low_rank=[t.double() for t in low_rank])
    assert relative_error(mine, truth) < tolerance
    assert relative_error(mine, reference.expert_mlp(x, gate_up, down, index, weight)) > 0.1


def test_frozen_tokens_get_no_gradient_and_the_matrices_over_them_do():
    (x, gate_up, down, weight), index = case(41, 5, 2)
    grads = []
    for op in (IN_C.expert_mlp, reference.expert_mlp):
        low_rank = low_rank_case(5, 12, 8, 4, torch.float32)
        op(x.float(), gate_up.float(), down.float(), index, weight.float(), low_rank=low_rank).square().sum().backward()
        grads.append([matrix.grad for matrix in low_rank])
    for mine, truth in zip(*grads, strict=True):
        assert relative_error(mine, truth) < 1e-5


@pytest.mark.parametrize("activation", in_c.KINDS)
def test_the_c_backward_makes_again_to_the_bit_what_the_forward_gave(activation):
    g = torch.Generator().manual_seed(0)
    h, again = torch.randn(37, 42, generator=g) * 3, torch.randn(37, 21, generator=g)
    weight = torch.rand(37, generator=g)
    if not serves(h):
        return  # without a compiler there is no C backward
    (gate, up), grad_h = h.chunk(2, -1), torch.empty_like(h)
    of_gate, of_up = grad_h.chunk(2, -1)
    kind, of_weight = in_c.KINDS[activation], torch.empty(37)
    in_c.call("gated_backward", again, gate, up, 37, 21, 42, weight, kind, of_gate, of_up, 42, of_weight, again)
    assert torch.equal(again, in_c._gated_halves(h, weight, kind))
