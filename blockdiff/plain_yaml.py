"""YAML of a recipe or of serve.yaml as plain values. Its size is limited, because a stranger may have written it."""

from __future__ import annotations

import re
from typing import Any

import yaml

LARGEST_FILE = 1 << 18  # bytes
MOST_CHARACTERS = 1 << 20  # of all values once anchors are written out
_OF_A_VALUE = 20  # characters counted for each value in addition to its text


class _Loader(yaml.SafeLoader):
    """YAML with the numbers of YAML 1.2, duplicate keys refused and anchors bounded.

    1e-4 is a number. 1:30 and 010 are texts, which YAML 1.1 reads as numbers of base 60 and 8. If a number is expected,
    the text 010 is ten.
    """

    def construct_document(self, node: yaml.Node) -> Any:
        _require_small(node, {})
        return super().construct_document(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _refusal("a key is one word, not a list or a mapping", key_node)
            if key_node.value in seen:
                raise _refusal(f"the key {key_node.value!r} appears twice", key_node)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> Any:
        text = self.construct_scalar(node)
        return text if _OTHER_BASE.match(text) else super().construct_yaml_int(node)

    def construct_yaml_float(self, node: yaml.ScalarNode) -> Any:
        text = self.construct_scalar(node)
        return text if ":" in text else super().construct_yaml_float(node)


_OTHER_BASE = re.compile(r"[-+]?0[0-9_]|.*:")
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def parse(text: str) -> Any:
    """Return the value of a YAML text. Raises yaml.YAMLError, with a `problem`, if it cannot be read."""
    try:
        return yaml.load(text, Loader=_Loader)  # _Loader is a SafeLoader
    except RecursionError:
        raise yaml.MarkedYAMLError(problem="it is nested too deeply") from None
    except (ValueError, OverflowError) as error:  # text that looks like a number or a date and is none
        raise yaml.MarkedYAMLError(problem=" ".join(str(error).split())) from None


def _refusal(problem: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _require_small(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Count the characters of a value with its anchors written out. Raises YAMLError if they are too many.

    sizes: the counts of nodes by identity, 0 inside a node.
    """
    if id(node) in sizes:
        if not sizes[id(node)]:
            raise _refusal("it holds itself", node)
        return sizes[id(node)]
    sizes[id(node)] = 0
    size = _OF_A_VALUE
    if isinstance(node, yaml.ScalarNode):
        if "\0" in node.value:  # no path can have it
            raise _refusal("a text has a character of code 0", node)
        size += len(node.value)
    elif isinstance(node, yaml.MappingNode):
        size += sum(_require_small(each, sizes) for pair in node.value for each in pair)
    else:
        size += sum(_require_small(each, sizes) for each in node.value)
    if size > MOST_CHARACTERS:
        raise _refusal(f"with its anchors written out it is longer than {MOST_CHARACTERS:,} characters", node)
    sizes[id(node)] = size
    return size
