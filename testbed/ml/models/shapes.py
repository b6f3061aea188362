"""Shapes of the tensors between layers, without the batch dimension."""

from __future__ import annotations

Shape = tuple[int, ...]
"""(channels, height, width) or (features,)."""

Made = tuple[int, Shape]
"""The output of a unit, by the unit's index and its shape; index `INPUT` is what enters the model."""

INPUT = -1
BYTES_PER_VALUE = 4
"""Float32."""
