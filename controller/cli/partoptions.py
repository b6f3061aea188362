"""Options of commands that set a part of a scenario: one for each of its keys, made from the part's schema."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, get_args

import click
from pydantic.fields import FieldInfo

from testbed.common.errors import InputError
from testbed.common.part import Part


def part_of(field: FieldInfo) -> type[Part] | None:
    """Return the part that a key holds, None where it holds a plain value."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Part)), None)


def options_of(part: type[Part], leave_out: Collection[str] = ()) -> list[click.Parameter]:
    """Return an option for each key of a part but some; its help is the key's description, with an example."""
    described = part.model_json_schema()["properties"]
    return [
        click.Option(
            [f"--{name.replace('_', '-')}", name],
            required=field.is_required(),
            type=_pairs if part_of(field) else _type(described[name]),
            metavar="KEY=VALUE,..." if part_of(field) else None,
            help=_help(field.description or "", described[name]),
        )
        for name, field in part.model_fields.items()
        if name not in leave_out
    ]


def _type(schema: dict[str, Any]) -> click.Choice[str] | type[int | float | str]:
    """Return what a value is; a quantity is a text, which the scenario's reader understands."""
    for each in (schema, *schema.get("anyOf", ())):
        if "enum" in each:
            return click.Choice(each["enum"])
        if each.get("type") in ("integer", "number") and "examples" not in schema:
            return int if each["type"] == "integer" else float
    return str


def _help(description: str, schema: dict[str, Any]) -> str:
    text = (description[:1].upper() + description[1:]).replace("`", "")
    examples = next((each["examples"] for each in (schema, *schema.get("anyOf", ())) if "examples" in each), ())
    return f"{text}, e.g. {examples[0]}" if examples and "e.g." not in text else text


def _pairs(text: str) -> dict[str, str]:
    """Read the keys of a part that is in the part, as in ``p=1%,r=20%``."""
    pairs = [each.partition("=") for each in text.split(",")]
    if not all(equals for _, equals, _ in pairs):
        raise InputError(f"'{text}' is no list such as p=1%,r=20%")
    return {key.strip().replace("-", "_"): value.strip() for key, _, value in pairs}
