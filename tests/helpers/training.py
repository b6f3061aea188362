"""How models are trained in tests."""

from __future__ import annotations

from typing import Any

from testbed.ml.training.recipe import Recipe
from testbed.ml.training.schema import OptimizerPart, TrainingPart


def sgd(**options: Any) -> Recipe:
    """Return plain descent with these options."""
    return recipe(optimizer=OptimizerPart(**options))


def recipe(**keys: Any) -> Recipe:
    """Return what ``workload.training`` with these keys says."""
    return Recipe(TrainingPart.model_validate(keys))
