"""Networks and partitions of EdgePipe's paper, for tests of neurons, mappings and timeslots."""

from __future__ import annotations

from hypothesis import strategies as st

from testbed.ml.slots import arrangement
from testbed.ml.slots.arrangement import NeuronAssignment

# Layers count from 0 here, in the paper from 1.
FIGURE_2 = (10, 8, 8, 8, 8, 10)
"""Neurons of each layer in the paper's example."""
EVALUATED = (784, 128, 128, 128, 128, 10)
"""Neurons of each layer in the paper's evaluation."""
SHAPES = st.integers(2, 12), st.integers(1, 14)
"""Number of layers, and number of devices."""


def partition(
    neurons: tuple[int, ...], devices: int, allocation: str | int = "hybrid"
) -> NeuronAssignment:
    """Assign neurons to devices d0, d1, ..."""
    names = [f"d{number}" for number in range(devices)]
    return arrangement.partition_neurons(neurons, names, allocation)
