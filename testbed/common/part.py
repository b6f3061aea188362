"""The base of every part of a scenario file, and how a device may be named."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, get_args

from annotated_types import Le, Lt
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticKnownError

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,30}$")]


MOST = 10**12
"""No number of a scenario is larger, nor smaller than its negative, unless its key says otherwise."""


class Part(BaseModel):
    """Base of every part of a scenario: unknown keys are refused, values are frozen, true is no number, numbers end."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False, defer_build=True)

    # One validator instead of two, before and after: pydantic wraps each field of each part in it, and that takes long.
    @field_validator("*", mode="wrap")
    @classmethod
    def _numbers_are_plain_and_end(
        cls, value: object, read: ValidatorFunctionWrapHandler, field: ValidationInfo
    ) -> object:
        """Refuse for a number ``true`` and text such as ``1_000``, and what is beyond `MOST` if no bounds are said."""
        assert field.field_name is not None
        kinds, is_quantity, is_bounded = _known_of(cls, field.field_name)
        if isinstance(value, bool) or (isinstance(value, str) and "_" in value):
            number = int in kinds or (float in kinds and not is_quantity)
            if number and type(value) not in kinds and value not in kinds:
                raise PydanticKnownError("int_type" if int in kinds else "float_type")
        value = read(value)
        if not is_bounded:
            for each in value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,):
                if isinstance(each, int | float) and abs(each) > MOST:
                    bound = {"le": MOST} if each > 0 else {"ge": -MOST}
                    raise PydanticKnownError("less_than_equal" if each > 0 else "greater_than_equal", bound)
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Say the bounds of all numbers."""
        found = handler(core_schema)
        for described in handler.resolve_ref_schema(found).get("properties", {}).values():
            _say_bounds(described)
        return found


@lru_cache(maxsize=1 << 10)
def _known_of(part: type[Part], name: str) -> tuple[Sequence[Any], bool, bool]:
    """Return of a field its types, whether it is a quantity, and whether its numbers have bounds of their own."""
    field = part.model_fields[name]
    is_quantity = _is_quantity(field)
    return (
        _types(field.annotation),
        is_quantity,
        is_quantity or any(isinstance(each, Le | Lt) for each in field.metadata),
    )


def _is_quantity(field: FieldInfo) -> bool:
    """Whether it is written with a unit; those have bounds of their own (`testbed.common.quantities`)."""
    return any(isinstance(each, BeforeValidator) for each in (*field.metadata, *_types(field.annotation)))


def _say_bounds(described: dict[str, Any]) -> None:
    """Add the bounds of numbers that have none to a JSON schema."""
    for each in (described, *described.get("anyOf", ()), *described.get("prefixItems", ())):
        for inner in each.get("prefixItems", ()):
            _say_bounds(inner)
        if each.get("type") in ("integer", "number"):
            if not {"maximum", "exclusiveMaximum"} & each.keys():
                each["maximum"] = MOST
            if not {"minimum", "exclusiveMinimum"} & each.keys():
                each["minimum"] = -MOST
        for inner in (each.get("items"), each.get("additionalProperties")):
            if isinstance(inner, dict):
                _say_bounds(inner)


def _types(annotation: Any) -> list[Any]:
    """Return the types that an annotation is made of."""
    return [annotation, *(part for inner in get_args(annotation) for part in _types(inner))]
