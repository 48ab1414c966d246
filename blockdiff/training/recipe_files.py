"""Reading a recipe: its YAML file, the recipes that it extends, and overrides. Nothing is loaded or run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from blockdiff import plain_yaml
from blockdiff.data.sources import Source
from blockdiff.data.template import is_template_file
from blockdiff.errors import RecipeError
from blockdiff.files import is_hub_id, matching, read_text
from blockdiff.recipes import packaged
from blockdiff.training.kinds import kinds
from blockdiff.training.recipe import ObjectiveSection, Recipe, Section, choosing, keys, kinds_with
from blockdiff.training.recipe_choices import OneOf
from blockdiff.training.recipe_errors import SOURCES, Key, Origin, Origins, one_line

# Pairs and triples of keys of which a recipe has one: setting one drops the others that an extended recipe sets.
ONE_OF = {"model": ("path", "preset"), "train": ("steps", "epochs"), "lora": ("rank", "parts", "path")}
# Keys whose value is a file or directory, and whether it must exist (models and tokenizers may be hub ids, and so may
# rows whose name cannot be a file's).
TEMPLATE = ("data", "template")  # a file, unless it is the name of a template
FILE_KEYS: dict[Key, bool] = {
    **dict.fromkeys([*SOURCES, ("data", "images", "root"), TEMPLATE], True),
    **dict.fromkeys([("model", "path"), ("model", "tokenizer"), ("lora", "path")], False),
}
MAX_EXTENDS = 20  # the length of a chain of recipes, each extending the next
AnyRecipe = str | Path | Mapping[str, Any] | Recipe


def read_recipe(
    source: AnyRecipe,
    overrides: Sequence[str] = (),
    from_python: Mapping[str, Mapping[str, Any] | ObjectiveSection] | None = None,
    needs_data: bool = True,
) -> Recipe:
    """Read a recipe, on top of those that it `extends` and below its overrides, `key.path=value` (values are YAML).

    source: the path of a YAML file, a mapping of the same form, or a recipe. In a mapping, rows (a `datasets.Dataset`
        or a list of mappings) may replace a source of rows, and an object the word that chooses one.
    from_python: values by section and key, which override everything.
    needs_data: require the files of rows to exist, and rows that were passed from Python to be passed again.

    Relative paths of data, weights and tokenizers are looked up in the current directory, then in the directory of the
    recipe that names them. Raises RecipeError: one line with file, key and remedy.
    """
    if not isinstance(source, str | Path | Mapping | Recipe):
        raise RecipeError(f"recipe: a {type(source).__name__}; pass the path of a YAML recipe, a mapping or a Recipe")
    if isinstance(overrides, str | Mapping) or not all(isinstance(text, str) for text in overrides):
        raise RecipeError(f"overrides: pass a list of texts, such as ['optim.lr=3e-4'] (got {overrides!r})")
    merged: dict[str, Any] = {}
    origins: Origins = {}
    layers = _layers(source) + [_override_layer(text) for text in overrides]
    for origin, directory, tree in [*layers, ("from Python", None, dict(from_python or {}))]:
        for name, exclusive in ONE_OF.items():
            section, below = tree.get(name), merged.get(name)
            if isinstance(section, Mapping) and any(map(section.get, exclusive)) and isinstance(below, dict):
                for key in exclusive:
                    if not section.get(key):
                        below.pop(key, None)
        _merge(merged, tree, (), (origin, directory), origins)
    if not needs_data:
        _drop_recorded(merged)
    model_keys = {("objective", key): False for kind in kinds().values() for key in kind.paths}
    for path, must_exist in (FILE_KEYS | model_keys).items():
        must_exist = must_exist and needs_data
        *above, last = path
        inner: Any = merged
        for name in above:
            inner = inner.get(name) if isinstance(inner, dict) else None
        if isinstance(inner, dict) and last in inner:
            origin, directory = origins[path]
            if directory is not None and (path != TEMPLATE or is_template_file(str(inner[last]))):
                name = ".".join(filter(None, path))
                inner[last] = _located(inner[last], name, origin, directory, must_exist)
    try:
        return Recipe.model_validate(merged)
    except RecipeError as error:  # names the recipe; `one_line` names the layer instead
        if isinstance(error.__cause__, ValidationError):
            raise RecipeError(one_line(error.__cause__, keys(), kinds_with(), origins, _name(source))) from None
        raise


def run_recipe(
    recipe: AnyRecipe,
    overrides: Sequence[str] = (),
    output: str | Path | None = None,
    **sections: Mapping[str, Any] | ObjectiveSection,
) -> Recipe:
    """Read the recipe of a run, and set its `output` to the absolute path of the run's directory.

    sections: values from Python by section and key, which override everything; None sets nothing. Raises RecipeError
    if no directory is named, and as `read_recipe` does.
    """
    from_python = {
        name: {key: value for key, value in section.items() if value is not None}
        if isinstance(section, Mapping)
        else section
        for name, section in sections.items()
    }
    read = read_recipe(recipe, overrides, {name: section for name, section in from_python.items() if section})
    directory = read.output if output is None else output
    if directory is None or not str(directory):
        name = recipe if isinstance(recipe, str | Path) else "recipe"
        raise RecipeError(f"{name}: output: missing; use --output DIR or set it in the recipe")
    return read.model_copy(update={"output": str(Path(directory).expanduser().absolute())})


def _name(source: AnyRecipe) -> str:
    return str(source) if isinstance(source, str | Path) else "recipe"


def _tree(section: Section) -> dict[str, Any]:
    """The keys of a section that were set, without those that have their defaults."""
    was_set = ((key, value) for key, value in section if key in section.model_fields_set)
    return {key: _tree(value) if _is_built_in(value) else value for key, value in was_set}


def _is_built_in(value: Any) -> bool:
    """Return True if a value is a section of recipes. A user's own kind of run is passed on as an object."""
    return isinstance(value, Section) and (not isinstance(value, ObjectiveSection) or type(value) in kinds().values())


def _merge(into: dict[str, Any], tree: Mapping[Any, Any], above: Key, layer: Origin, origins: Origins) -> None:
    """Write the keys of a layer over those of the layers below. Another choice of object replaces the one below."""
    for key, value in ((str(key), value) for key, value in tree.items()):
        path = (*above, key)
        origins[path] = layer
        below = into.get(key)
        if value is None and above == () and path in keys() and Recipe.model_fields[key].default is not None:
            value = {}  # all its keys are commented out
        if isinstance(value, Mapping) and path in choosing():
            value, below = _spelt_out(choosing()[path], value), _spelt_out(choosing()[path], below)
            if isinstance(below, Mapping) and below.keys() != value.keys():
                below = {}
        if isinstance(value, Mapping) and path not in SOURCES:
            into[key] = dict(below) if isinstance(below, Mapping) else {}
            _merge(into[key], value, path, layer, origins)
        else:
            into[key] = str(value) if isinstance(value, Path) else value


def _spelt_out(choice: OneOf, value: Any) -> Any:
    """A choice's value or object as {word: fields}. A wrong value is returned as it is; pydantic refuses it later."""
    try:
        return choice.full(choice.short(value) if type(value) in choice.kinds.values() else value)
    except ValueError:
        return value


def _drop_recorded(tree: dict[str, Any]) -> None:
    """Drop the records of parts from Python in a run's recipe, which neither a plan nor the weights need."""
    for name, key in SOURCES:
        section = tree.get(name)
        if isinstance(section, dict) and isinstance(section.get(key), list):
            section[key] = [{"path": each["name"]} if _is_recorded(each) else each for each in section[key]]
    for name, key in (("given", "optimiser"), ("given", "trainer"), ("given", "reward"), ("evaluation", "task")):
        section = tree.get(name)
        value = section.get(key) if isinstance(section, dict) else None
        if isinstance(section, dict) and (
            isinstance(value, Mapping | list) or (isinstance(value, str) and "." in value)
        ):
            del section[key]


def _is_recorded(source: Any) -> bool:
    """Return True if a source is only the record of rows from Python, with their number."""
    return isinstance(source, Mapping) and isinstance(source.get("rows"), int)


def _parse(text: str, origin: str) -> Any:
    try:
        return plain_yaml.parse(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        file_line = f"{origin}:{mark.line + 1}" if mark and not origin.startswith("--set") else origin
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        raise RecipeError(f"{file_line}: not valid YAML: {reason}") from None


Layer = tuple[str, Path | None, dict[str, Any]]  # its file or override, the directory of its relative paths, its keys


def _layers(source: AnyRecipe, chain: tuple[Path, ...] = ()) -> list[Layer]:
    """The layers of a recipe: those of the recipes that it extends, then its own."""
    origin = _name(source)
    if isinstance(source, Recipe):  # its paths are absolute
        return [(origin, None, _tree(source))]
    if isinstance(source, Mapping):
        directory, tree = Path(), _with_rows(source)
    else:
        file = (None if chain else packaged(source)) or Path(source)
        directory, tree = file.parent, _read(file, chain)
        chain = (*chain, file.resolve())
    base = tree.pop("extends", None)
    layer: Layer = (origin, directory, tree)
    if base is None:
        return [layer]
    if not isinstance(base, str | Path):
        raise RecipeError(f"{origin}: extends: should be the path of one recipe (got {base!r})")
    return [*_layers(directory / base, chain), layer]


def _read(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    """Read the mapping in a recipe's file. chain: the recipes that led to it by `extends`."""
    if path.resolve() in chain:
        raise RecipeError(f"{path}: extends: the recipes extend one another in a circle; break it")
    if len(chain) > MAX_EXTENDS:
        raise RecipeError(f"{path}: extends: more than {MAX_EXTENDS} recipes extend one another; use fewer")
    if chain and path.exists() and not path.is_file() and not path.is_dir():
        raise RecipeError(f"{path}: not a regular file (named by extends in {chain[-1]}); name a YAML recipe")
    try:
        tree = _parse(read_text(path, plain_yaml.LARGEST_FILE), str(path))
    except UnicodeDecodeError:
        raise RecipeError(f"{path}: not a text file; a recipe is YAML (see recipes/)") from None
    except OSError as error:
        reason = "no such recipe" if isinstance(error, FileNotFoundError) else error.strerror
        by_whom = f" (named by extends in {chain[-1]})" if chain else ""
        run_recipe_file = path / "recipe.yaml"  # of a run directory
        example = f", such as {run_recipe_file}" if run_recipe_file.is_file() else ""
        raise RecipeError(f"{path}: {reason}{by_whom}; give the path of a YAML recipe{example}") from None
    if not isinstance(tree, dict):
        raise RecipeError(f"{path}: should be a mapping with the keys {', '.join(keys()[()])}; it has none")
    return tree


def _with_rows(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Turn rows in a recipe from Python into sources of rows."""
    tree = dict(recipe)
    for section, key in SOURCES:
        if isinstance(tree.get(section), Mapping) and (value := tree[section].get(key)) is not None:
            tree[section] = {**tree[section], key: _rows_as_source(value, f"{section}.{key}")}
    return tree


def _rows_as_source(value: Any, key: str) -> Any:
    """Wrap rows in sources of rows. Names and sources stay; a list of mappings without `path` is one source's rows."""
    if hasattr(value, "column_names"):  # a Dataset, or the splits of a DatasetDict
        return [{"rows": value}]
    if isinstance(value, Mapping) and not {"path", "rows"} & value.keys():
        names = ", ".join(map(str, value))
        raise RecipeError(f"recipe: {key}: a mapping with the keys {names}; pass a sequence of rows")
    listed = value if isinstance(value, list | tuple) else [value]
    is_rows = any(isinstance(item, Mapping) and not {"path", "rows"} & item.keys() for item in listed)
    return [{"rows": value}] if is_rows else list(listed)


def _override_layer(text: str) -> Layer:
    key, sign, value = text.partition("=")
    key = key.strip()
    origin = f"--set {text}"
    if not sign or not key:
        raise RecipeError(f"{origin}: should be key.path=value, for example --set optim.lr=3e-4")
    if key == "extends":
        raise RecipeError(f"{origin}: extends is a key of recipe files only; name the file that has it")
    tree: dict[str, Any] = {}
    _put(tree, key, _parse(value, origin))
    return origin, Path(), tree


def _located(named: Any, key: str, origin: str, directory: Path, must_exist: bool) -> Any:
    """Return the value of a file key, a name or a list of sources, with absolute paths."""
    if named == "none":
        return None
    if isinstance(named, list):
        return [_located(source, key, origin, directory, must_exist) for source in named]
    if isinstance(named, dict) and named.get("path"):
        return {**named, "path": _located(named["path"], key, origin, directory, must_exist)}
    if isinstance(named, Source) and named.path:
        return replace(named, path=_locate(named.path, key, origin, directory, must_exist))
    return _locate(str(named), key, origin, directory, must_exist) if isinstance(named, str | Path) else named


def _locate(name: str, key: str, origin: str, directory: Path, must_exist: bool) -> str:
    """The absolute path of a name in a recipe. A name that is not found is returned as it is if it may be a hub id.

    Raises RecipeError if the file must exist and does not.
    """
    candidates = [Path(name).expanduser(), directory / name]
    for path in candidates:
        if path.exists():
            return str(path.resolve())
        if matching(path):
            return str(path.absolute())
    if not must_exist or (is_hub_id(name) and not candidates[0].parent.is_dir()):
        return name
    tried = " or ".join(dict.fromkeys(str(path.absolute()) for path in candidates))
    raise RecipeError(f"{origin}: {key}: no file {name!r} (looked for {tried}); {_remedy(Path(origin))}")


def _remedy(recipe: Path) -> str:
    """What to do about missing data: run the `blockdiff data` command in the recipe's comments, if it has one."""
    file = packaged(recipe) or recipe
    text = file.read_text(encoding="utf-8").replace("\\\n#", "") if file.is_file() else ""
    command = re.search(r"^#\s+(blockdiff data .*)", text, re.MULTILINE)
    return "correct it or make the data" + ("" if command is None else f": {command[1]}")


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *sections, key = path.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[key] = value
