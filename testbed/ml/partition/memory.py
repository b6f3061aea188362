"""Bytes of memory that a stage needs, by formula.

Training, for P trained and F frozen weights and S samples in flight::

    4 P (weights) + 4 P (gradients) + 4 P (momentum, if any) + 4 F
    + S x (bytes of the input and of every layer's output)

State of other optimizers, such as two values per parameter for Adam, counts like momentum. S is the number of
micro-batches between their forward and backward on this stage, times their size. Asynchronous training has 4 P for each
version of the weights that the stage keeps.

Inference, for a batch of S samples::

    4 (P + F) + S x (the largest, over the units, of the bytes that enter the unit and of its layers' outputs)

On devices of another precision (`testbed.device.Precision`), activations and weights take the bytes of
`testbed.hardware.SHARES`, except that trained weights stay float32.

Excluded are the interpreter and torch themselves, scratch space of the kernels, messages in transit, and the gradient
of the layer being computed.
"""

from __future__ import annotations

from testbed.device import Precision
from testbed.hardware import SHARES
from testbed.ml.models.chain import Model


def training_bytes(
    model: Model,
    units: range,
    samples: int,
    state_values: float,
    versions: int = 1,
    precision: Precision = "f32",
) -> float:
    """Return the bytes of a training stage with ``samples`` samples in flight and ``versions`` versions of its weights.

    ``state_values`` is the optimizer's number of values per parameter. Trained weights are float32 in any
    ``precision``.

    >>> from testbed.ml.models.catalog import create
    >>> model = create("mlp", {"hidden": [32]}, (1, 8, 8), 10)
    >>> training_bytes(model, range(0, 1), samples=16, state_values=1)
    37248.0
    """
    # Values for each trained weight: its versions, its gradient, and the optimizer's state.
    values_per_weight = versions + 1 + state_values
    entering = model.cut_bytes(units.start) if units else 0
    value_share, _ = SHARES[precision]
    per_sample = model.activation_bytes(units) + entering
    activations = value_share * samples * per_sample
    weights = values_per_weight * model.weight_bytes(units)
    return float(weights + model.frozen_bytes(units) + activations)


def inference_bytes(
    model: Model, units: range, samples: int, precision: Precision = "f32"
) -> float:
    """Return the bytes of an inference stage with ``samples`` samples at once.

    >>> from testbed.ml.models.catalog import create
    >>> model = create("mlp", {"hidden": [32]}, (1, 8, 8), 10)
    >>> inference_bytes(model, range(0, 2), samples=16)
    21928.0
    """
    # Units compute one after the other and keep nothing for a backward, so the unit with most activations decides.
    per_sample = 0
    for index in units:
        entering = model.cut_bytes(index)
        unit_bytes = entering + model.units[index].activation_bytes
        per_sample = max(per_sample, unit_bytes)
    value_share, weight_share = SHARES[precision]
    weights = model.weight_bytes(units) + model.frozen_bytes(units)
    return float(weight_share * weights + value_share * samples * per_sample)
