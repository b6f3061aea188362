"""Output of read-only commands: console, JSON, and options of models and methods."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from testbed.trace.events import finite

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console

    from testbed_controller.report.tables import Column


def make_console(**options: Any) -> Console:
    """Return a console without automatic highlighting, which escapes control characters."""
    from testbed_controller.report.tables import VisibleConsole

    return VisibleConsole(highlight=False, **options)


def dump(value: object) -> None:
    """Print JSON, with null for infinity and NaN, which JSON does not have.

    >>> dump({"loss": float("nan")})
    {
      "loss": null
    }
    """
    click.echo(json.dumps(finite(value), indent=2, default=str))


def say(text: str) -> None:
    """Print a progress message to standard error, beside the output of a command."""
    click.echo(text, err=True)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns, suitable for processing with awk.

    >>> print_table(["device", "state"], [["worker1", "running"]])
    device   state
    worker1  running
    """
    lines = [header, *rows]
    widths = []
    for column in zip(*lines, strict=True):
        widths.append(max(map(len, column)))
    for line in lines:
        padded = map(str.ljust, line, widths)
        click.echo("  ".join(padded).rstrip())


def print_section(
    console: Console, columns: Sequence[Column], rows: Iterable[Sequence[str]]
) -> None:
    """Print a table in the format of reports."""
    from testbed_controller.report.tables import draw_section, plain_table

    console.print(draw_section(plain_table(columns, rows), console.width))


def options(model: type[BaseModel]) -> list[dict[str, Any]]:
    """Describe the scenario options of a method or model: name, default, required, choices, description."""
    properties = model.model_json_schema().get("properties", {})
    # Without validation, as required options have no value here.
    defaults = model.model_construct().model_dump(mode="json", warnings=False)
    described = []
    for name, schema in properties.items():
        described.append(
            {
                "name": name,
                "default": defaults.get(name),
                "required": model.model_fields[name].is_required(),
                "choices": _schema_choices(schema),
                "description": schema.get("description", ""),
            }
        )
    return described


def _schema_choices(schema: dict[str, Any]) -> list[Any]:
    choices = []
    # An optional key has a branch for its values and one for null.
    for branch in [schema, *schema.get("anyOf", [])]:
        choices += branch.get("enum", [])
    return choices


def print_catalogue(
    entries: Sequence[dict[str, Any]], describe: Callable[[dict[str, Any]], str]
) -> None:
    """Print a table of options for each entry, for example a method; ``describe`` returns the summary of an entry."""
    from testbed_controller.report.tables import Cell, Column, Section, draw_section

    console = make_console()
    columns = (Column("", "name"), Column(""))
    for entry in entries:
        rows = []
        for option in entry["options"]:
            description = option["description"] + _option_notes(option)
            rows.append([Cell(option["name"]), Cell(description.strip())])
        for name, values in entry.get("baselines", {}).items():
            rows.append([Cell(f"baseline: {name}"), Cell(_plain_text(values))])
        summary = describe(entry)
        if not rows:
            summary += "; no options"
        section = Section(entry["name"], "", summary, columns, rows)
        console.print(draw_section(section, console.width))


def _plain_text(values: Mapping[str, Any]) -> str:
    """Format values as in a scenario file, without JSON's quotes around text."""
    parts = []
    for key, value in values.items():
        text = json.dumps(value).strip('"')
        parts.append(f"{key}: {text}")
    return ", ".join(parts)


def _format_default(value: object) -> str:
    """Format a default as in a scenario file: ``false`` or ``{activations: f32}``, not as in Python."""
    if isinstance(value, Mapping):
        return f"{{{_plain_text(value)}}}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(str, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _option_notes(option: dict[str, Any]) -> str:
    """Return the choices and the default of an option in parentheses; empty for an option with neither."""
    notes = []
    if option["choices"]:
        notes.append("one of " + ", ".join(map(str, option["choices"])))
    if option["required"]:
        notes.append("required")
    elif option["default"] is not None:
        notes.append(f"default {_format_default(option['default'])}")
    return f" ({'; '.join(notes)})" if notes else ""
