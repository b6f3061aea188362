"""YAML 1.2 through libyaml: parse text to nodes with line numbers or to plain values, and write plain values."""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.cyaml import CSafeDumper, CSafeLoader

MAX_DEPTH = 200
"""Maximum depth of nested values. Thousands of levels would overflow the stack of libyaml and end the process."""

# The core schema, https://yaml.org/spec/1.2.2/#103-core-schema. The first matching pattern decides.
_TAGS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}
"""Type of scalars -> pattern of their texts, and the possible first characters ("" for empty text)."""


class _Reader(CSafeLoader):
    """Reads YAML 1.2, in which `yes` is a text and not true, and 1:30 a text and not 90."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (as the library declares it)
    depth = 0

    def descend_resolver(self, current_node: Any, current_index: Any) -> None:
        """Raise `yaml.YAMLError` below a depth of `MAX_DEPTH`. PyYAML calls the method on entering a node."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise yaml.YAMLError("is nested too deeply")

    def ascend_resolver(self) -> None:
        """Leave a node."""
        self.depth -= 1


class _Writer(CSafeDumper):
    """Quote text parsed as another type by a YAML 1.1 or 1.2 reader."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write repeated objects in full, without anchors."""
        return True


for _name, (_pattern, _first_characters) in _TAGS.items():
    for _class in (_Reader, _Writer):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_name}",
            re.compile(f"(?:{_pattern})\\Z"),
            _first_characters,
        )


def nodes(text: str) -> yaml.Node | None:
    """Return the root node of a single-document text; None for empty text.

    Raises `yaml.YAMLError` for invalid YAML and for values nested too deeply.
    """
    reader = _Reader(text)
    try:
        root: yaml.Node | None = reader.get_single_node()
        return root
    finally:
        reader.dispose()


def values(text: str) -> Any:
    """Parse a text to plain values. Raises `yaml.YAMLError` for invalid YAML.

    >>> values("{yes: 1:30}")
    {'yes': '1:30'}
    """
    return yaml.load(text, _Reader)


def written(plain: Any, width: int = 110, lines: bool = True) -> str:
    """Write plain values as YAML of about ``width`` columns, each value on a separate line if ``lines``.

    Raises `yaml.YAMLError` for a value that is not plain.
    """
    # PyYAML writes collections of scalars as [ ... ] and { ... } for None, and none for False.
    flow = False if lines else None
    text: str = yaml.dump(
        plain,
        Dumper=_Writer,
        default_flow_style=flow,
        width=width,
        sort_keys=False,
        allow_unicode=True,
    )
    return text
