"""What a stage is charged and needs: FLOPs of each piece of work, bytes of memory.

Forward and backward are the units' formulas times the samples. An update is charged 2 FLOPs a parameter for the step
itself, 2 more with momentum and 2 more with weight decay; copying weights (a checkpoint, a new shard, building one)
1 a parameter and another with momentum. The loss is charged nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from testbed.device import Cost
from testbed.errors import InputError
from testbed.hardware import DeviceSpec
from testbed.models.chain import BYTES_PER_VALUE, Unit
from testbed.scenario.schema import OptimizerPart


def parameters(units: Sequence[Unit]) -> int:
    """Return the number of trained values."""
    return sum(unit.parameters for unit in units)


def forward(units: Sequence[Unit], samples: int) -> Cost:
    """Return the cost of a forward."""
    return Cost(samples * sum(unit.forward_flops for unit in units))


def backward(units: Sequence[Unit], samples: int) -> Cost:
    """Return the cost of a backward."""
    return Cost(samples * sum(unit.backward_flops for unit in units))


def update(units: Sequence[Unit], optimizer: OptimizerPart) -> Cost:
    """Return the cost of an optimizer step."""
    each = 2.0 + 2.0 * (optimizer.momentum > 0) + 2.0 * (optimizer.weight_decay > 0)
    return Cost(each * parameters(units))


def copy(units: Sequence[Unit], optimizer: OptimizerPart) -> Cost:
    """Return the cost of copying weights and optimizer state."""
    return Cost((1.0 + (optimizer.momentum > 0)) * parameters(units))


def state_bytes(units: Sequence[Unit], optimizer: OptimizerPart) -> float:
    """Return the bytes of weights and optimizer state."""
    return BYTES_PER_VALUE * copy(units, optimizer).flops


def training_memory(units: Sequence[Unit], optimizer: OptimizerPart, samples: int) -> float:
    """Return the bytes of weights, gradients, optimizer state, and of the activations of ``samples`` kept at once."""
    kept = sum(unit.activation_bytes for unit in units) + (units[0].input_bytes if units else 0)
    return BYTES_PER_VALUE * parameters(units) + state_bytes(units, optimizer) + samples * kept


def inference_memory(units: Sequence[Unit], samples: int) -> float:
    """Return the bytes of weights and of the largest input and output of one unit, for ``samples`` at once."""
    widest = max((unit.input_bytes + unit.activation_bytes for unit in units), default=0)
    return BYTES_PER_VALUE * parameters(units) + samples * widest


def check_memory(device: DeviceSpec, memory: float) -> None:
    """Raise `InputError` where a device's part does not fit into it."""
    if memory > device.memory:
        raise InputError(
            f"{device.name} has {device.memory / 1e6:.1f} MB of memory, its part of the model needs "
            f"{memory / 1e6:.1f} MB: use more or larger devices, a smaller model or a smaller batch_size"
        )
