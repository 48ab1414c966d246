"""`make messages`: every message of an error or a warning of the program, for `tests/messages.txt`.

The text is that of the source: what is filled in stands in braces. No test compares the file; whoever changes a message
reads its diff.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("blockdiff", "cli", "recipes")


def text_of(node: ast.expr) -> str:
    """The text of an expression, with what is not literal in braces."""
    match node:
        case ast.Constant(str(text)):
            return text
        case ast.JoinedStr(values):
            return "".join(map(text_of, values))
        case ast.FormattedValue(value):
            return f"{{{ast.unparse(value)}}}"
        case ast.BinOp(left, ast.Add(), right):
            return text_of(left) + text_of(right)
    return f"{{{ast.unparse(node)}}}"


def messages(tree: ast.Module) -> Iterator[str]:
    """The messages of a module in order: the class of the error, or "warning", and the text."""
    found = []
    for node in ast.walk(tree):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call) or not call.args:
            continue
        name = ast.unparse(call.func)
        if isinstance(node, ast.Raise):
            found.append((node.lineno, f"{name}: {text_of(call.args[0])}"))
        elif name == "warnings.warn":
            found.append((node.lineno, f"warning: {text_of(call.args[0])}"))
    yield from (text for _, text in sorted(found))


def main() -> None:
    """Print the messages of every module that has some."""
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            if lines := list(messages(ast.parse(file.read_text(encoding="utf-8")))):
                print(f"{file.relative_to(ROOT)}\n  " + "\n  ".join(lines) + "\n")


if __name__ == "__main__":
    main()
