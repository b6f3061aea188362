"""Write what is generated: each command's help, the table of scenario keys, the JSON schema, and `compose/`.

Run ``python docs/generate.py`` after changing a command or the schema; a test fails until it has been run.
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
WIDTH = 88
T = TypeVar("T")


def generated() -> Iterator[tuple[Path, str]]:
    """Yield every file with a generated part, and what it has to hold."""
    for name in COMMANDS:
        page = DOCS / "commands" / f"{name}.md"
        command = testbed.get_command(click.Context(testbed), name)
        assert command is not None
        before = (
            page.read_text()
            if page.exists()
            else f"# testbed {name}\n\n<!-- help -->\n<!-- /help -->\n"
        )
        yield (
            page,
            _replace(before, "help", "\n\n".join(_helps(command, f"testbed {name}"))),
        )
    tables = {
        "keys": _keys_table(),
        "metrics": _metrics_table(),
        "events": _events_table(),
    }
    pages = {"keys": "keys.md", "metrics": "metrics.md", "events": "faults.md"}
    for mark, table in tables.items():
        page = DOCS / "scenario" / pages[mark]
        yield page, _replace(page.read_text(), mark, table)
    yield DOCS / "scenario.schema.json", json.dumps(published_schema(), indent=2) + "\n"
    for file, text in compose_project(trials(load("quickstart"))[0], {}).items():
        yield DOCS.parent / "compose" / file, text


def _replace(text: str, mark: str, content: str) -> str:
    """Put content between the two marks of a page."""
    pattern = re.compile(rf"<!-- {mark} -->\n.*?<!-- /{mark} -->", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"the page lacks <!-- {mark} --> and <!-- /{mark} -->")
    return pattern.sub(lambda _: f"<!-- {mark} -->\n{content}\n<!-- /{mark} -->", text)


def _helps(command: click.Command, name: str) -> Iterator[str]:
    """Yield the help of a command and of each of its subcommands, as blocks."""
    context = click.Context(
        command,
        info_name=name,
        terminal_width=WIDTH,
        help_option_names=["-h", "--help"],
    )
    yield f"```text\n$ {name} --help\n{command.get_help(context)}\n```"
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            subcommand = command.get_command(context, inner)
            assert subcommand is not None
            yield from _helps(subcommand, f"{name} {inner}")


def _metrics_table() -> str:
    rows = _declared(COMMON.values(), lambda declared: declared.metrics, _metric_row)
    rows += [
        f"| `devices.<device>.{name}` | {kind} | of one device | every method |"
        for name, kind in OF_DEVICES.items()
    ]
    return "\n".join(
        ["| metric | unit | meaning | methods |", "|---|---|---|---|", *rows]
    )


def _events_table() -> str:
    head = [
        "| event | meaning | keys of `when` | fields | methods |",
        "|---|---|---|---|---|",
    ]
    return "\n".join(
        head + _declared(EVENTS, lambda declared: declared.events, _event_row)
    )


def _declared(
    common: Iterable[T],
    of: Callable[[MetricsSpec], Iterable[T]],
    row: Callable[[T, str], str],
) -> list[str]:
    """Return a row for each thing that every method declares, and for each that some do, with their names."""
    users: dict[T, list[str]] = {each: ["every method"] for each in common}
    for method in METHODS.values():
        for each in of(method.declared):
            users.setdefault(each, []).append(method.name)
    return [row(each, ", ".join(names)) for each, names in users.items()]


def _event_row(event: EventType, users: str) -> str:
    keys = "no fault can wait for it" if event.keys is None else ", ".join(event.keys)
    return f"| `{event.name}` | {event.meaning} | {keys} | {', '.join(event.fields)} | {users} |"


def _metric_row(figure: Metric, users: str) -> str:
    return f"| `{figure.name}` | {figure.kind} | {figure.meaning} | {users} |"


def _keys_table() -> str:
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    schema = published_schema()
    for key, value, required in _keys(schema, schema, ""):
        default = "required" if required else _default(value)
        meaning = value.get("description", "").replace("<", "&lt;")
        lines.append(f"| `{key}` | {_kind(value, schema)} | {default} | {meaning} |")
    return "\n".join(lines)


def _keys(
    schema: Mapping[str, Any], root: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, Any, bool]]:
    """Yield (dotted key, its schema, whether it is required), depth first."""
    for name, value in schema.get("properties", {}).items():
        key = f"{prefix}{name}"
        yield key, value, name in schema.get("required", ())
        for part in _alternatives(value, root):
            yield from _keys(part, root, f"{key}.")
            for inner in _alternatives(part.get("items", {}), root):
                yield from _keys(inner, root, f"{key}[].")
            for named in part.get("patternProperties", {}).values():
                for inner in _alternatives(named, root):
                    yield from _keys(inner, root, f"{key}.<name>.")


def _alternatives(
    value: Mapping[str, Any], root: Mapping[str, Any]
) -> Iterator[Mapping[str, Any]]:
    if "$ref" in value:
        yield from _alternatives(root["$defs"][value["$ref"].rpartition("/")[2]], root)
    elif ("anyOf" in value or "oneOf" in value) and "examples" not in value:
        for choice in value.get("anyOf") or value["oneOf"]:
            yield from _alternatives(choice, root)
    else:
        yield value


def _kind(value: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """Say in a word or two what a key takes."""
    names = {
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "array": "list",
        "object": "keys",
    }
    kinds = []
    for part in _alternatives(value, root):
        if "examples" in part:
            kinds.append(f"like `{part['examples'][0]}`")
        elif "enum" in part or "const" in part:
            kinds.append(
                ", ".join(
                    f"`{choice}`" for choice in part.get("enum", [part.get("const")])
                )
            )
        elif part.get("type") != "null":
            kinds.append(names.get(part.get("type", ""), "any"))
    return " or ".join(dict.fromkeys(kinds))


def _default(value: Mapping[str, Any]) -> str:
    default = value.get("default")
    return (
        ""
        if default in (None, [], {}, "") or isinstance(default, dict)
        else f"`{default}`"
    )


def main(check: bool) -> int:
    """Write the files that are out of date, or with ``check`` only name them; return the exit status."""
    stale = {
        path: text
        for path, text in generated()
        if not path.exists() or path.read_text() != text
    }
    for path, text in stale.items():
        if check:
            print(path.relative_to(DOCS.parent))
        else:
            path.write_text(text)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
