"""Output of read-only commands: console, JSON, and options of models and methods."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console

    from testbed_controller.report.tables import Column


def make_console(**options: Any) -> Console:
    """Return a console without automatic colours that escapes control characters."""
    from testbed_controller.report.tables import VisibleConsole

    return VisibleConsole(highlight=False, **options)


def dump(value: object) -> None:
    """Print JSON."""
    click.echo(json.dumps(value, indent=2, default=str))


def say(text: str) -> None:
    """Report progress beside the output proper."""
    click.echo(text, err=True)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns, suitable for processing with awk."""
    widths = [
        max(len(row[column]) for row in [header, *rows])
        for column in range(len(header))
    ]
    for row in [header, *rows]:
        click.echo(
            "  ".join(
                cell.ljust(width) for cell, width in zip(row, widths, strict=True)
            ).rstrip()
        )


def print_section(
    console: Console, columns: Sequence[Column], rows: Iterable[Sequence[str]]
) -> None:
    """Print a table in the format of reports."""
    from testbed_controller.report.tables import draw, plain

    console.print(draw(plain(columns, rows), console.width))


def options(model: type[BaseModel]) -> list[dict[str, Any]]:
    """Describe the scenario options of a method or model."""
    properties = model.model_json_schema().get("properties", {})
    defaults = model.model_construct().model_dump(mode="json", warnings=False)
    return [
        {
            "name": name,
            "default": defaults.get(name),
            "required": model.model_fields[name].is_required(),
            "choices": _schema_choices(schema),
            "description": schema.get("description", ""),
        }
        for name, schema in properties.items()
    ]


def _schema_choices(schema: dict[str, Any]) -> list[Any]:
    branches = [schema, *schema.get("anyOf", [])]
    return [choice for branch in branches for choice in branch.get("enum", [])]


def print_catalogue(
    entries: Sequence[dict[str, Any]], about: Callable[[dict[str, Any]], str]
) -> None:
    """Print entries with their options; ``about`` returns the description of an entry."""
    from testbed_controller.report.tables import Cell, Column, Section, draw

    console, columns = make_console(), (Column("", "name"), Column(""))
    for entry in entries:
        rows = [
            [
                Cell(option["name"]),
                Cell((option["description"] + _option_notes(option)).strip()),
            ]
            for option in entry["options"]
        ]
        rows += [
            [Cell(f"baseline: {name}"), Cell(_plain_text(given))]
            for name, given in entry.get("baselines", {}).items()
        ]
        brief = about(entry) + ("" if rows else "; no options")
        console.print(
            draw(Section(entry["name"], "", brief, columns, rows), console.width)
        )


def _plain_text(given: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key}: {json.dumps(value).strip(chr(34))}" for key, value in given.items()
    )


def _option_notes(option: dict[str, Any]) -> str:
    default = option["default"]
    if isinstance(default, tuple | list):
        default = "[" + ", ".join(map(str, default)) + "]"
    notes = (
        ["one of " + ", ".join(map(str, option["choices"]))]
        if option["choices"]
        else []
    )
    if option["required"] or default is not None:
        notes.append("required" if option["required"] else f"default {default}")
    return f" ({'; '.join(notes)})" if notes else ""
