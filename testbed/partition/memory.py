"""What a stage keeps in memory, by formula.

Training, for P parameters and S samples in flight::

    4 P (weights) + 4 P (gradients) + 4 P (momentum, if any) + S x (bytes of what enters and of every layer's output)

S is the number of micro-batches the schedule has forwarded and not yet backwarded on this stage, times their size.
Inference, for a batch of S samples: 4 P + S x the most that one unit reads, passes by for later ones and makes.

Left out: the interpreter and torch themselves, scratch space of the kernels, messages under way, and the layer
whose gradient is being computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from testbed.models.chain import Unit


def training_bytes(units: Sequence[Unit], samples: int, momentum: bool) -> float:
    """Return the bytes a training stage needs with so many samples in flight."""
    copies = 3 if momentum else 2
    kept = sum(unit.activation_bytes for unit in units) + (units[0].cut_bytes if units else 0)
    return float(copies * sum(unit.weight_bytes for unit in units) + samples * kept)


def inference_bytes(units: Sequence[Unit], samples: int) -> float:
    """Return the bytes an inference stage needs with so many samples at once."""
    widest = max((unit.cut_bytes + unit.activation_bytes for unit in units), default=0)
    return float(sum(unit.weight_bytes for unit in units) + samples * widest)
