"""What a stage is charged and needs: FLOPs and accessed bytes of each piece of work, bytes of memory.

Forward and backward are the units' formulas times the samples. An update is charged 2 FLOPs a parameter for the step
itself, 2 more with momentum and 2 more with weight decay; copying weights (a checkpoint, a new shard, building one)
1 a parameter and another with momentum. The loss is charged nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from testbed.common import formats
from testbed.common.errors import InputError
from testbed.device import Cost
from testbed.hardware import DeviceSpec
from testbed.models.chain import Unit, backward_of, cost_of, forward_of
from testbed.models.shapes import BYTES_PER_VALUE
from testbed.workload import OptimizerPart


def parameters(units: Sequence[Unit]) -> int:
    """Return the number of trained values."""
    return sum(unit.parameters for unit in units)


def forward(units: Sequence[Unit], samples: int) -> Cost:
    """Return the cost of a forward."""
    return forward_of(cost_of(units), samples)


def backward(units: Sequence[Unit], samples: int) -> Cost:
    """Return the cost of a backward."""
    return backward_of(cost_of(units), samples)


def update_flops(optimizer: OptimizerPart) -> float:
    """Return what an optimizer step is charged for each parameter."""
    return 2.0 + 2.0 * (optimizer.momentum > 0) + 2.0 * (optimizer.weight_decay > 0)


def update(units: Sequence[Unit], optimizer: OptimizerPart) -> Cost:
    """Return the cost of an optimizer step."""
    return Cost(update_flops(optimizer) * parameters(units))


def copy(units: Sequence[Unit], optimizer: OptimizerPart) -> Cost:
    """Return the cost of copying weights and optimizer state."""
    return Cost((1.0 + (optimizer.momentum > 0)) * parameters(units))


def state_bytes(units: Sequence[Unit], optimizer: OptimizerPart) -> float:
    """Return the bytes of weights and optimizer state."""
    return BYTES_PER_VALUE * copy(units, optimizer).of().flops


def check_memory(device: DeviceSpec, memory: float) -> None:
    """Raise `InputError` where a device's part does not fit into it."""
    if memory > device.memory:
        raise InputError(
            f"{device.name} has {formats.size(device.memory)} of memory, its part of the model needs "
            f"{formats.size(memory)}: use more or larger devices, a smaller model or a smaller batch_size",
            ("devices", device.name, "memory"),
        )
