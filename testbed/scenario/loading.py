"""Loading of scenario files from YAML to a validated `Scenario`.

Every problem is reported as one line with location and remedy. A key here is the path of a value in the file, as a
tuple: ``("network", "cells", 0, "rate")``, or in dotted form ``network.cells.0.rate``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from yaml import MappingNode, MarkedYAMLError, Node, ScalarNode, SequenceNode, YAMLError

from testbed.common import yamltext
from testbed.common.errors import Diagnostic, InputError, Key, format_key, parse_key
from testbed.scenario.explaining import explain
from testbed.scenario.finding import find
from testbed.scenario.schema import Scenario, Source

M = TypeVar("M", bound=BaseModel)
_TAG = "tag:yaml.org,2002:"
"""Prefix of the tags of YAML's own types, such as ``tag:yaml.org,2002:int``; a file writes it as ``!!``."""
_MAX_BYTES = 1 << 20
"""Maximum size of a scenario file in bytes; a larger file is probably not a scenario."""
_MAX_VALUES = 40_000
"""Maximum number of values after aliases are unfolded, more than any scenario has."""
_MAX_SEPARATORS = 35_000
"""Limit on line ends, commas and opening brackets, which dominate the time of a YAML parser."""

MAX_CHANGES = 10_000
"""Maximum number of lines of a link trace, all of which are part of the scenario."""


def load(path: str | Path, overrides: Iterable[str] = ()) -> Scenario:
    """Read and validate a scenario file.

    ``path`` may also be a bare name: ``quickstart`` is ``scenarios/quickstart.yaml``, here, of the testbed itself or of
    an installed package. Each override reads ``key=value`` with a dotted key and a YAML value, as in
    ``network.link.rate=10mbit``. Raises `InputError` with one line for each problem:
    ``file:line: key: what is wrong: what would be right``.
    """
    file = find(path)
    text = _read_scenario(file)
    tree, source = _Reader(str(file)).read(text)
    for override in overrides:
        source = source.override({_set_override(tree, override): f"--set {override}"})
    return validate(tree, source)


def read_keys(file: Path) -> Mapping[str, Any]:
    """Return the keys of a YAML file referenced by a scenario. Raises `InputError`."""
    tree, _ = _Reader(str(file)).read(_read_scenario(file))
    return tree


def validate(tree: Mapping[str, Any], source: Source) -> Scenario:
    """Validate plain values as a scenario with source positions. Raises `InputError` as `load` does."""
    try:
        scenario = Scenario.model_validate(tree)
    except ValidationError as error:
        raise source.error(explain(error, Scenario)) from None
    return _with_trace(scenario, source)


def _with_trace(scenario: Scenario, source: Source) -> Scenario:
    """Replace the name of a link trace by the lines of the file."""
    # The scenario in the results folder then needs no second file.
    if isinstance(scenario.trace, str):
        file = source.folder / scenario.trace
        lines = _trace_lines(file, source.where(("trace",)))
        origins: dict[Key, str] = {}
        for index, line_number in enumerate(lines):
            origins["trace", index] = f"{file}:{line_number}"
        scenario = scenario.model_copy(update={"trace": tuple(lines.values())})
        source = source.override(origins)
    if len(scenario.trace) > MAX_CHANGES:
        text = f"has {len(scenario.trace)} entries, more than {MAX_CHANGES}: shorten or thin it out"
        raise source.error([Diagnostic(("trace",), text)])
    return scenario.with_source(source)


def _trace_lines(file: Path, where: str) -> dict[int, str]:
    """Return the entries of a link trace by line number; ``where`` is the place of the file's name in the scenario."""
    try:
        text = _read_text(
            file,
            size_hint=f"a trace has at most {MAX_CHANGES} entries",
            format_hint="a trace is a CSV file",
        )
    except (OSError, ValueError) as error:
        raise InputError(
            f"{where}: trace: {file} cannot be read: {_error_reason(error)}"
        ) from None
    lines = _csv_lines(text)
    example = "lines such as 12.5,link a->b rate,10mbit"
    if not lines:
        raise InputError(f"{file}: has no entries: write {example}")
    line_number, first_line = next(iter(lines.items()))
    # A file in another format would cause thousands of errors, one for each line.
    if first_line.count(",") < 2:
        raise InputError(
            f"{file}:{line_number}: '{first_line[:40]}' is not time,what,value: convert the trace to {example}"
        )
    return lines


def _csv_lines(text: str) -> dict[int, str]:
    """Return the lines of a CSV text by their numbers, without empty lines, comments and the header."""
    entries: dict[int, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        cells = [cell.strip().lower() for cell in entry.split(",")]
        is_header = not entries and cells == ["time", "what", "value"]
        if not is_header:
            entries[number] = entry
    return entries


def parse(model: type[M], values: Mapping[str, Any]) -> M:
    """Validate the plain values of one section, such as a device profile or a fault.

    Raises `InputError` with all problems in one line.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise InputError("; ".join(map(str, explain(error, model)))) from None


def _read_scenario(file: Path) -> str:
    if file.is_dir():
        raise InputError(f"{file}: is a folder: name a scenario file in it")
    try:
        return _read_text(
            file,
            size_hint="a scenario is a short text",
            format_hint="a scenario is a YAML file",
        )
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read: {_error_reason(error)}") from None


def _read_text(file: Path, *, size_hint: str, format_hint: str) -> str:
    """Read a text file; the hints end the messages for files too large or not text."""
    if file.stat().st_size > _MAX_BYTES:
        raise InputError(f"{file}: is larger than 1 MiB: {size_hint}")
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{file}: is not text (byte {error.start} is not UTF-8): {format_hint}"
        ) from None


def _error_reason(error: Exception) -> object:
    return getattr(error, "strerror", None) or error


class _Reader:
    """Reader of one YAML text, which may contain mappings, lists, scalars and aliases.

    It converts YAML nodes to plain values, and stores the line of each value.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self.lines: dict[Key, int] = {}
        self.problems: list[Diagnostic] = []
        self.enclosing: list[Node] = []
        """The collections that contain the present node; an alias of one of them would never end."""
        self.value_count = 0
        """Number of values so far, each use of an alias included."""

    def read(self, text: str) -> tuple[dict[str, Any], Source]:
        """Return the values and the source positions of a text. Raises `InputError`."""
        # Counted before parsing, which may take long.
        separators = sum(map(text.count, "\n,[{"))
        if separators > _MAX_SEPARATORS:
            limit = f"{_MAX_SEPARATORS:,} lines, commas and opening brackets"
            raise InputError(
                f"{self.file}: has {separators:,}, more than {limit}: a scenario is a short text"
            )
        try:
            node = yamltext.nodes(text)
        except MarkedYAMLError as error:
            raise InputError(self._describe_error(error, text)) from None
        except (YAMLError, ValueError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(f"{self.file}: is not YAML: {reason}") from None
        if node is None:
            raise InputError(
                f"{self.file}: is empty: see scenarios/quickstart.yaml for an example"
            )
        if not isinstance(node, MappingNode):
            kind = "a list" if isinstance(node, SequenceNode) else "a single value"
            line = node.start_mark.line + 1
            raise InputError(
                f"{self.file}:{line}: is {kind}: a scenario is a mapping, 'name: ...' and so on"
            )
        tree = self._node_mapping(node, ())
        source = Source(self.file, {(): node.start_mark.line + 1, **self.lines})
        if self.problems:
            raise source.error(self.problems)
        return tree, source

    def _describe_error(self, error: MarkedYAMLError, text: str) -> str:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        lines = text.splitlines()
        # An error at the end of the text is reported for the line after the last one.
        line_text = lines[line - 1] if line <= len(lines) else ""
        reason = " ".join(str(error.problem or error.context).split())
        hint = ""
        if reason == "second occurrence":
            reason = "duplicate anchor: rename one of the two"
        elif re.search(r":\s*[<>=!%&*|]", line_text):
            hint = ": write values that begin with a sign in quotes, as in accuracy: '>= 0.9'"
        elif "\t" in line_text:
            hint = ": indent with spaces, YAML allows no tabs"
        return f"{self.file}:{line}: is not YAML: {reason}{hint}"

    def _node_value(self, node: Node, key: Key) -> Any:
        """Return the plain value of a node at a key, and report problems of the value."""
        self.value_count += 1
        # Aliases of aliases can double the values with each line ("billion laughs").
        if self.value_count > _MAX_VALUES:
            text = f"unfolds to more than {_MAX_VALUES} values: write fewer, or use fewer aliases"
            raise InputError(f"{self.file}: {text}")
        if any(node is outer for outer in self.enclosing):
            self._report(key, "is an alias of something that contains it: write it out")
            return None
        if isinstance(node, ScalarNode):
            return self._node_scalar(node, key)
        if node.tag not in (_TAG + "map", _TAG + "seq"):
            return self._refuse_tag(node, key)
        if isinstance(node, MappingNode):
            return self._node_mapping(node, key)
        self.enclosing.append(node)
        items = []
        for index, item in enumerate(node.value):
            self.lines[(*key, index)] = item.start_mark.line + 1
            items.append(self._node_value(item, (*key, index)))
        self.enclosing.pop()
        return items

    def _report(self, key: Key, text: str) -> None:
        self.problems.append(Diagnostic(key, text))

    def _node_mapping(self, node: MappingNode, key: Key) -> dict[str, Any]:
        self.enclosing.append(node)
        mapping: dict[str, Any] = {}
        for name_node, value_node in node.value:
            line = name_node.start_mark.line + 1
            name = name_node.value if isinstance(name_node, ScalarNode) else "?"
            inner = (*key, name)
            first_line = self.lines.setdefault(inner, line)
            if not isinstance(name_node, ScalarNode):
                self._report(inner, "a key must be a single word")
            elif name == "<<":
                text = "merging with '<<' is not YAML 1.2: alias whole values (key: *name) or write the keys out"
                self._report(inner, text)
            elif name in mapping:
                # Errors are sorted by line: this one belongs to the repetition.
                self.lines[inner] = line
                text = f"duplicate key, first defined in line {first_line}: remove one"
                self._report(inner, text)
            else:
                mapping[name] = self._node_value(value_node, inner)
        self.enclosing.pop()
        return mapping

    def _node_scalar(self, node: ScalarNode, key: Key) -> Any:
        kind = str(node.tag).removeprefix(_TAG)
        text: str = node.value
        if "\0" in text:
            text = "contains a NUL character, which is invalid in names and paths"
            self._report(key, text)
            return None
        try:
            if kind == "int":
                # With base 0, Python refuses a leading zero, which is decimal in YAML 1.2.
                return int(text, 0) if re.match(r"[+-]?0[xob]", text) else int(text)
            if kind == "float":
                # YAML writes .inf and .nan, Python inf and nan.
                return float(re.sub(r"(?i)\.(inf|nan)\Z", r"\1", text))
        except ValueError:
            # More digits than Python converts: validation refuses the text.
            return text
        if kind == "bool":
            return text.lower() == "true"
        if kind == "null":
            return None
        return text if kind == "str" else self._refuse_tag(node, key)

    def _refuse_tag(self, node: Node, key: Key) -> None:
        tag = str(node.tag).replace(_TAG, "!!")
        self._report(
            key, f"has the tag '{tag}': a scenario needs no tags, write the plain value"
        )


def _set_override(tree: dict[str, Any], override: str) -> Key:
    """Set the key of ``key=value`` in the plain values of a scenario; return the key."""
    dotted, equals_sign, written = override.partition("=")
    if not equals_sign or not dotted.strip():
        raise InputError(
            f"--set {override}: must be KEY=VALUE, such as network.link.rate=10mbit"
        )
    key = parse_key(dotted.strip())
    try:
        document, _ = _Reader(f"--set {dotted}").read("value: " + written)
        value = document.get("value")
    except InputError:
        # A condition such as >= 0.9 is not YAML without quotes, which the shell has removed.
        value = written.strip()
    set_value(tree, key, value, f"--set {override}")
    return key


def set_value(tree: dict[str, Any], key: Key, value: Any, where: str) -> None:
    """Set one value in plain nested values, and create missing mappings on the way.

    Raises `InputError`, naming ``where``, for a key below a single value or beyond the end of a list.

    >>> tree = {"network": {"cells": [{"rate": "6mbit"}]}}
    >>> set_value(tree, ("network", "cells", 0, "rate"), "1mbit", "--set")
    >>> tree
    {'network': {'cells': [{'rate': '1mbit'}]}}
    """
    inner: Any = tree
    for depth, part in enumerate(key):
        is_last = depth == len(key) - 1
        if isinstance(inner, list) and isinstance(part, int) and part < len(inner):
            if is_last:
                inner[part] = value
            inner = inner[part]
        elif isinstance(inner, dict):
            # A part of digits has been parsed as an index, but the keys of a mapping are text.
            name = str(part)
            if is_last:
                inner[name] = value
            elif inner.get(name) is None:
                inner[name] = {}
            inner = inner[name]
        else:
            reached = format_key(key[:depth])
            text = f"'{reached}' is a single value without keys: set '{reached}' itself"
            if isinstance(inner, list):
                text = _describe_items(reached, len(inner))
            raise InputError(f"{where}: {format_key(key)}: unknown key: {text}")


def _describe_items(key: str, count: int) -> str:
    """Return the valid keys of the items of a list, as the end of a message."""
    if count == 0:
        return f"'{key}' is an empty list: set '{key}' itself"
    if count == 1:
        return f"'{key}' has 1 item: use {key}.0"
    return f"'{key}' has {count} items: use {key}.0 to {key}.{count - 1}"
