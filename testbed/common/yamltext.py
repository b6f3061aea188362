"""YAML 1.2 by libyaml: a text's nodes, which know their lines, its plain values, and plain values as a text."""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.cyaml import CSafeDumper, CSafeLoader

DEEPEST = 200
"""How deep a text may nest: libyaml's reader ends the process where a stack does."""

# The core schema, https://yaml.org/spec/1.2.2/#103-core-schema; what comes first holds.
_TAGS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}


class _Reader(CSafeLoader):
    """Reads YAML 1.2, in which yes is a word and 1:30 no number of seconds."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (as the library declares it)
    depth = 0

    def descend_resolver(self, current_node: Any, current_index: Any) -> None:
        """Count how deep the text nests; its reader calls this for each node."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise yaml.YAMLError("is nested too deeply")

    def ascend_resolver(self) -> None:
        """Count likewise."""
        self.depth -= 1


class _Writer(CSafeDumper):
    """Puts into quotes what a reader of YAML 1.1 or 1.2 would take for something else than a text."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return that whatever stands twice is written twice."""
        return True


for _name, (_pattern, _first) in _TAGS.items():
    for _class in (_Reader, _Writer):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"(?:{_pattern})\\Z"), _first)


def nodes(text: str) -> yaml.Node | None:
    """Return the node of a text's one document, None if it is empty.

    Raises `yaml.YAMLError` for what is not YAML and for what is nested too deeply.
    """
    reader = _Reader(text)
    try:
        found: yaml.Node | None = reader.get_single_node()
        return found
    finally:
        reader.dispose()


def values(text: str) -> Any:
    """Return the plain values of a text. Raises `yaml.YAMLError` for what is not YAML."""
    return yaml.load(text, _Reader)


def written(plain: Any, width: int = 110, lines: bool = True) -> str:
    """Return plain values as a text, each on a line of its own if ``lines``, of about so many columns.

    Raises `yaml.YAMLError` for a value that is of no plain type.
    """
    flow = False if lines else None
    text: str = yaml.dump(
        plain, Dumper=_Writer, default_flow_style=flow, width=width, sort_keys=False, allow_unicode=True
    )
    return text
