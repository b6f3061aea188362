"""Layer times of a model on this machine, and the device rates that fit them best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from testbed.device import Cost
from testbed.ml.models.chain import Model, backward_of, forward_of
from testbed_controller.profiling import board


@dataclass(frozen=True)
class LayerTime:
    """The measured time of one layer in training: forward and backward pass of a batch."""

    unit: str
    """Name of the unit that contains the layer."""
    layer: str
    """Class of the layer, such as ``Conv``."""
    cost: Cost
    """Amount of work that a simulation charges for the layer."""
    seconds: float
    """Processor time."""


def measure_layers(model: Model, batch_size: int) -> list[LayerTime]:
    """Measure the training of each layer on random values, with one thread."""
    measurements = []
    with board.one_thread():
        for unit in model.units:
            shape = unit.input
            for layer in unit.layers:
                module = layer.build(shape, torch.Generator().manual_seed(0))
                layer_cost = layer.cost(shape)
                # As a simulation charges a training step: the forward and the backward pass.
                cost = forward_of(layer_cost, batch_size)
                cost += backward_of(layer_cost, batch_size)
                inputs = torch.randn(batch_size, *shape)
                # Alone, a layer finds its weights in the caches; a whole network takes longer (docs/fidelity.md).
                seconds = board.training_seconds(module, inputs)
                name = type(layer).__name__
                measurements.append(LayerTime(unit.name, name, cost, seconds))
                shape = layer.output(shape)
    return measurements


def measure_whole(model: Model, batch_size: int) -> float:
    """Return the processor time in seconds of forward and backward pass of the model, with one thread."""
    with board.one_thread():
        module = model.build(0, len(model.units), seed=0)
        inputs = torch.randn(batch_size, *model.input)
        return board.training_seconds(module, inputs)


def fit_rates(times: Sequence[LayerTime]) -> tuple[float, float | None]:
    """Return the best-fitting speed (FLOP/s) and memory rate (bytes/s). Raises ValueError without a fit."""
    rows = []
    for layer in times:
        flops, accessed, *_ = layer.cost.of()
        rows.append((flops, accessed, layer.seconds))
    speed, memory_rate = board.fit_rates(rows)
    if speed is None:
        raise ValueError(
            "no speed fits these layers: use a larger batch, or another model"
        )
    return speed, memory_rate
