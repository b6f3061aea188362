"""How first weights are drawn: uniformly, as far from zero as the number of connections of a neuron allows.

LeCun's is the default: torch's own shrinks the signal by 2.4 with every layer, and a chain of them then needs epochs to
begin to learn; He's wider one made some seeds of the small networks unstable at a learning rate of 0.05 with momentum
0.9.
"""

from __future__ import annotations

import math

from testbed.models.shapes import Shape
from testbed.workload import Initialisation


def bound(how: Initialisation, weight: Shape) -> float:
    """Return how far from zero the weights of a tensor (outputs, inputs, ...) may be.

    With f inputs and g outputs of a neuron, each times the size of the kernel: LeCun et al. (1998) sqrt(3 / f), He et
    al. (2015) sqrt(6 / f), Glorot and Bengio (2010) sqrt(6 / (f + g)), torch's default for linear and convolutional
    layers sqrt(1 / f).
    """
    outputs, *others = weight
    inputs = math.prod(others)
    match how:
        case "he":
            return math.sqrt(6 / inputs)
        case "glorot":
            return math.sqrt(6 / (inputs + outputs * math.prod(others[1:])))
        case "torch":
            return math.sqrt(1 / inputs)
        case _:
            return math.sqrt(3 / inputs)


def bias_bound(how: Initialisation, weight: Shape) -> float:
    """Return how far from zero the biases may be: they are zero but for torch's default."""
    return bound(how, weight) if how == "torch" else 0.0
