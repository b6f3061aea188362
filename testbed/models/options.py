"""What every model's options have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Width = Annotated[int, Field(ge=1, le=100_000)]


class Options(BaseModel):
    """Base of a model's options: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)
