"""The packages: none imports one with a higher number, and importing is light."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMPORT_ORDER = {
    "errors": 0,
    "files": 0,
    "terminal": 0,
    "metrics": 0,
    "memory": 0,
    "devices": 0,
    "seeding": 0,
    "time_limit": 0,
    "spans": 0,
    "images": 0,
    "canvas": 0,
    "tensor_pieces": 0,
    "field_rules": 0,
    "imported": 0,
    "rank_json": 0,
    "request_options": 0,
    "decisions": 0,
    "stored_forms": 0,
    "kernels": 1,
    "diffusion": 1,
    "data": 2,
    "recipes": 2,
    "layers": 2,
    "models": 3,
    "checkpoint": 4,
    "parallel": 4,
    "canvas_inputs": 4,
    "scored_positions": 4,
    "objective": 5,
    "draft_objective": 5,
    "sampling": 5,
    "plain_yaml": 6,
    "evals": 6,
    "plots": 6,
    "serving": 6,
    "rl": 6,
    "training": 7,
    "cli": 8,
}
# What a bare GPU machine imports, and all it may import beside the standard library when it does.
LIGHT = {name for name, number in IMPORT_ORDER.items() if number < 6} - {"data", "recipes"}
LIGHT_TRAINING = (
    *("training", "training.freeze", "training.muon", "training.optimiser", "training.schedule"),
    *("training.step", "training.report"),
    *("training.kinds", "training.kinds.canvas_heldout", "training.kinds.drafter_heldout"),
    *("training.checkpoint_content", "training.checkpoint_reader", "training.checkpoint_writer"),
)
LIGHT_DATA = (
    *("data", "data.assistant_spans", "data.control_tokens", "data.messages", "data.rows", "data.spellings"),
    "data.strict_json",
    *("data.template", "data.left_out", "data.tokenise", "data.image_file", "data.image_parts", "data.images"),
)
THERE = {"blockdiff", "torch", "triton", "transformers", "safetensors", "tokenizers"}


def modules() -> dict[str, Path]:
    """Every module of the package by its installed name; `cli/` and `recipes/` install inside it."""
    found = {}
    for folder, prefix in (("blockdiff", "blockdiff"), ("cli", "blockdiff.cli"), ("recipes", "blockdiff.recipes")):
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([prefix, *(part for part in parts if part != "__init__")])] = file
    return found


MODULES = modules()


def number_of(module: str) -> int | None:
    """The number of `blockdiff.x...`; None for the face of the package and for other packages."""
    parts = module.split(".")
    return IMPORT_ORDER[parts[1]] if parts[0] == "blockdiff" and len(parts) > 1 and parts[1] != "__main__" else None


def imported(module: str, tree: ast.AST, is_package: bool) -> Iterator[tuple[str, int]]:
    """The modules that the nodes of `tree` import, as absolute names, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")
            base = base[: len(base) - node.level + is_package] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            # `from blockdiff import canvas` imports blockdiff.canvas
            names = [f"{origin}.{alias.name}" for alias in node.names]
            yield from ((name if name in MODULES else origin, node.lineno) for name in names)


class WithoutAnnotations(ast.NodeTransformer):
    """Drops what is imported for annotations alone, under TYPE_CHECKING."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        return node.orelse if "TYPE_CHECKING" in ast.unparse(node.test) else self.generic_visit(node)


class RunAtImport(WithoutAnnotations):
    """Keeps the statements that importing a module runs: no function bodies, nothing under TYPE_CHECKING."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        return None

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]


def parse(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def imports_of(module: str, tree: ast.Module) -> set[tuple[str, int]]:
    return set(imported(module, tree, MODULES[module].name == "__init__.py"))


@pytest.mark.quick
def test_every_package_has_a_number():
    assert {name.split(".")[1] for name in MODULES if name.count(".")} - {"__main__"} <= IMPORT_ORDER.keys()


@pytest.mark.quick
@pytest.mark.parametrize("package", IMPORT_ORDER)
def test_no_package_imports_one_with_a_higher_number(package):
    wrong = [
        f"{MODULES[module].relative_to(ROOT)}:{line} imports {name}"
        for module in MODULES
        if module.split(".")[1:2] == [package]
        for name, line in imports_of(module, parse(module))
        if (number_of(name) or 0) > IMPORT_ORDER[package]
    ]
    assert not wrong


@pytest.mark.quick
@pytest.mark.parametrize("package", IMPORT_ORDER)
def test_modules_of_a_package_import_each_other_in_one_order(package):
    """Function bodies and TYPE_CHECKING count too: an import hidden in one is still a circle.

    In two packages annotations may name what imports them: a family its model, a callback its trainer.
    """
    needs = {}
    for module in MODULES:
        if module.split(".")[1:2] == [package]:
            tree = WithoutAnnotations().visit(parse(module)) if package in ("models", "training") else parse(module)
            needs[module] = {name for name, _ in imports_of(module, tree) if name in MODULES and name != module}
    assert list(graphlib.TopologicalSorter(needs).static_order())  # raises CycleError with the circle


def is_light(module: str) -> bool:
    inner = module.partition(".")[2]
    return inner.partition(".")[0] in LIGHT or inner in (*LIGHT_TRAINING, *LIGHT_DATA)


@pytest.mark.quick
def test_light_packages_import_only_what_a_bare_gpu_machine_has():
    wrong = []
    for module in filter(is_light, MODULES):
        for name, line in imports_of(module, RunAtImport().visit(parse(module))):
            top = name.partition(".")[0]
            allowed = top in sys.stdlib_module_names or top in THERE
            if not allowed or (name in MODULES and name.count(".") and not is_light(name)):
                wrong.append(f"{MODULES[module].relative_to(ROOT)}:{line} imports {name}")
    assert not wrong


def after_importing(code: str) -> set[str]:
    script = f"import sys; {code}; print(*{{m.partition('.')[0] for m in sys.modules}})"
    run = [sys.executable, "-c", script]
    return set(subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.quick
def test_importing_blockdiff_imports_nothing_heavy():
    loaded = after_importing("import blockdiff; blockdiff.__version__; dir(blockdiff)")
    assert "blockdiff" in loaded
    assert not loaded & {"torch", "numpy", "transformers", "safetensors", "yaml", "pydantic", "typer", "rich"}


def test_the_public_names_resolve_on_first_use():
    loaded = after_importing("import blockdiff as b; assert callable(b.load) and callable(b.Sampler)")
    assert "torch" in loaded
    assert not loaded & {"datasets", "pydantic", "matplotlib", "accelerate"}


def test_nothing_is_ever_unpickled_or_run_from_the_hub():
    forbidden = ("torch.load(", "torch.save(", "import pickle", "from pickle", "trust_remote_code=True")
    forbidden += ("gather_object(", "_object_list(")  # pickle
    for module, file in MODULES.items():
        text = file.read_text(encoding="utf-8")
        assert not [word for word in forbidden if word in text], module


@pytest.mark.quick
def test_of_the_tests_only_those_of_the_benchmarks_import_benchmarks():
    """Tests and benchmarks share the modules of tests/support instead."""
    wrong = []
    for file in (ROOT / "tests").rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = [name for name, _ in imported("tests", tree, is_package=True)]
        if file.parent.name != "benchmarks" and any(name.partition(".")[0] == "benchmarks" for name in names):
            wrong.append(str(file.relative_to(ROOT)))
    assert not wrong
