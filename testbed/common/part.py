"""The base of every part of a scenario file, and how a device may be named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticKnownError
from pydantic_core.core_schema import no_info_before_validator_function

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,30}$")]
"""Name of a device or scenario, which becomes part of the names of containers and hosts."""

MOST = 10**12
"""Default bound on the absolute value of numbers in a scenario."""


class ConfigModel(BaseModel):
    """Base of every part of a scenario: unknown keys are refused, values are frozen, numbers are plain and bounded.

    ``true`` and text such as ``1_000``, which pydantic would read as numbers, are refused where a number belongs.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        allow_inf_nan=False,
        defer_build=True,
    )

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Restrict all numbers of the part's fields."""
        schema: Any = handler(source)
        fields = schema
        # Each model validator wraps the schema of the fields once more.
        while "fields" not in fields:
            if "schema" not in fields:
                return schema  # type: ignore[no-any-return]  # a reference to a schema that is restricted already
            fields = fields["schema"]
        for field in fields["fields"].values():
            field["schema"] = _restrict_numbers(field["schema"])
        return schema  # type: ignore[no-any-return]


def _require_plain(error: str, value: object) -> object:
    # pydantic reads True as 1, and "1_000" as Python would.
    if isinstance(value, bool) or (isinstance(value, str) and "_" in value):
        raise PydanticKnownError(error)  # type: ignore[arg-type]
    return value


_PLAIN: Mapping[str, Callable[[object], object]] = {
    "int": partial(_require_plain, "int_type"),
    "float": partial(_require_plain, "float_type"),
}


_INNER = ("schema", "items_schema", "values_schema", "choices")
"""Keys of a pydantic schema with nested schemas."""


def _restrict_numbers(schema: Any) -> Any:
    """Return the schema of a value with plain and bounded numbers only."""
    kind = schema["type"]
    # A nested `ConfigModel` has restricted its own numbers, and other models have bounds of theirs.
    if kind == "model":
        return schema
    if kind in _PLAIN:
        upper = {} if {"le", "lt"} & schema.keys() else {"le": MOST}
        lower = {} if {"ge", "gt"} & schema.keys() else {"ge": -MOST}
        return no_info_before_validator_function(
            _PLAIN[kind], {**schema, **upper, **lower}
        )
    inner = {key: schema[key] for key in _INNER if key in schema}
    return schema | {key: _restrict_nested(parts) for key, parts in inner.items()}


def _restrict_nested(parts: Any) -> Any:
    """Restrict one nested schema, a list of schemas, or the choices of a union by tag."""
    if isinstance(parts, list | tuple):
        return type(parts)(map(_restrict_nested, parts))
    if not isinstance(parts, dict):
        return parts  # the label of a choice
    if isinstance(parts.get("type"), str):
        return _restrict_numbers(parts)
    return {tag: _restrict_nested(choice) for tag, choice in parts.items()}
