"""Shapes of the tensors between layers, without the batch dimension."""

from __future__ import annotations

Shape = tuple[int, ...]
"""(channels, height, width) or (features,); (tokens, features) for sequences."""

UnitOutput = tuple[int, Shape]
"""The output of a unit: the index of the unit, and the shape of the output."""

INPUT = -1
"""Index that stands for the model's input, wherever units or layers are given by index."""
BYTES_PER_VALUE = 4
"""Size of a float32 in messages and in memory."""
