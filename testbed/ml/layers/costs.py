"""Costs and memory of a stage: FLOPs and accessed bytes of each operation, bytes of memory.

Forward and backward costs are the units' formulas times the samples. `TrainingConfig.update_flops` gives the cost of
updates. Copying weights (a checkpoint, a new shard, building one) costs 1 FLOP for each parameter and for each value of
the optimizer's state, such as momentum. The loss costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from testbed.common import formats
from testbed.common.errors import InputError
from testbed.device import Cost
from testbed.hardware import DeviceSpec
from testbed.ml.method import Problem
from testbed.ml.models.chain import Unit, backward_of, cost_of, forward_of
from testbed.ml.models.shapes import BYTES_PER_VALUE
from testbed.ml.partition.memory import inference_bytes, training_bytes
from testbed.ml.training.config import TrainingConfig


def parameters(units: Sequence[Unit]) -> int:
    """Return the number of trained values."""
    return sum(unit.parameters for unit in units)


def forward(units: Sequence[Unit], samples: int) -> Cost:
    """Return the cost of a forward."""
    return forward_of(cost_of(units), samples)


def backward(units: Sequence[Unit], samples: int) -> Cost:
    """Return the cost of a backward."""
    return backward_of(cost_of(units), samples)


def update(units: Sequence[Unit], training: TrainingConfig) -> Cost:
    """Return the cost of an optimizer step."""
    return Cost(training.update_flops * parameters(units))


def copy(units: Sequence[Unit], training: TrainingConfig) -> Cost:
    """Return the cost of copying the transmitted weights and the optimizer's state."""
    return Cost(
        training.state_values * parameters(units)
        + weight_bytes(units, training) / BYTES_PER_VALUE
    )


def weight_bytes(units: Sequence[Unit], training: TrainingConfig) -> float:
    """Return the bytes of the transmitted weights."""
    fixed = sum(unit.frozen for unit in units) if training.frozen_travels else 0
    return BYTES_PER_VALUE * (parameters(units) + fixed)


def state_bytes(units: Sequence[Unit], training: TrainingConfig) -> float:
    """Return the bytes of the transmitted weights and the optimizer's state."""
    return BYTES_PER_VALUE * copy(units, training).of().flops


def whole_memory(problem: Problem[Any], device: DeviceSpec) -> float:
    """Return the bytes a device needs to hold and compute the whole model."""
    model, workload = problem.model, problem.workload
    units, samples = range(len(model.units)), workload.batch_size
    if workload.task == "infer":
        return inference_bytes(model, units, samples, device.precision)
    return training_bytes(
        model, units, samples, problem.training.state_values, precision=device.precision
    )


def whole_seconds(problem: Problem[Any], device: DeviceSpec) -> float:
    """Return the seconds one device alone takes for a step or a request."""
    units, samples = problem.model.units, problem.workload.batch_size
    seconds = device.seconds(forward(units, samples))
    if problem.workload.task == "train":
        seconds += device.seconds(backward(units, samples)) + device.seconds(
            update(units, problem.training)
        )
    return seconds


def check_memory(device: DeviceSpec, memory: float) -> None:
    """Raise `InputError` if a device's part exceeds its memory."""
    if memory > device.memory:
        raise InputError(
            f"{device.name} has {formats.size(device.memory)} of memory, its part of the model needs "
            f"{formats.size(memory)}: use more or larger devices, a smaller model or a smaller batch_size",
            ("devices", device.name, "memory"),
        )
