"""The base of every part of a scenario file, and how a device may be named."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticKnownError

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,30}$")]


class Part(BaseModel):
    """Base of every part of a scenario: unknown keys are refused, values are frozen, true is no number."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_not_one(cls, value: object, field: ValidationInfo) -> object:
        """Refuse ``true`` and ``false`` where a number is meant, which Python would take as 1 and 0."""
        if isinstance(value, bool) and field.field_name is not None:
            kinds = set(_types(cls.model_fields[field.field_name].annotation))
            if bool not in kinds and kinds & {int, float}:
                raise PydanticKnownError("int_type" if int in kinds else "float_type")
        return value


def _types(annotation: Any) -> list[Any]:
    """Return the types that an annotation is made of."""
    return [annotation, *(part for inner in get_args(annotation) for part in _types(inner))]
