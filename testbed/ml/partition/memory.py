"""Memory of a stage, by formula.

Training, for P trained and F frozen values and S samples in flight::

    4 P (weights) + 4 P (gradients) + 4 P (momentum, if any) + 4 F
    + S x (bytes of the input and of every layer's output)

State of other optimizers, such as two values per parameter for Adam, counts like momentum. S is the number of
micro-batches forwarded and not yet done backward on this stage, times their size. Asynchronous training has 4 P for
each kept version of the weights.

Inference, for a batch of S samples: 4 (P + F) + S x the maximum over units of values read, passed by and written.

On devices of another precision, values take half the bytes in 16 bits, and frozen weights the bytes of the precision.

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
    """Return the bytes of a training stage with ``samples`` samples in flight and ``versions`` of its weights.

    ``state_values`` is the optimizer's number of values per parameter. Trained values are float32 in any ``precision``.

    >>> from testbed.ml.models.catalog import create
    >>> model = create("mlp", {"hidden": [32]}, (1, 8, 8), 10)
    >>> training_bytes(model, range(0, 1), samples=16, state_values=1)
    37248.0
    """
    # Beside the versions, one copy for the gradients, and the optimizer's state.
    copies = versions + 1 + state_values
    entering = model.cut_bytes(units.start) if units else 0
    value_share, _ = SHARES[precision]
    per_sample = model.activation_bytes(units) + entering
    activations = value_share * samples * per_sample
    weights = copies * model.weight_bytes(units)
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
    # Units compute one after the other, and nothing is kept for a backward: the widest unit decides.
    widest = 0
    for index in units:
        entering = model.cut_bytes(index)
        widest = max(widest, entering + model.units[index].activation_bytes)
    value_share, weight_share = SHARES[precision]
    held = model.weight_bytes(units) + model.frozen_bytes(units)
    return float(weight_share * held + value_share * samples * widest)
