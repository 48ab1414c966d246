"""lm-evaluation-harness on our models: its own evaluator, tasks and metrics, on rows written here."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.registry import get_model
from typer.testing import CliRunner

from blockdiff import checkpoint
from blockdiff.checkpoint import init
from blockdiff.cli.main import app
from blockdiff.data.template import packaged_template
from blockdiff.errors import RequestError
from blockdiff.evals.lm_eval import BlockdiffLM, evaluate
from blockdiff.sampling import Generation, Request, Sampler
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.oracle import TWO_LAYERS, tiny_config

TOKENIZER = chat_tokenizer(packaged_template())
SETTINGS = Generation(max_steps=3, max_new_tokens=8, eos_ids=(1,))
ROWS = [
    {"question": "2+3=", "answer": "5", "choices": ["4", "5", "55"], "gold": 1},
    {"question": "The cat", "answer": " sat", "choices": [" sat", " cats", "."], "gold": 0},
    {"question": "Yes or no? ", "answer": "no", "choices": ["yes", "no", "nope"], "gold": 1},
]
COMMON = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
test_split: test
"""
WRITES = (
    COMMON
    + """\
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n", "0"], max_gen_toks: 16}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
)
CHOOSES = (
    COMMON
    + """\
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
)
ROLLS = (
    COMMON
    + """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}{{{{answer}}}}"
metric_list: [{{metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}}]
"""
)


@pytest.fixture(scope="module")
def sampler():
    made = init(tiny_config(canvas_length=8, **TWO_LAYERS), seed=3, device="cpu", kernels="torch")
    with torch.no_grad():
        for parameter in made.parameters():  # a fresh model finds every token about as probable as any other
            parameter.mul_(2.0)
    return Sampler(made, TOKENIZER, SETTINGS)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:2]))
    for name, text in (("writes", WRITES), ("chooses", CHOOSES), ("rolls", ROLLS)):
        (folder / f"{name}.yaml").write_text(text.format(name=name, data=data, cache=folder / "cache"))
    return folder


def tokens(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


@torch.no_grad()
def plain(model, context: list[int], continuation: list[int]) -> float:
    logits = model.unembed(model.encode(torch.tensor([context + continuation])).hidden)[0].double()
    return float(logits[len(context) - 1 : -1].log_softmax(-1)[range(len(continuation)), continuation].sum())


def instances(*arguments: tuple) -> list[SimpleNamespace]:
    return [SimpleNamespace(args=each) for each in arguments]


def test_the_harness_finds_the_model_by_its_name():
    assert get_model("blockdiff") is BlockdiffLM


def test_three_kinds_of_tasks_run_through_the_harness(sampler, tasks):
    found = evaluate(sampler, ["writes", "chooses", "rolls"], tasks, seed=3, batch_size=2)
    # What it should have written, chosen and scored, without the harness.
    asked = [Request(n, prompt=row["question"], max_new_tokens=16) for n, row in enumerate(ROWS[:2])]
    texts = [result.text.split("\n")[0].split("0")[0] for result in sampler.generate(asked, seed=3)]
    assert [sample["filtered_resps"][0] for sample in found["samples"]["writes"]] == texts
    right = [text == row["answer"] for text, row in zip(texts, ROWS, strict=False)]
    assert found["results"]["writes"]["exact_match,none"] == sum(right) / 2
    contexts = [[2, *tokens(row["question"])] for row in ROWS[:2]]
    totals = [
        [plain(sampler.model, context, tokens(choice)) for choice in row["choices"]]
        for context, row in zip(contexts, ROWS, strict=False)
    ]
    scored = [[answer[0] for answer in sample["filtered_resps"]] for sample in found["samples"]["chooses"]]
    for ours, theirs in zip(totals, scored, strict=True):
        assert theirs == pytest.approx(ours, abs=1e-4)
    best = [max(range(3), key=of.__getitem__) == row["gold"] for of, row in zip(totals, ROWS, strict=False)]
    assert found["results"]["chooses"]["acc,none"] == sum(best) / 2
    whole = [row["question"] + row["answer"] for row in ROWS[:2]]
    total = sum(plain(sampler.model, [2], tokens(text)) for text in whole)
    perplexity = found["results"]["rolls"]["byte_perplexity,none"]
    expected = torch.tensor(-total / sum(len(text.encode()) for text in whole)).exp()
    assert perplexity == pytest.approx(float(expected), rel=1e-4)
    costs = found["costs"]
    assert costs["steps_per_canvas"] > 0 and sum(costs["endings"].values()) == 2 and "empty" in costs


def test_a_continuation_is_greedy_where_every_token_is_the_most_probable(sampler):
    context = [2, *tokens("2+3=")]
    chosen: list[int] = []
    with torch.no_grad():
        for _ in range(3):
            hidden = sampler.model.encode(torch.tensor([context + chosen])).hidden
            chosen.append(int(sampler.model.unembed(hidden[:, -1]).argmax()))
    model = BlockdiffLM(sampler=sampler)
    (first, second) = model._loglikelihood_tokens([(None, context, chosen), (None, context, [5, *chosen])])
    assert first[0] == pytest.approx(plain(sampler.model, context, chosen), abs=1e-4)
    assert (first[1], second[1]) == (True, False)


def test_a_text_longer_than_the_positions_is_scored_in_windows_that_do_not_overlap(sampler, monkeypatch):
    text = "abcdefghijklmnopqrstuvwxyz" * 2
    monkeypatch.setattr(BlockdiffLM, "max_length", 16)
    (total,) = BlockdiffLM(sampler=sampler).loglikelihood_rolling(instances((text,)))
    ids = tokens(text)
    parts = [([2], ids[:16]), (ids[15:16], ids[16:32]), (ids[31:32], ids[32:48])]
    # The last window reaches back as far as it can and scores only what is left.
    parts.append((ids[-17:48], ids[48:]))
    assert total == pytest.approx(sum(plain(sampler.model, a, b) for a, b in parts), abs=1e-3)


def test_a_context_that_is_too_long_loses_its_beginning(sampler, monkeypatch, caplog):
    model = BlockdiffLM(sampler=sampler)
    monkeypatch.setattr(BlockdiffLM, "max_length", 20)
    long = "abcdefghijklmnopqrstuvwxyz"
    (found,) = model.loglikelihood(instances((long, "xyz")))
    assert found[0] == pytest.approx(plain(sampler.model, tokens(long)[-18:], tokens("xyz")), abs=1e-4)
    (text,) = model.generate_until(instances((long, {"until": [], "max_gen_toks": 8})))
    (expected,) = sampler.generate([Request(0, tokens=tokens(long)[-12:])], max_new_tokens=8)
    assert text == expected.text and "its beginning is left out" in caplog.text


def test_settings_of_other_samplers_are_named_and_left_out(sampler, caplog):
    asked = instances(("a", {"temperature": 0.7, "until": "b", "do_sample": False}))
    BlockdiffLM(sampler=sampler).generate_until(asked)
    assert "temperature is a setting of other samplers" in caplog.text and "do_sample" not in caplog.text


def test_a_checkpoint_is_evaluated_by_the_harness_and_by_our_command_alike(sampler, tasks, tmp_path):
    checkpoint.save(sampler.model, tmp_path / "model", tokenizer=TOKENIZER, generation=SETTINGS)
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    theirs = simple_evaluate(
        "blockdiff",
        model_args={"pretrained": str(tmp_path / "model"), "dtype": "float32", "seed": 3},
        tasks=["chooses"],
        task_manager=manager,
        bootstrap_iters=0,
    )
    output = tmp_path / "e.json"
    words = ["eval", str(tmp_path / "model"), "--task", "lm-eval:chooses,writes", "--data", str(tasks), "--seed", "3"]
    result = CliRunner().invoke(app, [*words, "--output", str(output)])
    assert result.exit_code == 0, result.output
    ours = json.loads(output.read_text())
    assert ours["results"]["chooses"]["acc,none"] == theirs["results"]["chooses"]["acc,none"]
    assert "chooses" in result.stdout and "steps per canvas" in result.stdout
    assert ours["costs"]["endings"] and ours["settings"]["versions"]["lm_eval"] and ours["seed"] == 3
    chat = CliRunner().invoke(app, [*words, "--chat", "--thinking", "--limit", "1"])
    assert chat.exit_code == 0, chat.output


def test_a_task_that_is_not_there_is_one_line(sampler, tasks):
    with pytest.raises(RequestError, match="'nothing'"):
        evaluate(sampler, ["nothing"], tasks)


def test_tasks_whose_files_or_rows_cannot_be_had_are_refused_in_one_line(sampler, tmp_path):
    with pytest.raises(RequestError, match=r"nowhere: .*directory"):
        evaluate(sampler, ["a"], tmp_path / "nowhere")
    lines = ["task: a", "dataset_path: json", f"dataset_kwargs: {{data_files: {{test: {tmp_path}/none.jsonl}}}}"]
    lines += ["test_split: test", "output_type: generate_until", "doc_to_text: '{{p}}'", "doc_to_target: '{{r}}'"]
    (tmp_path / "a.yaml").write_text("\n".join(lines))
    with pytest.raises(RequestError, match=r"rows of a .*none\.jsonl"):
        evaluate(sampler, ["a"], tmp_path)
