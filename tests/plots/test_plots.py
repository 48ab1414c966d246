"""Pictures: what is drawn from metrics and traces; test_page.py has the page."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blockdiff.errors import RunError
from blockdiff.plots.curves import _fill, _legend, draw_comparison, draw_curves, smooth
from blockdiff.plots.panels import LEVEL, STEP, TOKENS, NamedRun, by_level, make_panels, named_apart, read_run, series
from blockdiff.plots.picture import HOT, SURE, _before_fill, draw_picture, drawable, heat
from blockdiff.plots.trace_moments import Cell, canvas_moments, grid_moments, grid_side, most_entropy, visible
from blockdiff.sampling.trace import CommittedCanvas, Step, Trace

WORDS = ["<pad>", "<eos>", "<bos>", ".", "=", "1", "2", "3", "4", "\n", "<b>", "a b"]
PUZZLE = "1..4.41.2...4..1="
SOLUTION = "1234341221434321"


def ids(text: str) -> list[int]:
    return [WORDS.index(character) for character in text]


def step(canvas: int, number: int, argmax: list[int], entropy: list[float], accepted: list[bool]) -> Step:
    noise = [WORDS.index("3")] * len(argmax)
    return Step("a", canvas, number, 0.8, noise, argmax, argmax, entropy, accepted)


@pytest.fixture
def trace() -> Trace:
    """Two steps on one canvas of 17 tokens: the second changes position 1 and keeps everything."""
    end = [WORDS.index("<eos>")]
    final = ids(SOLUTION) + end
    first = [final[0], WORDS.index("4"), *final[2:]]
    steps = [
        step(0, 0, first, [0.0, 2.0] + [0.5] * 15, [True] + [False] * 16),
        step(0, 1, final, [0.0] * 17, [True] * 17),
    ]
    canvas = CommittedCanvas("a", 0, PUZZLE, final, 17, SOLUTION, 2, "eos")
    return Trace("a", PUZZLE, SOLUTION, steps, [canvas])


def decode(token: int) -> str:
    return WORDS[token]


@pytest.mark.quick
def test_moments_are_noise_then_steps_then_the_commit(trace: Trace) -> None:
    moments = canvas_moments(trace, trace.canvases[0], decode)
    assert [moment.name for moment in moments] == ["noise", "step 1", "step 2", "committed"]
    noise, first, second, committed = (moment.cells for moment in moments)
    assert all(cell.state == "noise" and cell.entropy is None and cell.text == "3" for cell in noise)
    assert [cell.text for cell in first[:3]] == ["1", "4", "3"]
    assert [cell.is_accepted for cell in first] == [True] + [False] * 16
    # Nothing has changed before the first guess; then exactly the position whose guess did.
    assert not any(cell.is_changed for cell in first)
    assert [place for place, cell in enumerate(second) if cell.is_changed] == [1]
    assert "".join(cell.text for cell in committed) == SOLUTION + "<eos>"
    assert all(cell.entropy is None and cell.state == "committed" for cell in committed)


@pytest.mark.quick
def test_tokens_after_the_end_are_not_drawn_as_committed(trace: Trace) -> None:
    cut = CommittedCanvas("a", 0, PUZZLE, trace.canvases[0].tokens, 5, "1234", 2, "eos")
    committed = canvas_moments(trace, cut, decode)[-1]
    assert [cell.state for cell in committed.cells] == ["committed"] * 5 + ["noise"] * 12


@pytest.mark.quick
def test_the_colour_scale_ends_at_the_largest_entropy(trace: Trace) -> None:
    assert most_entropy([trace]) == 2.0
    assert most_entropy([]) == 0.5
    assert heat(0.0, 2.0) == (247, 248, 250) and heat(9.0, 2.0) == heat(2.0, 2.0)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("prompt", "side"),
    [(PUZZLE, 4), ("." * 81 + "=", 9), ("." * 80 + "=", None), (".......5........=", None), ("Hello", None)],
)
def test_a_sudoku_is_recognised_by_its_prompt(prompt: str, side: int | None) -> None:
    assert grid_side(Trace("a", prompt)) == side


@pytest.mark.quick
def test_grids_show_givens_through_the_noise_and_mark_contradictions(trace: Trace) -> None:
    trace.steps[0].argmax[0] = WORDS.index("2")  # the puzzle says 1
    noise, first, *_, committed = grid_moments(trace, 4, decode)
    assert len(noise.cells) == 16
    givens = [place for place, cell in enumerate(PUZZLE[:16]) if cell != "."]
    assert [place for place, cell in enumerate(noise.cells) if cell.state == "given"] == givens
    assert [place for place, cell in enumerate(first.cells) if cell.is_wrong] == [0]
    assert not any(cell.is_wrong for cell in committed.cells)
    assert "".join(cell.text for cell in committed.cells) == SOLUTION


@pytest.mark.quick
def test_grids_run_over_several_canvases() -> None:
    tokens = ids(SOLUTION)
    steps = [step(n, 0, tokens[4 * n : 4 * n + 4], [0.1] * 4, [True] * 4) for n in range(4)]
    canvases = [
        CommittedCanvas("a", n, PUZZLE, tokens[4 * n : 4 * n + 4], 4, SOLUTION[: 4 * n + 4], 1, None) for n in range(4)
    ]
    moments = grid_moments(Trace("a", PUZZLE, SOLUTION, steps, canvases), 4, decode)
    assert len(moments) == 12
    # While the second canvas is denoised the first stands and the third is still empty.
    blank = [place for place, cell in enumerate(moments[4].cells) if not cell.text]
    assert [place for place in range(8, 16) if PUZZLE[place] == "."] == blank
    assert {cell.state for cell in moments[4].cells[:4]} == {"given", "committed"}
    assert "".join(cell.text for cell in moments[-1].cells) == SOLUTION


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "shown"),
    [(" a", "·a"), ("\n", "⏎"), ("", "∅"), ("<eos>", "eos"), ("<turn|>", "turn"), ("<", "<")],
)
def test_every_token_can_be_seen(text: str, shown: str) -> None:
    assert visible(text) == shown


def pixels(path: Path) -> Any:
    from PIL import Image

    with Image.open(path) as picture:
        return picture.convert("RGB")


@pytest.mark.quick
def test_a_still_has_all_moments_and_what_is_kept_is_framed(trace: Trace, tmp_path: Path) -> None:
    draw_picture(trace, tmp_path / "grid.png", decode)
    draw_picture(replace(trace, prompt="Cost: $5"), tmp_path / "rows.png", decode)
    grid, rows = pixels(tmp_path / "grid.png"), pixels(tmp_path / "rows.png")
    assert grid.width == 4 * 2 * (4 * 26 + 8)  # noise, two steps, the commit
    ends = [moment.end for moment in grid_moments(trace, 4, decode)]
    assert [end and end.text for end in ends] == ["3", "<eos>", "<eos>", "<eos>"]
    assert grid.getpixel((2 * (3 * 112 + 4) + 3, 2 * (4 * 26 + 9))) == SURE  # token 17 of the commit, below the grid
    assert rows.height > 4 * 22 * 2 and rows.width == 2 * (66 + 17 * 28)
    assert rows.getpixel((2 * 64 + 4, 2 * (4 + 22) + 3)) == SURE  # of step 1 the first position is kept
    assert rows.getpixel((2 * (64 + 28) + 4, 2 * (4 + 22) + 6)) == HOT  # and the second is the most unsure of all


@pytest.mark.quick
def test_a_gif_has_a_frame_for_each_moment_of_every_canvas_up_to_a_limit(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    second = [replace(step, canvas=1) for step in trace.steps[:1]]
    canvases = [*trace.canvases, replace(trace.canvases[0], canvas=1)]
    long = replace(trace, prompt="Hello", steps=[*trace.steps, *second], canvases=canvases)
    for name, drawn, frames in (("grid", trace, 4), ("text", long, 4 + 3)):
        draw_picture(drawn, tmp_path / f"{name}.gif", decode)
        with Image.open(tmp_path / f"{name}.gif") as picture:
            assert picture.n_frames == frames and picture.info["loop"] == 0
            picture.seek(frames - 1)
            assert picture.info["duration"] == 2500
    monkeypatch.setattr("blockdiff.plots.picture.FRAMES", 8)
    many = replace(long, steps=[replace(trace.steps[0], step=n) for n in range(20)], canvases=trace.canvases)
    draw_picture(many, tmp_path / "many.gif", decode)
    with Image.open(tmp_path / "many.gif") as picture:
        assert 4 < picture.n_frames <= 9


@pytest.mark.quick
def test_what_the_font_lacks_is_drawn_as_its_code_point_without_a_warning(trace: Trace, tmp_path: Path) -> None:
    assert drawable("a⏎·é你好") == "a⏎·é 4F60 597D"
    text = replace(trace, prompt="Hello")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, token in enumerate(("你好", "$\\x$", "\ud800", "\x1b[0m", "\u202e", "👩‍🔬")):
            draw_picture(text, tmp_path / f"{number}.png", lambda _, token=token: token)
    drawn = {(tmp_path / f"{number}.png").read_bytes() for number in range(6)}
    assert len(drawn) == 6


@pytest.mark.quick
def test_series_leave_out_records_without_the_value() -> None:
    records = [{"step": 1, "lr": 2}, {"step": 2}, {"step": 3, "lr": float("nan")}, {"step": 4, "lr": 0.5}]
    assert series(records, "lr") == ([1, 4], [2.0, 0.5])


@pytest.mark.quick
def test_a_panel_without_a_finite_value_is_left_out() -> None:
    level = {"t_from": 0.0, "t_to": 0.2, "corrupted_loss": float("nan"), "kept_loss": None, "kept_accuracy": 0.5}
    records = [{"step": 1, "kind": "heldout", "heldout_levels": [level]}]
    for runs in ([NamedRun("a", records)], [NamedRun("a", records), NamedRun("b", records)]):
        (panel,) = make_panels(runs)
        assert panel.title == "held-out accuracy by noise level" and list(_legend(panel)) == ["kept"]


@pytest.mark.quick
def test_smoothing_neither_lags_nor_bends_a_line() -> None:
    line = [float(n) for n in range(20)]
    assert smooth(line, 4) == pytest.approx(line)
    assert smooth(line, 0) == line
    assert smooth([0.0, 3.0, 0.0], 1) == pytest.approx([0.0, 1.0, 0.0])


@pytest.mark.quick
@pytest.mark.parametrize("count", [1, 60])
def test_curves_are_drawn_from_a_metrics_file(tmp_path: Path, count: int) -> None:
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for number in range(1, count + 1):
            record = {"step": number, "canvas_loss": 5 / number, "ar_loss": 1.0, "grad_norm": 1.0, "lr": 1e-3}
            file.write(json.dumps(record) + "\n")
        file.write(json.dumps({"step": count, "heldout_canvas_loss": 0.5}) + "\n")
    draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png", title="run")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.quick
@pytest.mark.parametrize(("losses", "is_from_0"), [([6.0, 5.0, 4.0], False), ([6.0, 4.0, 2.0], True)])
def test_a_loss_axis_shows_the_run_and_ticks_stand_at_whole_steps(losses: list[float], is_from_0: bool) -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    records = [{"step": step, "kind": "train", "canvas_loss": loss} for step, loss in enumerate(losses, start=1)]
    (panel,) = make_panels([NamedRun("a", records)])
    _fill(axes, panel, last=3, legend_columns=2)
    assert (axes.get_ylim()[0] == 0) == is_from_0
    assert all(tick == int(tick) for tick in axes.get_xticks())


@pytest.mark.quick
def test_the_last_percents_of_a_share_have_room_whatever_came_before_them() -> None:
    from matplotlib.figure import Figure

    for shares, least in (([0.1, 0.96, 1.0], 0.3), ([0.1, 0.4], 0.04)):
        axes = Figure().subplots()
        records = [{"step": n, "kind": "sample", "sample_accuracy": share} for n, share in enumerate(shares)]
        (panel,) = make_panels([NamedRun("a", records)])
        _fill(axes, panel, last=2)
        low, high = (axes.transAxes.inverted().transform(axes.transData.transform((0, y)))[1] for y in (0.95, 1.0))
        assert high - low > least and 0 <= high <= 1


@pytest.mark.quick
def test_runs_of_different_length_are_compared_by_tokens() -> None:
    runs = []
    for name, batch in (("small", 10), ("large", 40)):
        steps = (1, 2, 3)
        train = [{"tokens_per_second": 10.0 * batch, "seconds": s / 10.0, "canvas_loss": 3.0} for s in steps]
        records = [{"step": s, "kind": "train", **each} for s, each in zip(steps, train, strict=True)]
        runs.append(NamedRun(name, [*records, {"step": 2, "kind": "heldout", "heldout_canvas_loss": 2.0}]))
    small, large, *heldout = make_panels(runs)[0].lines
    assert make_panels(runs)[0].x == TOKENS and make_panels(runs[:1])[0].x == STEP
    assert (small.points[0], large.points[0]) == (pytest.approx([10, 20, 30]), pytest.approx([40, 80, 120]))
    assert [line.points[0] for line in heldout] == [[pytest.approx(20)], [pytest.approx(80)]]
    without_speeds = replace(runs[1], records=runs[1].records[-1:])
    assert make_panels([runs[0], without_speeds])[0].x == STEP


@pytest.mark.quick
def test_legends_stand_clear_of_the_data_and_all_panels_show_the_whole_run() -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    records = measured(ar=1.0, heldout_ar_loss=2.0, sample_accuracy=0.5)
    panels = make_panels([NamedRun("a", records)])
    for number, (axes, panel) in enumerate(zip(figure.subplots(3, 3).flat, panels, strict=False)):
        _fill(axes, panel, last=100, legend_columns=4 if number == 0 else 2)
    FigureCanvasAgg(figure).draw()
    legends = 0
    for axes, panel in zip(figure.axes, panels, strict=False):
        if panel.x != LEVEL:
            assert axes.get_xlim() == pytest.approx((-3, 103))
        if (legend := axes.get_legend()) is not None:
            legends += 1
            inside, drawn, title = axes.get_window_extent(), legend.get_window_extent(), axes._left_title
            assert drawn.y0 >= inside.y1 and drawn.y1 <= title.get_window_extent().y0 + 1
    assert legends == 3  # of the losses, and of both panels by noise level


@pytest.mark.quick
@pytest.mark.parametrize("records", [[], [{"step": 1, "skipped": 1, "not_finite": "gradient", "not_finite_ids": [3]}]])
def test_no_figures_no_picture(tmp_path: Path, records: list[dict]) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


LEVELS = [
    {"t_from": 0.0, "t_to": 0.5, "corrupted_loss": 1.0, "kept_loss": 0.1, "corrupted_accuracy": 0.9},
    {"t_from": 0.5, "t_to": 1.0, "corrupted_loss": 3.0, "kept_count": 0},
]


def measured(scale: float = 1.0, ar: float | None = None, **more: object) -> list[dict]:
    """Two training records, an evaluation between them and one at the end."""
    first = [{**LEVELS[0], "corrupted_loss": 9.0}]
    rates = {"grad_norm": 1.0, "lr": 1e-3, "tokens_per_second": 100.0 * scale}
    rates |= {} if ar is None else {"ar_loss": ar}
    held = {"heldout_canvas_loss": 2.5 * scale, "heldout_levels": LEVELS, **more}
    return [
        {"step": 1, "kind": "train", "canvas_loss": 4.0 * scale, **rates},
        {"step": 1, "kind": "heldout", "heldout_canvas_loss": 3.5, "heldout_levels": first},
        {"step": 2, "kind": "train", "canvas_loss": 2.0 * scale, **rates},
        {"step": 2, "kind": "heldout", **held},
    ]


def write_run(directory: Path, records: list[dict]) -> Path:
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return directory


@pytest.mark.quick
def test_a_single_record_is_a_point_and_faint_values_are_explained() -> None:
    from matplotlib.figure import Figure

    for count in (1, 50):
        axes = Figure().subplots()
        records = [{"step": step, "kind": "train", "grad_norm": 1.0} for step in range(1, count + 1)]
        (panel,) = make_panels([NamedRun("a", records)])
        _fill(axes, panel, last=count)
        assert (axes.lines[-1].get_marker() == "o") == (count == 1)
        assert axes.get_title(loc="left").endswith("(faint: as logged)") == (count == 50)


@pytest.mark.quick
def test_a_still_ends_before_the_fill(trace: Trace) -> None:
    moments = canvas_moments(trace, trace.canvases[0], decode)
    count = sum(cell.state == "committed" for cell in moments[-1].cells)
    longer = [replace(moment, cells=(*moment.cells, Cell("x", "noise"))) for moment in moments]
    assert {len(moment.cells) for moment in _before_fill(longer)} == {count}


@pytest.mark.quick
def test_a_full_disk_and_a_name_that_the_font_lacks_are_no_traceback_and_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    run = write_run(tmp_path / "你好", measured())
    draw_comparison([run], tmp_path / "a.png")
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(RunError, match=r"b\.png: .*No space"):
        draw_comparison([run], tmp_path / "b.png")


@pytest.mark.quick
def test_noise_levels_are_those_of_the_last_evaluation_and_empty_ones_are_left_out() -> None:
    assert by_level(measured(), "heldout_corrupted_loss") == ([0.25, 0.75], [1.0, 3.0])
    assert by_level(measured(), "heldout_kept_loss") == ([0.25], [0.1])
    assert by_level([{"step": 1}], "heldout_kept_loss") == ([], [])


@pytest.mark.quick
def test_one_run_shows_what_it_measured_and_nothing_else() -> None:
    panels = {panel.title: panel for panel in make_panels([NamedRun("a", measured(sample_steps_per_canvas=None))])}
    assert list(panels) == [
        "loss per token",
        "held-out loss by noise level",
        "held-out accuracy by noise level",
        "gradient norm",
        "learning rate",
        "tokens per second",
    ]
    losses = panels["loss per token"].lines  # the AR loss, 0 throughout, has no line
    assert [(line.label, line.points) for line in losses] == [
        ("canvas", ([1, 2], [4.0, 2.0])),
        ("canvas, held out", ([1, 2], [3.5, 2.5])),
    ]
    assert [line.label for line in panels["held-out loss by noise level"].lines] == ["corrupted", "kept"]
    assert panels["held-out accuracy by noise level"].is_share and panels["held-out loss by noise level"].x == LEVEL


@pytest.mark.quick
def test_drafters_are_compared_by_their_loss_and_by_what_would_stand() -> None:
    records = [
        {"step": 1, "kind": "train", "loss": 2.0, "draft_loss": 2.0},
        {"step": 1, "kind": "heldout", "heldout_accepted_length": 1.5},
    ]
    panels = make_panels([NamedRun("a", records), NamedRun("b", records)])
    assert [panel.title for panel in panels] == ["draft loss", "held-out accepted length"]


def test_compared_runs_keep_their_colour_in_every_panel() -> None:
    sampled = {"sample_accuracy": 0.5, "sample_steps_per_canvas": 7.0}
    runs = [NamedRun("a", measured(ar=1.0, **sampled)), NamedRun("b", measured(0.5)), NamedRun("c", measured())]
    panels = make_panels(runs)
    assert [panel.title for panel in panels] == [
        "canvas loss",
        "next-token loss",
        "held-out loss by noise level",
        "held-out accuracy by noise level",
        "sampled prompts right",
        "steps per canvas of sampled prompts",
        "tokens per second",
    ]
    assert [list(_legend(panel)) for panel in panels[:4]] == [
        ["training", "held out"],
        ["training"],
        ["corrupted", "kept"],
        ["corrupted"],
    ]
    colours = {(line.label, line.colour) for panel in panels for line in panel.lines if line.label}
    assert len(colours) == 3 and {label for label, _ in colours} == {"a", "b", "c"}
    canvas = panels[0].lines
    assert [line.points[1] for line in canvas if line.is_dashed] == [[3.5, 2.5], [3.5, 1.25], [3.5, 2.5]]
    assert [line.colour for line in canvas[:3]] == [line.colour for line in canvas[3:]]


@pytest.mark.quick
def test_runs_are_called_by_as_much_of_their_directory_as_tells_them_apart(tmp_path: Path) -> None:
    def names(*directories: str) -> list[str]:
        return [run.name for run in named_apart([NamedRun(str(tmp_path / each), []) for each in directories])]

    assert names("x/a", "y/b") == ["a", "b"]
    assert names("x/a", "y/a") == ["x/a", "y/a"]
    assert names("x/a", "x/a") == ["a", "a"]


@pytest.mark.parametrize("count", [1, 2, 9])
def test_any_number_of_runs_is_drawn(tmp_path: Path, count: int) -> None:
    runs = [write_run(tmp_path / f"run-{n}", measured(1 + n, ar=1.0, sample_accuracy=0.1)) for n in range(count)]
    draw_comparison(runs, tmp_path / "runs.png")
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.quick
def test_a_directory_without_a_run_is_refused_by_name(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "whole", measured())
    (tmp_path / "empty").mkdir()
    silent = write_run(tmp_path / "silent", [])
    for directory, message in (
        (tmp_path / "absent", "absent: not a directory; name the --output directory of a `blockdiff train`"),
        (tmp_path / "empty", r"empty: no metrics\.jsonl in it; name the --output directory"),
        (silent, r"silent: nothing is logged yet in metrics\.jsonl; wait for the first record"),
    ):
        with pytest.raises(RunError, match=message):
            draw_comparison([whole, directory], tmp_path / "runs.png")
    assert not (tmp_path / "runs.png").exists()
    assert read_run(whole).records == measured()


def test_the_command_writes_the_picture_and_says_one_line_when_it_cannot(tmp_path: Path, capsys) -> None:
    from blockdiff.cli.main import app

    write_run(tmp_path / "a", measured())
    with pytest.raises(SystemExit) as done:
        app([*("plot", str(tmp_path / "a"), "--output", str(tmp_path / "deep" / "a.png"))])
    assert done.value.code == 0 and (tmp_path / "deep" / "a.png").is_file()
    assert capsys.readouterr().out == f"{tmp_path}/deep/a.png: 1 run\n"
    for words, code in ((["absent", "--output", "x.png"], 1), ([str(tmp_path / "a"), "--output", "x.jpg"], 2)):
        with pytest.raises(SystemExit) as done:
            app(["plot", *words])
        printed = capsys.readouterr()
        assert done.value.code == code and printed.out == "" and len(printed.err.splitlines()) == 1
