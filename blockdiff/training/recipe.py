"""The typed recipe of a training run, read from YAML with overrides; nothing here runs anything."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError

from blockdiff.errors import RecipeError
from blockdiff.files import is_hub_id, matching
from blockdiff.training.sections import (
    Columns,
    DataSection,
    EvaluationSection,
    GenerationSection,
    ModelSection,
    ObjectiveSection,
    OptimSection,
    Section,
    TrainSection,
)


class Recipe(Section):
    """Everything that decides a training run."""

    seed: Annotated[int, Field(ge=0)] = 0
    output: str | None = None
    model: ModelSection
    data: DataSection
    objective: ObjectiveSection = ObjectiveSection()
    optim: OptimSection = OptimSection()
    train: TrainSection
    evaluation: EvaluationSection = EvaluationSection()
    generation: GenerationSection = GenerationSection()

    def resolved(self) -> str:
        """The recipe as YAML text, defaults filled in and paths located; it reads back as an equal recipe."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _keys(section: Any) -> list[str]:
    return list(section.model_fields) if isinstance(section, type) and issubclass(section, Section) else []


# The keys of each section; a key without a section has none.
KNOWN = {name: _keys(field.annotation) for name, field in Recipe.model_fields.items()}
PATHS = [f"{name}.{key}" for name, keys in KNOWN.items() if keys for key in keys]
PATHS += [name for name, keys in KNOWN.items() if not keys]
# Keys that name files or directories, and whether they must exist (model and tokenizer may be hub ids, and rows
# too where a name cannot be a file's).
FILE_KEYS = {
    "data.train": True,
    "data.heldout": True,
    "evaluation.prompts": True,
    "model.path": False,
    "model.tokenizer": False,
}
COLUMNS = "data.columns"  # the one key that takes further keys


def read_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe on top of those it `extends`, with `key.path=value` overrides (values are YAML) on top.

    Relative paths of data, weights and tokenizer are looked up from the current directory first, then from
    the directory of the recipe that names them. Raises RecipeError: one line with file, key path and cure.
    """
    path = Path(path)
    layers = _file_layers(path, ()) + [_override_layer(text) for text in overrides]
    merged: dict[str, Any] = {}
    origins: dict[str, tuple[str, Path]] = {}
    for origin, directory, tree in layers:
        _refuse_unknown(tree, origin)
        # Choosing one of these in a derived recipe replaces the other, so deriving stays a one-liner.
        if _get(tree, "model.path") or _get(tree, "model.preset"):
            merged["model"] = {
                k: v for k, v in merged.get("model", {}).items() if k not in ("path", "preset")
            }
        for key, value in _leaves(tree):
            _put(merged, key, value)
            origins[key] = (origin, directory)
    for key, must_exist in FILE_KEYS.items():
        name = _get(merged, key)
        if name is not None:
            origin, directory = origins[key]
            _put(merged, key, _located(name, key, origin, directory, must_exist))
    try:
        return Recipe.model_validate(merged)
    except ValidationError as error:
        raise RecipeError(_one_line(error, origins, str(path))) from None


class _Loader(yaml.SafeLoader):
    """YAML with numbers like 1e-4 read as numbers (YAML 1.2) and duplicate keys refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value!r} appears twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def _parse(text: str, origin: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # _Loader is a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{origin}:{mark.line + 1}" if mark and not origin.startswith("--set") else origin
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        raise RecipeError(f"{place}: not valid YAML: {reason}") from None


Layer = tuple[str, Path, dict[str, Any]]


def _file_layers(path: Path, chain: tuple[Path, ...]) -> list[Layer]:
    """The recipe's own layer, preceded by those of the recipes it extends."""
    if path.resolve() in chain:
        raise RecipeError(f"{path}: extends: the recipes extend one another in a circle; break it")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise RecipeError(f"{path}: not a text file; a recipe is YAML (see recipes/)") from None
    except OSError as error:
        reason = "no such recipe" if isinstance(error, FileNotFoundError) else error.strerror
        asked = f" (named by extends in {chain[-1]})" if chain else ""
        raise RecipeError(f"{path}: {reason}{asked}; give the path of a YAML recipe") from None
    tree = _parse(text, str(path))
    if not isinstance(tree, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of keys ({', '.join(KNOWN)}), this file holds none")
    base = tree.pop("extends", None)
    own: Layer = (str(path), path.parent, tree)
    if base is None:
        return [own]
    if not isinstance(base, str):
        raise RecipeError(f"{path}: extends: expected the path of one recipe, got {base!r}")
    return [*_file_layers(path.parent / base, (*chain, path.resolve())), own]


def _override_layer(text: str) -> Layer:
    key, sign, value = text.partition("=")
    key = key.strip()
    origin = f"--set {text}"
    if not sign or not key:
        raise RecipeError(f"{origin}: expected key.path=value, for example --set optim.lr=3e-4")
    tree: dict[str, Any] = {}
    _put(tree, key, _parse(value, origin))
    return origin, Path(), tree


def _refuse_unknown(tree: dict[str, Any], origin: str) -> None:
    for name, value in tree.items():
        if name not in KNOWN:
            _unknown(str(name), origin)
        keys = KNOWN[name]
        if not keys:
            continue
        if value is None:  # a section whose keys are all commented out
            tree[name] = {}
        elif not isinstance(value, dict):
            raise RecipeError(f"{origin}: {name}: a section with the keys {', '.join(keys)}, got {value!r}")
        else:
            for key, inner in value.items():
                if key not in keys:
                    _unknown(f"{name}.{key}", origin)
                if f"{name}.{key}" == COLUMNS:
                    _refuse_unknown_columns(inner, origin)
                elif isinstance(inner, dict):
                    raise RecipeError(f"{origin}: {name}.{key}: takes one value, not further keys")


def _refuse_unknown_columns(inner: Any, origin: str) -> None:
    known = ", ".join(Columns.model_fields)
    if not isinstance(inner, dict):
        raise RecipeError(f"{origin}: {COLUMNS}: a mapping like {{prompt: question}} ({known}), got {inner!r}")
    for column in inner:
        if column not in Columns.model_fields:
            raise RecipeError(f"{origin}: {COLUMNS}: unknown key {column}; it has {known}")


def _unknown(path: str, origin: str) -> None:
    """Raise, naming the nearest known key: of the same section first, then the same word elsewhere."""
    section, _, key = path.rpartition(".")
    near = [f"{section}.{found}" for found in difflib.get_close_matches(key, KNOWN.get(section, ()), 1)]
    near = near or [known for known in PATHS if known.rpartition(".")[2] == key]
    near = near or ([] if section else difflib.get_close_matches(path, [*KNOWN, "extends"], 1))
    words = difflib.get_close_matches(key, [known.rpartition(".")[2] for known in PATHS], 1)
    near = near or [known for known in PATHS if known.rpartition(".")[2] in words]
    if near:
        raise RecipeError(f"{origin}: unknown key {path}; did you mean {near[0]}?")
    where, known_keys = (section, KNOWN[section]) if KNOWN.get(section) else ("a recipe", list(KNOWN))
    raise RecipeError(f"{origin}: unknown key {path}; {where} has {', '.join(known_keys)}")


def _located(named: Any, key: str, origin: str, directory: Path, must_exist: bool) -> Any:
    """What a file key says, a name or a list of sources, with every name located."""
    if isinstance(named, list):
        return [_located(source, key, origin, directory, must_exist) for source in named]
    if isinstance(named, dict) and isinstance(named.get("path"), str):
        return {**named, "path": _locate(named["path"], key, origin, directory, must_exist)}
    return _locate(named, key, origin, directory, must_exist) if isinstance(named, str) else named


def _locate(name: str, key: str, origin: str, directory: Path, must_exist: bool) -> str:
    """The absolute path of what a recipe names; a possible hub id comes back unchanged if not found."""
    places = [Path(name).expanduser(), directory / name]
    for place in places:
        if place.exists():
            return str(place.resolve())
        if matching(place):
            return str(place.absolute())
    if not must_exist or (is_hub_id(name) and not places[0].parent.is_dir()):
        return name
    tried = " or ".join(dict.fromkeys(str(place.absolute()) for place in places))
    raise RecipeError(f"{origin}: {key}: no file {name!r} (looked for {tried}); correct it or make the data")


def _one_line(error: ValidationError, origins: Mapping[str, tuple[str, Path]], path: str) -> str:
    first = error.errors()[0]
    # A value that may be one thing or another fails as each; what got furthest is what was meant.
    first = max((e for e in error.errors() if e["loc"][:2] == first["loc"][:2]), key=lambda e: len(e["loc"]))
    # Unions and tuples add steps below the key ("data.canvases.int"); the recipe knows keys only.
    words = [str(word) for word in first["loc"]]
    key = ".".join(words[: 2 if words and KNOWN.get(words[0]) else 1])
    origin = origins[key][0] if key in origins else path
    reason = first["msg"].removeprefix("Value error, ")
    reason = reason if reason.startswith("give ") else reason[:1].lower() + reason[1:]
    if first["type"] == "missing":
        return f"{origin}: {key}: missing; every recipe has to say it"
    value = _get(first["input"], "") if isinstance(first["input"], dict) else first["input"]
    got = "" if value is None and isinstance(first["input"], dict) else f" (got {value!r})"
    inside = ""
    place = next((place for place, word in enumerate(first["loc"]) if isinstance(word, int)), None)
    if place is not None and key in FILE_KEYS:  # of one source of a list
        inside = f" source {int(words[place]) + 1}: {'.'.join(words[place + 1 :])}:"
    return f"{origin}: {key}:{inside} {reason}{got}"


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _get(tree: Mapping[str, Any], path: str) -> Any:
    value: Any = tree
    for word in path.split("."):
        value = value.get(word) if isinstance(value, dict) else None
    return value


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *sections, key = path.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[key] = value
