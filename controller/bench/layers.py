"""How long each layer of a model takes on this machine, and the two rates of a device that say so best."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from testbed.device import Cost
from testbed.models.chain import BACKWARD_OVER_FORWARD, Model
from testbed.models.shapes import BYTES_PER_VALUE

if TYPE_CHECKING:
    import torch
    from torch import nn

REPETITIONS = 15


@dataclass(frozen=True)
class LayerTime:
    """One layer in training: forward and backward of a batch."""

    unit: str
    layer: str
    cost: Cost
    """What it is charged."""
    seconds: float
    """Processor time: the least of `REPETITIONS`, since whatever else runs here only adds to it."""


def measure(model: Model, batch_size: int) -> list[LayerTime]:
    """Train each layer by itself on random values, on one thread of this machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = []
    for unit in model.units:
        shape = unit.input
        for layer in unit.layers:
            module = layer.build(shape, torch.Generator().manual_seed(0))
            flops = (1 + BACKWARD_OVER_FORWARD) * layer.flops(shape)
            cost = Cost(flops, 2 * BYTES_PER_VALUE * layer.accesses(shape)) * batch_size
            inputs = torch.randn(batch_size, *shape)
            found.append(LayerTime(unit.name, type(layer).__name__, cost, _seconds(module, inputs)))
            shape = layer.output(shape)
    torch.set_num_threads(threads)
    return found


def _seconds(module: nn.Module, inputs: torch.Tensor) -> float:
    import torch

    forwards, backwards = [], []
    for _ in range(REPETITIONS):
        entering = inputs.detach().requires_grad_()
        begun = time.thread_time()
        outputs = module(entering)
        forwards.append(time.thread_time() - begun)
        gradient = torch.ones_like(outputs)
        begun = time.thread_time()
        outputs.backward(gradient)
        backwards.append(time.thread_time() - begun)
    return min(forwards) + min(backwards)


def rates(times: Sequence[LayerTime]) -> tuple[float, float]:
    """Return speed (FLOP/s) and memory rate (bytes/s) by least squares over the layers' seconds.

    Raises ValueError where no positive ones fit: the layers are too alike, or too small to be told from their overhead.
    """
    import numpy as np

    work = np.array([[each.cost.flops, each.cost.bytes] for each in times])
    per_flop, per_byte = np.linalg.lstsq(work, np.array([each.seconds for each in times]), rcond=None)[0]
    if min(per_flop, per_byte) <= 0:
        raise ValueError("no speed and memory rate fit these layers: take a larger batch, or another model")
    return float(1 / per_flop), float(1 / per_byte)
