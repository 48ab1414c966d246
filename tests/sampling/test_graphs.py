"""Captured steps: whatever is replayed, requests get the answers that they get where every step is launched anew."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from blockdiff.checkpoint import init
from blockdiff.checkpoint.generation import Generation
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.kernels import Kernels
from blockdiff.models.stored import forms_of
from blockdiff.parallel.tensor_vocabulary import SharedRows
from blockdiff.sampling import DiffusionSettings
from blockdiff.sampling import engine as engines
from blockdiff.sampling import graphs as capturing
from blockdiff.sampling.control import Control
from blockdiff.sampling.engine import Engine
from blockdiff.sampling.graphs import BrokenCapture, CudaCapture, Graphs, HostCopy
from blockdiff.sampling.prepare import prepare_sequences
from blockdiff.sampling.request import Request, Result
from blockdiff.sampling.strategies import Ancestral, Composed, EntropyBound
from blockdiff.sampling.strategy import Canvases, Decision, Shape, captured_shape
from tests.support.oracle import TWO_LAYERS, oracle, ours, tiny_config
from tests.support.recorder import Recorder, Refused
from tests.support.rounded import rounded
from tests.support.soak import soak

pytestmark = pytest.mark.quick

L, V = 8, 384
LIVELY = Generation(
    max_steps=12, max_new_tokens=2 * L, stability=1, confidence=0.08, entropy_bound=1.0, eos_ids=tuple(range(1, 9))
)
BUCKETS = (1, 2, 4, 8)


def small_model(seed: int = 3) -> Any:
    """A random model in fp64, whose answers no rounding of another batch can change."""
    theirs = oracle(tiny_config(L, **TWO_LAYERS), seed)
    with torch.no_grad():  # as in test_parity: a weaker signal keeps random weights from being chaotic
        theirs.model.decoder.self_conditioning.down_proj.weight *= 0.1
        theirs.model.decoder.norm.weight *= 2
    return ours(theirs)


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Steps are recorded, and attention reads block tables, as on a GPU."""
    recorder = Recorder()
    monkeypatch.setattr(engines, "step_capture", lambda model: recorder)
    monkeypatch.setattr("blockdiff.kernels.span_attention.torch.SMALL_SCORES", -1)  # which looks for empty rows
    return recorder


def requests_of(count: int, longest: int = 60, **settings: Any) -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [
        Request(n, tokens=torch.randint(12, V, (length,), generator=generator).tolist(), seed=n, **settings)
        for n, length in enumerate(lengths)
    ]


def answers(model: Any, requests: list[Request], graphs: bool, **options: Any) -> dict[str | int, Result]:
    """The answers of an engine to requests that come one after the other while others run."""
    options = dict(generation=LIVELY, page_tokens=8, max_rows=5, buckets=BUCKETS) | options
    engine = Engine(model, options.pop("tokenizer", None), graphs=graphs, **options)
    results = {}
    for request in requests:
        engine.submit(request)
        engine.step()
        results |= {event.id: event for event in engine.events() if isinstance(event, Result)}
    while engine.step():
        results |= {event.id: event for event in engine.events() if isinstance(event, Result)}
    return results | {event.id: event for event in engine.events() if isinstance(event, Result)}


def same_answers(model: Any, requests: list[Request], recorder: Recorder, **options: Any) -> dict[str | int, Result]:
    """The answers, which must be the same from steps that are launched anew and from replayed ones."""
    expected = answers(model, requests, False, **options)
    assert recorder.runs == 0 and all(result.error is None for result in expected.values())
    assert answers(model, requests, True, **options) == expected
    assert recorder.captures and recorder.replays > recorder.captures
    return expected


def test_rows_that_come_and_go_get_the_same_answers_from_replayed_steps(model, recorder):
    requests = [replace(each, max_steps=12 - each.seed % 3) for each in requests_of(7)]
    found = same_answers(model, requests, recorder)
    assert len({count for result in found.values() for count in result.steps}) > 3
    assert recorder.captures > 3 and recorder.replays > 3 * recorder.captures  # of rows and of tables


def test_rows_are_padded_to_few_counts(model, recorder):
    engine = Engine(model, None, LIVELY, max_rows=6, buckets=(4, 8))
    for request in requests_of(7):
        engine.submit(request)
    while engine.step():
        pass
    assert {rows for rows, *_ in engine._graphs.keys} == {4, 8} and engine.denoised_canvases % 4 == 0


RULES = (
    "quota:confidence=0",
    "confident:threshold=0.01,confidence=inf",
    "entropy_bound:stability=0,t_min=0.7,t_max=0.7",
    "ddim",
    "confident:threshold=0.01,top_k=20,min_p=0.02",
    "sequential:confidence=0,greedy=true",
)


def test_weights_in_four_bits_are_replayed(recorder):
    kernels = Kernels("torch", expert_mlp="triton")  # torch reads on the host how many tokens an expert has
    config = tiny_config(L, num_hidden_layers=1, layer_types=["full_attention"], num_experts=2)
    four_bits = rounded(init(config, seed=3, device="cpu", kernels=kernels), "nvfp4")
    assert forms_of(four_bits) == ("fp8", "nvfp4")
    same_answers(four_bits, requests_of(1, 9, max_steps=3, max_new_tokens=L), recorder, max_rows=1, buckets=(1,))


@pytest.mark.parametrize("rule", RULES)
def test_other_rules_are_replayed_as_well(model, recorder, rule):
    same_answers(model, requests_of(2, max_steps=9), recorder, strategy=rule)


HOLDS = {
    "templates": [{"template": "ab<?20>c<?7>"}, {"template": "c<?9>"}],
    "banned tokens and penalties": [{"banned": (20, 21), "repetition_penalty": 1.3}, {"banned": (21, 20)}],
    "constraints": [{"regex": "(ab|c){12,30}"}, {"regex": "(ab|c){12,30}", "repetition_penalty": 3.0}],
    "constraints of several sizes": [{"regex": "(abc?){9}d"}, {"regex": "[ab]+", "template": "<?12>"}],
}


@pytest.mark.parametrize(
    "diffusion", [None, DiffusionSettings(corruption="mask", mask_id=13)], ids=["uniform noise", "mask noise"]
)
@pytest.mark.parametrize("kind", HOLDS)
def test_rows_that_are_held_alike_are_replayed_with_what_holds_each(model, recorder, kind, diffusion):
    tokenizer = character_tokenizer("abcd")
    requests = [
        replace(each, max_steps=6 - n % 2, max_new_tokens=4 * L, **HOLDS[kind][n // 2 % 2])
        for n, each in enumerate(requests_of(5))
    ]
    settings = replace(LIVELY, eos_ids=(1,), pad_id=0)
    found = same_answers(
        model,
        requests,
        recorder,
        tokenizer=tokenizer,
        generation=settings,
        diffusion=diffusion,
        strategy="quota:confidence=0",
    )
    assert len({tuple(result.tokens) for result in found.values()}) == 5


def test_rows_that_are_held_by_several_things_run_as_they_are(model, recorder):
    requests = [replace(each, banned=(30 + each.seed,), max_steps=4) for each in requests_of(2)]
    assert len(answers(model, [replace(each, max_new_tokens=L) for each in requests], True, max_rows=2)) == 2
    assert recorder.runs < 8  # only where one was left


@pytest.mark.parametrize(
    "rule", [None, "confident:threshold=0.9,confidence=0,greedy=true", "joint_threshold:edit_threshold=0.01"]
)
def test_masks_are_replayed(model, recorder, rule):
    masks = DiffusionSettings(corruption="mask", mask_id=7)
    same_answers(model, requests_of(2), recorder, diffusion=masks, strategy=rule)


def test_the_set_of_tokens_that_is_read_under_mask_noise_keeps_its_address(model):
    kept = model.vocabulary.all_but(7, model.device)
    assert all(model.vocabulary.all_but(token, model.device) is not kept for token in range(8, 20))
    assert model.vocabulary.all_but(7, model.device) is kept


def test_drafts_are_seen_at_the_first_replayed_step_alone(model, recorder):
    found = []
    for graphs in (False, True):
        engine = Engine(model, None, LIVELY, page_tokens=8, buckets=BUCKETS, graphs=graphs)
        for request in requests_of(2, max_steps=10):
            [asked] = prepare_sequences(request, engine.settings)
            asked.control = Control(L, 2 * L, 10, model.device, start=[30, 40] * L, noise=0.25)
            engine.enter([asked])
        while engine.step():
            pass
        found.append([event for event in engine.events() if isinstance(event, Result)])
    assert found[0] == found[1] and all(max(result.steps) <= 2 for result in found[0])
    assert recorder.replays


def test_what_cannot_be_captured_runs_beside_what_can_and_every_answer_is_the_oracles(model, recorder):
    """Filters, constraints, rows that are watched or cancelled, one after the other."""
    found = soak(model, 40, buckets=BUCKETS, max_rows=1, capacity=15 * L)
    assert found.wrong == [] and found.leaked == 0 and found.cancelled
    assert recorder.replays > 10


def test_rows_of_several_strategies_run_as_they_are_until_those_of_one_are_left(model, recorder):
    rules = {0: "ddim", 1: "entropy_bound:top_k=20", 2: "quota"}
    requests = [replace(each, strategy=rules.get(each.seed), max_steps=9) for each in requests_of(6)]
    same_answers(model, requests, recorder, max_rows=2)


def test_logits_that_are_not_finite_end_a_request_within_replayed_steps(recorder):
    model = small_model()
    engine = Engine(model, None, replace(LIVELY, confidence=1e-9), page_tokens=8, graphs=True)
    for request in requests_of(2):
        engine.submit(request)
    while recorder.replays < 2:
        engine.step()
    with torch.no_grad():
        model.vocabulary.table.fill_(torch.nan)  # what is replayed reads the weights as they are
    while engine.step():
        pass
    errors = [event.error for event in engine.events() if isinstance(event, Result)]
    assert ["not finite" in str(error) and "canvas 1, step 4" in str(error) for error in errors] == [True, True], errors


def test_the_host_waits_for_no_step_at_which_nothing_can_end(model, recorder, monkeypatch):
    reads = []
    read = HostCopy.read
    monkeypatch.setattr(HostCopy, "read", lambda copy, count: (reads.append(count), read(copy, count))[1])
    [request] = requests_of(1, max_steps=6)
    settings = replace(LIVELY, eos_ids=())
    engine = Engine(model, None, settings, strategy=Composed(confidence=0), graphs=True)
    engine.submit(request)
    while engine.step():
        pass
    assert reads == [1, 1] and recorder.replays >= 9  # the last step of each canvas


# -- what is captured ----------------------------------------------------------------------------------------------


class Own(EntropyBound):
    """A rule of somebody's own, which may do anything."""


@dataclass(frozen=True)
class Reading(EntropyBound):
    """One that reads a value on the host, although it says that it can be captured."""

    is_capturable = True

    def accept(self, canvases: Canvases) -> Decision:
        """As the other, unless the entropy is high."""
        if float(canvases.stats.entropy.mean()) > 1e9:
            raise AssertionError
        return super().accept(canvases)


def test_only_a_strategy_that_says_so_itself_is_captured():
    assert captured_shape(Composed(), 8) == Shape(1.0) and captured_shape(Composed(Own()), 8) is None


@dataclass(frozen=True)
class Narrowing(Composed):
    """A strategy whose filter is another one in every step."""

    is_capturable = True

    def shape(self, step: int, steps: int) -> Shape:
        """Fewer tokens in every step."""
        return replace(super().shape(step, steps), top_k=steps - step)


def test_what_is_the_same_in_every_step_but_for_the_temperature_is_captured():
    filtered = Composed(top_k=3, top_p=0.9, min_p=0.01)
    assert captured_shape(filtered, 8) == captured_shape(filtered, 9) == Shape(1.0, 3, 0.9, 0.01)
    assert captured_shape(Narrowing(), 8) is None
    assert captured_shape(Ancestral(), 8) == Shape(1.0)


def test_top_p_is_captured_where_a_kernel_finds_its_tokens(recorder):
    model = init(tiny_config(L, **TWO_LAYERS), seed=3, kernels="triton")
    top_p = Shape(1.0, top_p=0.9)
    for kernels, is_taken in ((model.kernels, True), (model.kernels.replaced(token_stats="torch"), False)):
        model.kernels = kernels
        batch = Engine(model, None, LIVELY, page_tokens=8, graphs=True)._proposer
        assert batch.can_capture(top_p) is is_taken and batch.can_capture(Shape(1.0, 20, min_p=0.1))


def test_a_strategy_that_reads_on_the_host_is_noticed(model, recorder):
    with pytest.raises(Refused, match="_local_scalar_dense"):
        answers(model, requests_of(1), True, strategy=Composed(Reading()))


def test_graphs_are_refused_where_there_are_none_and_left_out_where_nobody_asks(model):
    with pytest.raises(ValueError, match=r"^graphs: "):
        Engine(model, None, LIVELY, graphs=True)
    assert not Engine(model, None, LIVELY).captures


@pytest.mark.parametrize(
    ("backend", "gathered_on", "is_captured"), [("nccl", None, 1), ("gloo", None, 0), ("nccl", "cuda", 0)]
)
def test_a_model_over_the_ranks_of_tensor_parallelism_is_captured_where_nccl_exchanges(
    monkeypatch, backend, gathered_on, is_captured
):
    vocabulary = SimpleNamespace(split=SharedRows("the ranks", 0))
    part = torch.zeros(1)
    part.device_mesh = "as a DTensor has"
    model = SimpleNamespace(
        device=torch.device("cuda"), kinds={}, kernels=SimpleNamespace(is_capturable=True), parameters=lambda: [part],
        vocabulary=vocabulary, gathered_on=gathered_on,
    )  # fmt: skip
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: backend)
    monkeypatch.setattr(capturing, "CudaCapture", lambda device: "captures")
    assert capturing.step_capture(model) == ("captures" if is_captured else None)


class Broken(Recorder):
    """Captures nothing, and perhaps cannot even end a capture."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.error = error

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """As CUDA does with a forbidden operation."""
        self.captures += 1
        raise self.error("operation not permitted when stream is capturing\nat some place")


@pytest.mark.parametrize("error", [RuntimeError, BrokenCapture])
def test_what_turns_out_not_to_be_capturable_runs_as_it_is_with_one_warning(model, recorder, monkeypatch, error):
    """After a capture that could not be ended nothing runs where it was made."""
    requests, broken = requests_of(3), Broken(error)
    expected = answers(model, requests, False)
    monkeypatch.setattr(engines, "step_capture", lambda model: broken)
    with pytest.warns(UserWarning, match="without CUDA graphs: operation not permitted when .* capturing;") as all_:
        assert answers(model, requests, True) == expected
    assert broken.captures == 1 and (broken.runs > 10 if error is RuntimeError else broken.runs < 5)
    assert sum("CUDA graphs" in str(each.message) for each in all_) == 1


def test_graphs_that_were_not_used_for_longest_are_forgotten():
    recorder, done = Recorder(), torch.zeros(3)
    graphs = Graphs(recorder, most=2)
    for key in (0, 0, 1, 1, 0, 2, 2, 1):  # 1 has made room for 2
        graphs.run(key, lambda key=key: done[key].add_(1))
    assert done.tolist() == [3, 3, 2]
    assert (recorder.runs, recorder.captures, recorder.replays) == (4, 3, 4)


# -- the recorder --------------------------------------------------------------------------------------------------


def test_a_recording_changes_nothing_and_a_replay_sees_buffers_and_no_numbers():
    x, y, number, recorder = torch.ones(3), torch.zeros(3), 2, Recorder()
    left: list[Tensor] = []

    def work() -> None:
        left.append(x * number)
        y.add_(left[-1])

    replay = recorder.capture(work)
    assert y.tolist() == [0, 0, 0] and left[0].isnan().all()
    number, _ = 3, x.fill_(5)
    replay()
    assert y.tolist() == [10, 10, 10] and left[0].isnan().all()
    for forbidden in (lambda: x.sum().item(), lambda: x[x > 0], lambda: torch.tensor([1.0]), lambda: x.nonzero()):
        with pytest.raises(Refused):
            recorder.capture(forbidden)


def test_the_stream_is_the_one_of_before_when_a_capture_fails_at_its_end(monkeypatch):
    """torch's own context ends the capture first and does not come to the stream where that raises.

    Before it begins the thread has a handle of cuBLAS for the stream that captures.
    """
    streams, handles = ["of the thread"], []

    @contextlib.contextmanager
    def on(stream: str) -> Iterator[None]:
        streams.append(stream)
        yield
        streams.pop()

    class Capturing:
        def __init__(self, graph: Any, stream: str, **_: Any) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            assert handles == [self.stream]
            streams.append(self.stream)

        def __exit__(self, *_: Any) -> None:
            raise RuntimeError("the capture was invalidated")

    stood_in = dict(
        device=lambda _: contextlib.nullcontext(), Stream=lambda: "captures", graph_pool_handle=lambda: (0, 0),
        CUDAGraph=object, graph=Capturing, current_stream=lambda: streams[-1], set_stream=streams.append,
        stream=on, current_blas_handle=lambda: handles.append(streams[-1]),
    )  # fmt: skip
    for name, value in stood_in.items():
        monkeypatch.setattr(torch.cuda, name, value)
    with pytest.raises(BrokenCapture, match="invalidated"):
        CudaCapture(torch.device("cuda")).capture(lambda: None)
    assert streams == ["of the thread", "captures", "of the thread"]


# -- the kernels of a GPU ------------------------------------------------------------------------------------------


ON_A_GPU = {
    "free": {},
    "filtered": {"strategy": "entropy_bound:top_k=30"},
    "held": {"banned": (20, 21), "repetition_penalty": 1.3},
    "constrained": {"regex": "(ab|c){3,30}"},
}


def without_waiting(run: Callable[..., None]) -> Callable[..., None]:
    """The same, in which whatever makes the host wait for the device raises."""

    def checked(*arguments: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return checked


def both_ways(model: Any, kind: str, checked: Callable[..., Any] = lambda run: run) -> None:
    """Requests that come one after the other get the same answers from captured steps and from those launched anew.

    checked: wraps the function that runs a step.
    """
    options = dict(max_rows=5, capacity=8192)  # else the pages of the first would take the memory of the second
    options |= dict(tokenizer=character_tokenizer("abcd"), generation=replace(LIVELY, eos_ids=(1,), pad_id=0))
    engine = Engine(model, **options)
    replays = []
    capture = engine._proposer.graphs._captured
    engine._proposer.graphs._captured = lambda *how: replays.append(capture(*how)) or replays[-1]
    called = Engine(model, **options)
    called._proposer.graphs._is_refused = True  # padded as what is captured: other shapes may round otherwise
    for each in (called, engine):
        each._proposer.graphs.run = checked(each._proposer.graphs.run)
        for request in requests_of(7, 500, **ON_A_GPU[kind]):  # up to four pages, and so block tables of several widths
            each.submit(request)
            each.step()
        while each.step():
            pass
    eager, captured = ([event for event in each.events() if isinstance(event, Result)] for each in (called, engine))
    assert len(eager) == 7 and eager == captured and len(replays) > 2 and all(replays)


@pytest.mark.parametrize("kind", ON_A_GPU)
def test_captured_steps_give_the_tokens_of_steps_that_are_launched_anew(model, recorder, kind):
    both_ways(model, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ON_A_GPU)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_on_a_gpu_give_the_tokens_of_steps_that_are_launched_anew(dtype, kind):
    if "regex" in ON_A_GPU[kind]:
        pytest.importorskip("outlines_core")  # which `make gpu` does not need
    both_ways(
        init(tiny_config(L, **TWO_LAYERS), seed=3, device="cuda", kernels="auto", dtype=dtype), kind, without_waiting
    )
