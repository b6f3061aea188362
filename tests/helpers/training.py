"""Training configurations for tests."""

from __future__ import annotations

from typing import Any

from testbed.ml.training.config import TrainingConfig
from testbed.ml.training.schema import OptimizerPart, TrainingPart


def sgd_config(**options: Any) -> TrainingConfig:
    """Return a configuration with plain SGD and these optimizer options."""
    return training_config(optimizer=OptimizerPart(**options))


def training_config(**keys: Any) -> TrainingConfig:
    """Return the configuration for these keys of ``workload.training``."""
    return TrainingConfig(TrainingPart.model_validate(keys))
