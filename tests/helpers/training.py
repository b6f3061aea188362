"""How models are trained in tests."""

from __future__ import annotations

from typing import Any

from testbed.ml.training.config import TrainingConfig
from testbed.ml.training.schema import OptimizerPart, TrainingPart


def sgd_config(**options: Any) -> TrainingConfig:
    """Return plain descent with these options."""
    return training_config(optimizer=OptimizerPart(**options))


def training_config(**keys: Any) -> TrainingConfig:
    """Return what ``workload.training`` with these keys says."""
    return TrainingConfig(TrainingPart.model_validate(keys))
