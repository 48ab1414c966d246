"""Rules for the fields of a dataclass, as a table, and the first field that breaks its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """The rule of a field: its type, the requirement in words, and whether a value of the type meets it.

    is_item: whether a list may have this item (None: any item is allowed).
    """

    kind: type | tuple[type, ...]
    words: str
    is_met: Callable[[Any], bool] = lambda value: True
    is_item: Callable[[Any], bool] | None = None


def broken_rule(instance: Any, rules: Mapping[str, Rule]) -> str | None:
    """Return a message about the first field that breaks its rule; None if all fields keep theirs.

    A bool is no number. None is allowed if it is the default.
    """
    for name, (kind, words, is_met, is_item) in rules.items():
        value = getattr(instance, name)
        if value is None and getattr(type(instance), name, ...) is None:  # a default is an attribute of the class
            continue
        is_kind = isinstance(value, kind) and isinstance(value, bool) is (kind is bool)
        if not is_kind or not is_met(value):
            return f"{name} must be {words}, got {value!r:.80}"
        if is_item is not None and (wrong := [item for item in value if not is_item(item)]):
            return f"{name} must be {words}, got {wrong[0]!r:.80} in it"
    return None
