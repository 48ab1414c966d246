"""The option --columns: which column of the data holds what."""

from __future__ import annotations

import typer

ROLES = ("prompt", "response", "messages", "system", "id")
HELP = "Columns of other names: prompt=question,response=answer."


def parse_columns(text: str | None) -> dict[str, str]:
    """`prompt=question,response=answer` as a dict; typer.BadParameter says what is wrong with it."""
    columns: dict[str, str] = {}
    for entry in (text or "").split(","):
        role, equals, column = (part.strip() for part in entry.partition("="))
        if not entry.strip():
            continue
        if not equals or not column or role not in ROLES:
            raise typer.BadParameter(
                f"{entry.strip()!r} is not ROLE=COLUMN with one of {', '.join(ROLES)}", param_hint="--columns"
            )
        if role in columns:
            raise typer.BadParameter(f"{role} appears twice", param_hint="--columns")
        columns[role] = column
    return columns
