"""Write the generated parts of the documentation, and the project in `compose/`.

Run ``python docs/generate.py`` after a change of a command's help, of the scenario's schema, or of metrics and events.
``--check`` writes nothing, prints the names of files that are out of date, and exits with 1 if there are any. A test
runs this check.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from testbed.methods import METHODS
from testbed.scenario.expand import trials
from testbed.scenario.explaining import published_schema
from testbed.scenario.loading import load
from testbed.trace.events import EVENTS, EventType
from testbed.trace.metrics_spec import Metric, MetricsSpec
from testbed.trace.registry import COMMON, OF_DEVICES
from testbed_controller.cli.main import COMMANDS, testbed
from testbed_controller.lab.composing import compose_project

DOCS = Path(__file__).resolve().parent
HELP_WIDTH = 88
"""Number of columns of a help text."""
TYPE_NAMES = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "array": "list",
    "object": "keys",
}
"""Type of JSON schema -> its name in the table of scenario keys."""
Declared = TypeVar("Declared", Metric, EventType)
Schema = Mapping[str, Any]
"""A JSON schema, or a part of one."""


def generate_files() -> Iterator[tuple[Path, str]]:
    """Yield the path and the current text of every file with a generated part."""
    yield from _command_pages()
    yield from _reference_pages()
    schema = json.dumps(published_schema(), indent=2)
    yield DOCS / "scenario.schema.json", f"{schema}\n"
    quickstart = trials(load("quickstart"))[0]
    for name, text in compose_project(quickstart, {}).items():
        yield DOCS.parent / "compose" / name, text


def _command_pages() -> Iterator[tuple[Path, str]]:
    """Yield the page of each command with the command's help texts."""
    for name in COMMANDS:
        command = testbed.get_command(click.Context(testbed), name)
        assert command is not None
        page = DOCS / "commands" / f"{name}.md"
        text = f"# testbed {name}\n\n<!-- help -->\n<!-- /help -->\n"
        if page.exists():
            text = page.read_text()
        helps = "\n\n".join(_help_blocks(command, f"testbed {name}"))
        yield page, replace_part(text, "help", helps)


def _reference_pages() -> Iterator[tuple[Path, str]]:
    """Yield the pages with the tables of keys, metrics and events."""
    tables = {
        "keys.md": ("keys", _keys_table()),
        "metrics.md": ("metrics", _metrics_table()),
        "faults.md": ("events", _events_table()),
    }
    for name, (mark, table) in tables.items():
        page = DOCS / "scenario" / name
        yield page, replace_part(page.read_text(), mark, table)


def replace_part(text: str, mark: str, content: str) -> str:
    """Replace the text between the two marks of a page. Raises ValueError for a page without the marks.

    >>> replace_part("<!-- keys -->\\nold\\n<!-- /keys -->", "keys", "new")
    '<!-- keys -->\\nnew\\n<!-- /keys -->'
    """
    pattern = re.compile(rf"<!-- {mark} -->\n.*?<!-- /{mark} -->", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"the page lacks <!-- {mark} --> and <!-- /{mark} -->")
    part = f"<!-- {mark} -->\n{content}\n<!-- /{mark} -->"
    # A function, since backslashes of a help text are no references to groups.
    return pattern.sub(lambda _: part, text)


def _help_blocks(command: click.Command, name: str) -> Iterator[str]:
    """Yield the help of a command and of each subcommand, as blocks of Markdown."""
    context = click.Context(
        command,
        info_name=name,
        terminal_width=HELP_WIDTH,
        help_option_names=["-h", "--help"],
    )
    yield f"```text\n$ {name} --help\n{command.get_help(context)}\n```"
    if not isinstance(command, click.Group):
        return
    for subcommand_name in command.list_commands(context):
        subcommand = command.get_command(context, subcommand_name)
        assert subcommand is not None
        yield from _help_blocks(subcommand, f"{name} {subcommand_name}")


def _metrics_table() -> str:
    lines = ["| metric | unit | meaning | methods |", "|---|---|---|---|"]
    users = _users_of(COMMON.values(), lambda declared: declared.metrics)
    for metric, methods in users.items():
        cells = [f"`{metric.name}`", metric.kind, metric.meaning, methods]
        lines.append(_table_line(cells))
    for name, device_metric in OF_DEVICES.items():
        label = f"`devices.<device>.{name}`"
        cells = [label, device_metric.kind, device_metric.meaning, "every method"]
        lines.append(_table_line(cells))
    return "\n".join(lines)


def _events_table() -> str:
    lines = [
        "| event | meaning | keys of `when` | fields | methods |",
        "|---|---|---|---|---|",
    ]
    users = _users_of(EVENTS, lambda declared: declared.events)
    for event, methods in users.items():
        keys = "no fault can wait for it"
        if event.keys is not None:
            keys = ", ".join(event.keys)
        fields = ", ".join(event.fields)
        cells = [f"`{event.name}`", event.meaning, keys, fields, methods]
        lines.append(_table_line(cells))
    return "\n".join(lines)


def _users_of(
    common: Iterable[Declared],
    declarations: Callable[[MetricsSpec], Iterable[Declared]],
) -> dict[Declared, str]:
    """Return the methods of each metric or event as text; declarations of every method come first."""
    users = {each: ["every method"] for each in common}
    for method in METHODS.values():
        for each in declarations(method.declared):
            # Methods of a family declare the same metric, which has one row.
            users.setdefault(each, []).append(method.name)
    return {each: ", ".join(names) for each, names in users.items()}


def _keys_table() -> str:
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    root = published_schema()
    for key, schema, is_required in _walk_keys(root, root, ""):
        default = "required" if is_required else _format_default(schema)
        meaning = schema.get("description", "").replace("<", "&lt;")
        cells = [f"`{key}`", _describe_values(schema, root), default, meaning]
        lines.append(_table_line(cells))
    return "\n".join(lines)


def _walk_keys(
    schema: Schema, root: Schema, prefix: str
) -> Iterator[tuple[str, Schema, bool]]:
    """Yield dotted keys with schema and whether the key is required, depth first."""
    required = schema.get("required", ())
    for name, value in schema.get("properties", {}).items():
        key = f"{prefix}{name}"
        yield key, value, name in required
        for part in _alternatives(value, root):
            yield from _walk_keys(part, root, f"{key}.")
            for item in _alternatives(part.get("items", {}), root):
                yield from _walk_keys(item, root, f"{key}[].")
            for named in part.get("patternProperties", {}).values():
                for entry in _alternatives(named, root):
                    yield from _walk_keys(entry, root, f"{key}.<name>.")


def _alternatives(schema: Schema, root: Schema) -> Iterator[Schema]:
    """Yield the possible schemas of a value, with references resolved.

    >>> root = {"$defs": {"size": {"type": "integer"}}}
    >>> list(_alternatives({"anyOf": [{"$ref": "#/$defs/size"}, {"type": "null"}]}, root))
    [{'type': 'integer'}, {'type': 'null'}]
    """
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        yield from _alternatives(root["$defs"][name], root)
        return
    choices = schema.get("anyOf") or schema.get("oneOf")
    # A quantity is a number or a text with a unit; its example describes both.
    if choices is None or "examples" in schema:
        yield schema
        return
    for choice in choices:
        yield from _alternatives(choice, root)


def _describe_values(schema: Schema, root: Schema) -> str:
    """Return the kinds of values of a key in a few words."""
    kinds = []
    for part in _alternatives(schema, root):
        if "examples" in part:
            kinds.append(f"like `{part['examples'][0]}`")
        elif "enum" in part or "const" in part:
            choices = part.get("enum", [part.get("const")])
            kinds.append(", ".join(f"`{choice}`" for choice in choices))
        elif part.get("type") != "null":
            kinds.append(TYPE_NAMES.get(part.get("type", ""), "any"))
    # A dictionary removes repeated words and keeps their order.
    return " or ".join(dict.fromkeys(kinds))


def _format_default(schema: Schema) -> str:
    """Return the default of a key; empty without one, and for keys below the key."""
    default = schema.get("default")
    if default in (None, [], "") or isinstance(default, dict):
        return ""
    return f"`{default}`"


def _table_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(check: bool) -> int:
    """Write all outdated files, or with ``check`` print the names of these files; return the exit status."""
    is_current = True
    for path, text in generate_files():
        # A file that is current keeps its time of change.
        if path.exists() and path.read_text() == text:
            continue
        is_current = False
        if check:
            print(path.relative_to(DOCS.parent))
        else:
            path.write_text(text)
    return 1 if check and not is_current else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
