"""Weight aggregation: the trainings that go on side by side in an asynchronous pipeline become one again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def mean(versions: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the mean of the last n - i versions of a stage's trained weights: what replaces the newest.

    Only trained weights have versions. Momentum and the running statistics of batch normalisation are one for all and
    follow every batch, so there is nothing to average in them. See `testbed.schedule.versions.aggregates` for when.
    """
    import torch

    names = list(versions[0])
    if any(list(version) != names for version in versions):
        raise ValueError("versions of different units have no mean")
    return {name: torch.stack([version[name] for version in versions]).mean(0) for name in names}
