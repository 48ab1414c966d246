"""The options of a model and of its sampling, shared by the commands that answer, and the opening of the model."""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from blockdiff.cli import options
from blockdiff.errors import RequestError
from blockdiff.request_options import OPTIONS, RequestOptions
from blockdiff.terminal import say

if TYPE_CHECKING:
    from blockdiff.checkpoint.generation import Generation
    from blockdiff.checkpoint.opening import ModelFiles
    from blockdiff.data.rows import Row
    from blockdiff.models.model import BlockDiffusionModel
    from blockdiff.parallel.mesh import Mesh
    from blockdiff.sampling import Request, Result, Sampler
    from blockdiff.sampling.strategy import Strategy


def at_checkpoint(model: str, which: str | None) -> str:
    """Return the directory of checkpoint `which` of the run `model`, or `model` itself if `which` is None."""
    if which is None:
        return model
    from blockdiff.training.run import Run

    return str(Run(Path(model)).checkpoint(which))


@dataclass(frozen=True)
class ModelOptions:
    """The options that choose a model and how it is opened."""

    model: options.Model
    checkpoint: options.Checkpoint = None
    adapter: options.Adapter = None
    draft_model: options.DraftModel = None
    dtype: options.Dtype = "auto"
    quantize: options.Quantize = None
    device: options.Device = "auto"
    kernels: options.Kernels = "auto"

    @cached_property
    def place(self) -> str:
        """The model as named, or the directory of the run's checkpoint if --checkpoint is given."""
        return at_checkpoint(self.model, self.checkpoint)

    @cached_property
    def readable(self) -> str:
        """The path of the model; a checkpoint of a run is exported to a directory that is removed at the end."""
        if not (Path(self.place) / "trainer.json").is_file():
            return self.place
        from blockdiff.training.export import write_sampled

        folder = tempfile.TemporaryDirectory(prefix="blockdiff-")
        atexit.register(folder.cleanup)
        write_sampled(Path(self.place), Path(folder.name) / "model")
        return str(Path(folder.name) / "model")

    @cached_property
    def files(self) -> ModelFiles:
        """The directories of the model's and the adapter's files; no weights are fetched from the Hub."""
        from blockdiff.checkpoint.opening import model_files

        return model_files(self.readable, self.adapter, with_weights=False)

    @cached_property
    def asks_chat(self) -> bool:
        """True if the model was trained on conversations, so that raw prompts are put into its chat template."""
        return self.files.diffusion().prompts == "chat"

    def puts_into_chat(self, rows: Sequence[Row | Request | Result]) -> bool:
        """Return `asks_chat`; if it is true and rows are raw prompts, tell the user so on stderr."""
        count = sum(getattr(row, "prompt", None) is not None for row in rows)
        if count and self.asks_chat:
            prompts = "1 raw prompt is" if count == 1 else f"{count:,} raw prompts are"
            _note(f"{prompts} put into the chat template, as {self.place} was trained; --raw leaves them out of it")
        return self.asks_chat

    def require_head(self, **asked: bool) -> None:
        """Raise typer.BadParameter for the first option that is true if the model cannot predict next tokens.

        asked: by name, whether an option that needs next-token predictions is used.
        """
        from blockdiff.checkpoint import read_config
        from blockdiff.models.family import NO_HEAD

        option = next((name for name, is_asked in asked.items() if is_asked), None)
        if option is not None and not read_config(self.files.weights).predicts_next_tokens:
            raise typer.BadParameter(f"{NO_HEAD}; leave it out", param_hint=f"--{option.replace('_', '-')}")

    @property
    def identity(self) -> dict[str, str]:
        """The options of the model that change its answers, by name; `weights` has digests of the weights."""
        model = Path(self.place).resolve() if Path(self.place).exists() else self.place
        parts = {name: getattr(self, name) for name in ("adapter", "quantize", "draft_model")}
        return {"model": str(model), "dtype": self.dtype} | {name: part for name, part in parts.items() if part}

    @property
    def weights(self) -> list[str]:
        """Digests of the weights, then of the draft model and the adapter if they are given."""
        from blockdiff.checkpoint.adapter_names import WEIGHTS
        from blockdiff.checkpoint.files import find, fingerprint
        from blockdiff.checkpoint.opening import model_files
        from blockdiff.files import piecewise_digest

        files = model_files(self.readable, self.adapter)
        models = [files.weights, *([] if self.draft_model is None else [find(self.draft_model)])]
        adapters = [] if files.adapter is None else [piecewise_digest(files.adapter / WEIGHTS)]
        return [*map(fingerprint, models), *adapters]

    def require_as_written(self, *adapters: str) -> None:
        """Compare the weights of the model, its adapter, its drafter and `adapters` with the digests beside them.

        Raises CheckpointError if any differ. A directory without digests is not compared.
        """
        from blockdiff.checkpoint.opening import require_as_written

        require_as_written(self.readable, self.adapter, self.draft_model, *adapters)

    def open(
        self,
        strategy: Strategy | str | None,
        generation: Generation | None = None,
        tokenizer: Any = None,
        mesh: Mesh | None = None,
        device: str | None = None,
        over: BlockDiffusionModel | None = None,
    ) -> Sampler:
        """Load the model and return a Sampler. Arguments as in `Sampler.from_pretrained`; device: None for --device."""
        from blockdiff.sampling import Sampler

        return Sampler.from_pretrained(
            self.readable,
            adapter=self.adapter,
            draft_model=self.draft_model,
            dtype=self.dtype,
            quantize=self.quantize,
            device=device or self.device,
            kernels=self.kernels,
            strategy=strategy,
            generation=generation,
            tokenizer=tokenizer,
            mesh=mesh,
            over=over,
        )


def note_raw_rows(count: int, sampler: Sampler, remedy: str) -> None:
    """Print a note with a `remedy` if `count` rows are raw prompts, and the model's chat template might be needed.

    That is, if the model has one, and blockdiff.json does not say on which kind of prompts it was trained.
    """
    if count and sampler.diffusion.prompts is None and getattr(sampler.tokenizer, "chat_template", None):
        prompts = "1 row is a raw prompt" if count == 1 else f"{count:,} rows are raw prompts"
        _note(f"{prompts}, and the model has a chat template; {remedy}")


def _note(text: str) -> None:
    """Print a note on stderr; if several processes run the command, only the first prints it."""
    if os.environ.get("RANK", "0") == "0":
        say(f"note: {text}")


@dataclass(frozen=True)
class SamplingOptions:
    """The options of sampling."""

    seed: options.Seed = 0
    max_new_tokens: options.MaxNewTokens = None
    steps: options.MaxSteps = None
    temperature: options.Temperature = None
    top_p: options.TopP = None
    strategy: options.Strategy = None

    def strategy_for(self, model: ModelOptions, generation: Generation | None = None) -> Strategy | None:
        """Return the strategy that --strategy, --temperature and --top-p ask for; None if none of them is given.

        With a draft model it is verified by default, with a drafter speculative. generation: its settings;
        None: those of the model. Raises typer.BadParameter if the model or the drafter cannot use the strategy.
        """
        is_drafter = model.draft_model is not None and _is_drafter(model.draft_model)
        strategy = self.strategy or (model.draft_model and ("speculative" if is_drafter else "verified"))
        asks = strategy is not None or self.temperature is not None or self.top_p is not None
        if not asks and self.steps is None:
            return None
        from blockdiff.checkpoint import read_config
        from blockdiff.sampling.rounds import NextTokenRound, VerifiedRound, require_head, round_of
        from blockdiff.sampling.strategies import adjusted, as_strategy, next_token_head

        config = read_config(model.files.weights)
        try:
            denoises = config.denoises
            chosen = as_strategy(strategy or config.default_strategy, generation or model.files.generation(), denoises)
            chosen = adjusted(chosen, self.temperature, top_p=self.top_p)
            require_head(chosen, config.predicts_next_tokens)
        except RequestError as error:
            raise typer.BadParameter(str(error)) from None
        if is_drafter and round_of(chosen) is not NextTokenRound:
            raise typer.BadParameter("a drafter drafts for --strategy speculative alone", param_hint="--draft-model")
        if model.draft_model is not None and not is_drafter and round_of(chosen) is not VerifiedRound:
            raise typer.BadParameter("a draft model drafts for --strategy verified alone", param_hint="--draft-model")
        if self.steps is not None and round_of(chosen) is NextTokenRound:
            _note("--steps has no effect: next tokens are written one by one, and only canvases take denoising steps")
        head = next_token_head(chosen)
        if self.top_p is not None and head is not None and not head.temperature:
            raise typer.BadParameter(
                "this model takes the likeliest token at each place; give a --temperature above 0, too",
                param_hint="--top-p",
            )
        return chosen if asks else None


def _is_drafter(draft_model: str) -> bool:
    """True if the config of a directory or Hub id is of a drafter, not of a canvas model."""
    from blockdiff.checkpoint import read_config

    config = read_config(draft_model)
    return config.is_drafter


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command that takes dataclasses of options, such as `ModelOptions`, as typer sees it.

    Each field of such a group is then an option of its own.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if not is_dataclass(kind):
            parameters.append(parameter.replace(annotation=kind, kind=parameter.KEYWORD_ONLY))
            continue
        groups[parameter.name], hints_of_group = kind, _hints(kind)
        parameters += [
            parameter.replace(name=name, annotation=hints_of_group[name], default=of_field, kind=parameter.KEYWORD_ONLY)
            for name, of_field in _defaults(kind).items()
        ]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        filled_groups = {
            name: kind(**{each: values.pop(each) for each in _defaults(kind)}) for name, kind in groups.items()
        }
        command(**values, **filled_groups)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _hints(group: Any) -> dict[str, Any]:
    """Return the type and option that typer gets for each field of a group.

    Those of RequestOptions are made from the table OPTIONS of blockdiff/request_options.py.
    """
    hints = get_type_hints(group, include_extras=True)
    if group is not RequestOptions:
        return hints
    return {
        name: Annotated[options.given_type(name, hints[name]), options.of_request(name)] for name in _defaults(group)
    }


def _defaults(group: Any) -> dict[str, Any]:
    """Return the default of each field of a group that is an option; `Parameter.empty` if it has none."""
    members = [each for each in fields(group) if group is not RequestOptions or OPTIONS[each.name].help]
    of_parameters = {MISSING: inspect.Parameter.empty, (): None}  # typer's default for an empty list is None
    return {each.name: of_parameters.get(each.default, each.default) for each in members}
