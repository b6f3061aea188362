"""Costs and memory of units that one device computes: FLOPs and accessed bytes of each operation, bytes of memory.

Costs of forwards and backwards are the formulas of the units times the number of samples. `TrainingConfig.update_flops`
is the cost of updates. A copy of weights (for a checkpoint, or to load or build a shard) costs 1 FLOP for each
parameter and for each value of the optimizer's state, such as momentum. The loss costs nothing.

Planners use the same functions as programs, so predicted and charged times agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from testbed.common import formats
from testbed.common.errors import InputError
from testbed.device import Cost
from testbed.hardware import DeviceSpec
from testbed.ml.method import PlanningProblem
from testbed.ml.models.chain import Unit, backward_of, cost_of, forward_of
from testbed.ml.models.shapes import BYTES_PER_VALUE
from testbed.ml.partition.memory import inference_bytes, training_bytes
from testbed.ml.training.config import TrainingConfig


def count_parameters(units: Sequence[Unit]) -> int:
    """Return the number of trained values.

    >>> from testbed.ml.models.catalog import create
    >>> model = create("mlp", {"hidden": [32]}, (1, 8, 8), 10)
    >>> count_parameters(model.units)
    2410
    """
    return sum(unit.parameters for unit in units)


def forward_cost(units: Sequence[Unit], samples: int) -> Cost:
    """Return the cost of a forward of units for a number of samples.

    >>> from testbed.ml.models.catalog import create
    >>> model = create("mlp", {"hidden": [32]}, (1, 8, 8), 10)
    >>> forward_cost(model.units, samples=16).of().flops
    75776.0
    """
    return forward_of(cost_of(units), samples)


def backward_cost(units: Sequence[Unit], samples: int) -> Cost:
    """Return the cost of a backward of units for a number of samples.

    >>> from testbed.ml.models.catalog import create
    >>> model = create("mlp", {"hidden": [32]}, (1, 8, 8), 10)
    >>> backward_cost(model.units, samples=16).of().flops
    151552.0
    """
    return backward_of(cost_of(units), samples)


def update_cost(units: Sequence[Unit], training: TrainingConfig) -> Cost:
    """Return the cost of an optimizer step."""
    flops = training.update_flops * count_parameters(units)
    return Cost(flops)


def copy_cost(units: Sequence[Unit], training: TrainingConfig) -> Cost:
    """Return the cost of copying the transmitted weights and the optimizer's state: one FLOP for each value."""
    optimizer_values = training.state_values * count_parameters(units)
    weight_values = weight_bytes(units, training) / BYTES_PER_VALUE
    return Cost(optimizer_values + weight_values)


def weight_bytes(units: Sequence[Unit], training: TrainingConfig) -> float:
    """Return the bytes of the weights in messages and checkpoints: without frozen ones unless configured."""
    values = count_parameters(units)
    if training.frozen_travels:
        values += sum(unit.frozen_parameters for unit in units)
    return BYTES_PER_VALUE * values


def state_bytes(units: Sequence[Unit], training: TrainingConfig) -> float:
    """Return the bytes of the weights and the optimizer's state in messages and checkpoints.

    >>> from testbed.ml.models.catalog import create
    >>> from testbed.ml.training.config import TrainingConfig
    >>> model = create("mlp", {"hidden": [32]}, (1, 8, 8), 10)
    >>> state_bytes(model.units, TrainingConfig())
    9640.0
    """
    # A copy costs one FLOP for each value, so the FLOPs are the number of values.
    values = copy_cost(units, training).of().flops
    return BYTES_PER_VALUE * values


def whole_memory(problem: PlanningProblem[Any], device: DeviceSpec) -> float:
    """Return the bytes needed by one device alone for training or inference with the whole model."""
    model = problem.model
    units = range(len(model.units))
    samples = problem.workload.batch_size
    if problem.workload.task == "infer":
        return inference_bytes(model, units, samples, device.precision)
    return training_bytes(
        model,
        units,
        samples,
        problem.training.state_values,
        precision=device.precision,
    )


def whole_seconds(problem: PlanningProblem[Any], device: DeviceSpec) -> float:
    """Return the seconds taken by one device alone for a training step, or for a request of an inference workload."""
    units = problem.model.units
    samples = problem.workload.batch_size
    seconds = device.seconds(forward_cost(units, samples))
    if problem.workload.task == "train":
        backward = device.seconds(backward_cost(units, samples))
        update = device.seconds(update_cost(units, problem.training))
        seconds += backward + update
    return seconds


def check_memory(device: DeviceSpec, memory: float) -> None:
    """Raise `InputError` if a device's part of the model needs ``memory`` bytes, and the device has less."""
    if memory > device.memory:
        raise InputError(
            f"{device.name} has {formats.size(device.memory)} of memory, its part of the model needs "
            f"{formats.size(memory)}: use more or larger devices, a smaller model or a smaller batch_size",
            ("devices", device.name, "memory"),
        )
