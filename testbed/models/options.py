"""What every model's options have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from testbed.common.part import Part

MOST_LAYERS = 1000
"""Of one list: plans of more take longer than anybody waits."""
Width = Annotated[int, Field(ge=1, le=100_000)]


class ModelOptions(Part):
    """Base of a model's options."""
