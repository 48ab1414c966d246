"""Reading a recipe: its YAML, the recipes that it extends, and overrides on top. Nothing is loaded or run."""

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
from blockdiff.training.recipe_errors import SOURCES, Key, Origins, Place, one_line

# Keys of which a recipe has one: choosing one replaces the other in what it derives from.
ONE_OF_TWO = {"model": ("path", "preset"), "train": ("steps", "epochs"), "lora": ("rank", "parts", "path")}
# Keys that name files or directories, and whether they must exist (model and tokenizer may be hub ids, and rows
# too where a name cannot be a file's).
TEMPLATE = ("data", "template")  # a file, unless it is the name of a template
FILE_KEYS: dict[Key, bool] = {
    **dict.fromkeys([*SOURCES, ("data", "images", "root"), TEMPLATE], True),
    **dict.fromkeys([("model", "path"), ("model", "tokenizer"), ("lora", "path")], False),
}
MOST_EXTENDED = 20  # recipes that one derives from, each from the next
AnyRecipe = str | Path | Mapping[str, Any] | Recipe


def read_recipe(
    source: AnyRecipe,
    overrides: Sequence[str] = (),
    given: Mapping[str, Mapping[str, Any] | ObjectiveSection] | None = None,
    needs_data: bool = True,
) -> Recipe:
    """Read a recipe on top of those it `extends`, with `key.path=value` overrides (values are YAML) on top.

    source: a path, the same as a mapping, or a recipe that was read. given: values from Python by section and key,
    which come on top of everything. needs_data: whether the rows must be there, in files or from Python. In a mapping,
    rows may stand for a source of rows (a `datasets.Dataset` or a list of mappings) and an object for a choice.
    Relative paths of data, weights and tokenizer are looked up from the current directory first, then from the
    directory of the recipe that names them.
    Raises RecipeError: one line with file, key path and cure.
    """
    if not isinstance(source, str | Path | Mapping | Recipe):
        raise RecipeError(f"recipe: a {type(source).__name__}; give the path of a YAML recipe, a mapping or a Recipe")
    if isinstance(overrides, str | Mapping) or not all(isinstance(text, str) for text in overrides):
        raise RecipeError(f"overrides: give a list of texts, such as ['optim.lr=3e-4'] (got {overrides!r})")
    merged: dict[str, Any] = {}
    origins: Origins = {}
    layers = _layers(source) + [_override_layer(text) for text in overrides]
    for origin, directory, tree in [*layers, ("from Python", None, dict(given or {}))]:
        for name, both in ONE_OF_TWO.items():
            section, below = tree.get(name), merged.get(name)
            if isinstance(section, Mapping) and any(section.get(each) for each in both) and isinstance(below, dict):
                for each in both:
                    if not section.get(each):
                        below.pop(each, None)
        _merge(merged, tree, (), (origin, directory), origins)
    if not needs_data:
        _leave_out_given(merged)
    of_kinds = {("objective", key): False for kind in kinds().values() for key in kind.paths}
    for key, must_exist in (FILE_KEYS | of_kinds).items():
        must_exist = must_exist and needs_data
        *above, last = key
        inner: Any = merged
        for name in above:
            inner = inner.get(name) if isinstance(inner, dict) else None
        if isinstance(inner, dict) and last in inner:
            origin, directory = origins[key]
            if directory is not None and (key != TEMPLATE or is_template_file(str(inner[last]))):
                name = ".".join(filter(None, key))
                inner[last] = _located(inner[last], name, origin, directory, must_exist)
    try:
        return Recipe.model_validate(merged)
    except RecipeError as error:  # which knows nothing of the layers
        if isinstance(error.__cause__, ValidationError):
            raise RecipeError(one_line(error.__cause__, keys(), kinds_with(), origins, _name(source))) from None
        raise


def settled(
    recipe: AnyRecipe,
    overrides: Sequence[str] = (),
    output: str | Path | None = None,
    **sections: Mapping[str, Any] | ObjectiveSection,
) -> Recipe:
    """The recipe of a run, with its directory in it.

    sections: what Python gives on top of the recipe and its overrides; a value None gives nothing. Raises RecipeError
    where no directory is named, and as `read_recipe` does.
    """
    given = {
        name: {key: value for key, value in section.items() if value is not None}
        if isinstance(section, Mapping)
        else section
        for name, section in sections.items()
    }
    settled = read_recipe(recipe, overrides, {name: section for name, section in given.items() if section})
    where = settled.output if output is None else output
    if where is None or not str(where):
        name = recipe if isinstance(recipe, str | Path) else "recipe"
        raise RecipeError(f"{name}: output: missing; give --output DIR or set it in the recipe")
    return settled.model_copy(update={"output": str(Path(where).expanduser().absolute())})


def _name(source: AnyRecipe) -> str:
    return str(source) if isinstance(source, str | Path) else "recipe"


def _tree(section: Section) -> dict[str, Any]:
    """The keys that were said, whatever the others have by default."""
    said = ((key, value) for key, value in section if key in section.model_fields_set)
    return {key: _tree(value) if _is_read(value) else value for key, value in said}


def _is_read(value: Any) -> bool:
    """True for a section that recipes have; a kind of run of one's own stays the object that it is."""
    return isinstance(value, Section) and (not isinstance(value, ObjectiveSection) or type(value) in kinds().values())


def _merge(into: dict[str, Any], tree: Mapping[Any, Any], path: Key, layer: Place, origins: Origins) -> None:
    """Put the keys of a layer over those of the layers below it; another choice replaces the one below."""
    for key, value in ((str(key), value) for key, value in tree.items()):
        place = (*path, key)
        origins[place] = layer
        below = into.get(key)
        if value is None and path == () and place in keys() and Recipe.model_fields[key].default is not None:
            value = {}  # all its keys are commented out
        if isinstance(value, Mapping) and place in choosing():
            value, below = _spelt_out(choosing()[place], value), _spelt_out(choosing()[place], below)
            if isinstance(below, Mapping) and below.keys() != value.keys():
                below = {}
        if isinstance(value, Mapping) and place not in SOURCES:
            into[key] = dict(below) if isinstance(below, Mapping) else {}
            _merge(into[key], value, place, layer, origins)
        else:
            into[key] = str(value) if isinstance(value, Path) else value


def _spelt_out(choice: OneOf, value: Any) -> Any:
    """A value or one of the choice's objects as {word: fields}; what is wrong stays and is refused by pydantic."""
    try:
        return choice.full(choice.short(value) if type(value) in choice.kinds.values() else value)
    except ValueError:
        return value


def _leave_out_given(tree: dict[str, Any]) -> None:
    """Take out what a run was given from Python and has recorded, and what neither its weights nor a plan need."""
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
    """True of rows from Python as a run records them, by their number."""
    return isinstance(source, Mapping) and isinstance(source.get("rows"), int)


def _parse(text: str, origin: str) -> Any:
    try:
        return plain_yaml.parse(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{origin}:{mark.line + 1}" if mark and not origin.startswith("--set") else origin
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        raise RecipeError(f"{place}: not valid YAML: {reason}") from None


Layer = tuple[str, Path | None, dict[str, Any]]  # where it comes from, what its paths are relative to


def _layers(source: AnyRecipe, chain: tuple[Path, ...] = ()) -> list[Layer]:
    """The recipe's own layer, preceded by those of the recipes it extends."""
    origin = _name(source)
    if isinstance(source, Recipe):  # its paths have been looked up
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
        raise RecipeError(f"{origin}: extends: expected the path of one recipe, got {base!r}")
    return [*_layers(directory / base, chain), layer]


def _read(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    """The mapping in a file; `chain` are the recipes that led there by what they extend."""
    if path.resolve() in chain:
        raise RecipeError(f"{path}: extends: the recipes extend one another in a circle; break it")
    if len(chain) > MOST_EXTENDED:
        raise RecipeError(f"{path}: extends: more than {MOST_EXTENDED} recipes extend one another; make them fewer")
    if chain and path.exists() and not path.is_file() and not path.is_dir():
        raise RecipeError(f"{path}: not a regular file (named by extends in {chain[-1]}); name a YAML recipe")
    try:
        tree = _parse(read_text(path, plain_yaml.LARGEST_FILE), str(path))
    except UnicodeDecodeError:
        raise RecipeError(f"{path}: not a text file; a recipe is YAML (see recipes/)") from None
    except OSError as error:
        reason = "no such recipe" if isinstance(error, FileNotFoundError) else error.strerror
        asked = f" (named by extends in {chain[-1]})" if chain else ""
        saved = path / "recipe.yaml"  # of a run directory
        of_run = f", such as {saved}" if saved.is_file() else ""
        raise RecipeError(f"{path}: {reason}{asked}; give the path of a YAML recipe{of_run}") from None
    if not isinstance(tree, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of keys ({', '.join(keys()[()])}), this file holds none")
    return tree


def _with_rows(given: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe from Python, in which rows may stand where a file names sources."""
    tree = dict(given)
    for section, key in SOURCES:
        if isinstance(tree.get(section), Mapping) and (value := tree[section].get(key)) is not None:
            tree[section] = {**tree[section], key: _rows_as_source(value, f"{section}.{key}")}
    return tree


def _rows_as_source(value: Any, key: str) -> Any:
    """Rows become a source of rows: whatever is no name and no source, and a list of mappings without a `path`."""
    if hasattr(value, "column_names"):  # of datasets, also the splits of a DatasetDict
        return [{"rows": value}]
    if isinstance(value, Mapping) and not {"path", "rows"} & value.keys():
        names = ", ".join(map(str, value))
        raise RecipeError(f"recipe: {key}: a mapping of {names}; give a sequence of rows, such as one of these")
    each = value if isinstance(value, list | tuple) else [value]
    is_rows = any(isinstance(item, Mapping) and not {"path", "rows"} & item.keys() for item in each)
    return [{"rows": value}] if is_rows else list(each)


def _override_layer(text: str) -> Layer:
    key, sign, value = text.partition("=")
    key = key.strip()
    origin = f"--set {text}"
    if not sign or not key:
        raise RecipeError(f"{origin}: expected key.path=value, for example --set optim.lr=3e-4")
    if key == "extends":
        raise RecipeError(f"{origin}: extends stands in a recipe file; name the file that has it")
    tree: dict[str, Any] = {}
    _put(tree, key, _parse(value, origin))
    return origin, Path(), tree


def _located(named: Any, key: str, origin: str, directory: Path, must_exist: bool) -> Any:
    """The value of a file key, a name or a list of sources, with every name located."""
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
    raise RecipeError(f"{origin}: {key}: no file {name!r} (looked for {tried}); {_remedy(Path(origin))}")


def _remedy(recipe: Path) -> str:
    """The remedy for missing data: the command that a comment of the recipe names, if there is one."""
    file = packaged(recipe) or recipe
    text = file.read_text(encoding="utf-8").replace("\\\n#", "") if file.is_file() else ""
    command = re.search(r"^#\s+(blockdiff data .*)", text, re.MULTILINE)
    return "correct it or make the data" + ("" if command is None else f": {command[1]}")


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *sections, key = path.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[key] = value
