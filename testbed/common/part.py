"""The base class of the models of all sections of a scenario file, and the type of device names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticKnownError
from pydantic_core.core_schema import no_info_before_validator_function

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,30}$")]
"""Name of a device or scenario, which becomes part of the names of containers and hosts."""

MAX_NUMBER = 10**12
"""Default bound on the absolute value of numbers in a scenario, beyond any sensible rate, size or time."""


class ConfigModel(BaseModel):
    """Base of the model of every section: unknown keys are refused, values are frozen, numbers are plain and bounded.

    A plain number is a number as YAML writes it: ``true`` and text such as ``1_000``, which pydantic would convert to
    numbers, are refused.
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
        """Restrict all numbers of the model's fields."""
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


def _require_plain(error_type: str, value: object) -> object:
    # pydantic reads True as 1, and "1_000" as Python would.
    if isinstance(value, bool) or (isinstance(value, str) and "_" in value):
        raise PydanticKnownError(error_type)  # type: ignore[arg-type]
    return value


_NUMBER_CHECKS: Mapping[str, Callable[[object], object]] = {
    "int": partial(_require_plain, "int_type"),
    "float": partial(_require_plain, "float_type"),
}
"""Checks of values before pydantic converts them, by type of pydantic schema."""
_NESTED_KEYS = ("schema", "items_schema", "values_schema", "choices")
"""Keys of a pydantic schema with nested schemas."""


def _restrict_numbers(schema: Any) -> Any:
    """Return the schema of a value with plain and bounded numbers only."""
    kind = schema["type"]
    # A nested `ConfigModel` has restricted its own numbers, and other models have their own bounds.
    if kind == "model":
        return schema
    if kind in _NUMBER_CHECKS:
        upper = {} if {"le", "lt"} & schema.keys() else {"le": MAX_NUMBER}
        lower = {} if {"ge", "gt"} & schema.keys() else {"ge": -MAX_NUMBER}
        bounded = {**schema, **upper, **lower}
        return no_info_before_validator_function(_NUMBER_CHECKS[kind], bounded)
    restricted = dict(schema)
    for key in _NESTED_KEYS:
        if key in schema:
            restricted[key] = _restrict_nested(schema[key])
    return restricted


def _restrict_nested(nested: Any) -> Any:
    """Restrict one nested schema, a list of schemas, or the choices of a union by tag."""
    if isinstance(nested, list | tuple):
        return type(nested)(map(_restrict_nested, nested))
    if not isinstance(nested, dict):
        return nested  # the label of a choice
    if isinstance(nested.get("type"), str):
        return _restrict_numbers(nested)
    return {tag: _restrict_nested(choice) for tag, choice in nested.items()}
