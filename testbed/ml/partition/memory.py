"""What a stage keeps in memory, by formula.

Training, for P trained and F frozen values and S samples in flight::

    4 P (weights) + 4 P (gradients) + 4 P (momentum, if any) + 4 F
    + S x (bytes of what enters and of every layer's output)

What other optimizers keep of a parameter, such as two values of Adam, counts as momentum does. S is the number of
micro-batches the schedule has forwarded and not yet done backward on this stage, times their size.
Asynchronous training the same with 4 P for each of the versions of the weights that are kept.

Inference, for a batch of S samples: 4 (P + F) + S x the most that one unit reads, passes by for later ones and makes.

On devices of another precision values take half the bytes in 16 bits, and weights those of the precision where they
are not trained.

Left out: the interpreter and torch themselves, scratch space of the kernels, messages under way, and the layer
whose gradient is being computed.
"""

from __future__ import annotations

from testbed.device import Precision
from testbed.hardware import SHARES
from testbed.ml.models.chain import Model


def training_bytes(
    model: Model, units: range, samples: int, state_values: float, versions: int = 1, precision: Precision = "f32"
) -> float:
    """Return the bytes that a training stage needs with ``samples`` samples in flight and ``versions`` of its weights.

    ``state_values`` are those that the optimizer keeps for each parameter. What is trained is of float32 in any
    ``precision``.
    """
    copies = versions + 1 + state_values
    entering = model.cut_bytes(units.start) if units else 0
    values = SHARES[precision][0] * samples * (model.activation_bytes(units) + entering)
    return float(copies * model.weight_bytes(units) + model.frozen_bytes(units) + values)


def inference_bytes(model: Model, units: range, samples: int, precision: Precision = "f32") -> float:
    """Return the bytes that an inference stage of these units needs with ``samples`` samples at once."""
    widest = max((model.cut_bytes(index) + model.units[index].activation_bytes for index in units), default=0)
    values, weights = SHARES[precision]
    held = model.weight_bytes(units) + model.frozen_bytes(units)
    return float(weights * held + values * samples * widest)
