"""How long each layer of a model takes on this machine, and the two rates of a device that say so best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from testbed.device import Cost
from testbed.ml.models.chain import Model, backward_of, forward_of
from testbed_controller.profiling import board


@dataclass(frozen=True)
class LayerTime:
    """One layer in training: forward and backward of a batch."""

    unit: str
    layer: str
    cost: Cost
    """What it is charged."""
    seconds: float
    """Seconds of the processor."""


def measure(model: Model, batch_size: int) -> list[LayerTime]:
    """Train each layer by itself on random values, on one thread of this machine."""
    found = []
    with board.one_thread():
        for unit in model.units:
            shape = unit.input
            for layer in unit.layers:
                module = layer.build(shape, torch.Generator().manual_seed(0))
                cost = forward_of(layer.cost(shape), batch_size) + backward_of(layer.cost(shape), batch_size)
                inputs = torch.randn(batch_size, *shape)
                found.append(LayerTime(unit.name, type(layer).__name__, cost, board.seconds(module, inputs)))
                shape = layer.output(shape)
    return found


def measure_whole(model: Model, batch_size: int) -> float:
    """Return the processor time of forward and backward of all layers in a row, on one thread of this machine."""
    with board.one_thread():
        module = model.build(0, len(model.units), seed=0)
        return board.seconds(module, torch.randn(batch_size, *model.input))


def rates(times: Sequence[LayerTime]) -> tuple[float, float | None]:
    """Return speed (FLOP/s) and memory rate (bytes/s) that fit the layers best; raises ValueError where none does."""
    speed, memory_rate = board.fitted([(*each.cost.of()[:2], each.seconds) for each in times])
    if speed is None:
        raise ValueError("no speed fits these layers: take a larger batch, or another model")
    return speed, memory_rate
