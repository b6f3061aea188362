"""Elements that cross between the source and the workers, by formula: C of Stahl et al., equations (7) to (10).

The paper's N devices of equal shares are generalised: whatever the shares, only two figures matter, how many workers
there are beside the source (the paper's N - 1) and their shares together ((N - 1) / N).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from testbed.methods.distributed.partition.distributed_plan import Scheme
from testbed.models.graph import Graph, GraphLayer

Reuse = Literal["everywhere", "paper"]
"""Whether a layer after a LOP is sent what its devices already hold. ``everywhere``: never, only what is missing.
``paper``: as printed, where only LOP after LOP has the term and equation (9) charges FUSE1 for all its input."""


@dataclass(frozen=True)
class WorkerTotals:
    """The devices beside the source, as the formulas see them."""

    count: int
    """Workers that take part, the source not among them."""
    share: Fraction
    """Of each layer, what the workers together compute."""

    @classmethod
    def of(cls, shares: Sequence[Fraction], source: int) -> WorkerTotals:
        """Return the totals of devices with these shares."""
        return cls(sum(share > 0 for index, share in enumerate(shares) if index != source), 1 - shares[source])

    @classmethod
    def equal(cls, devices: int) -> WorkerTotals:
        """Return the totals of N devices with equal shares, as in the paper."""
        return cls(devices - 1, Fraction(devices - 1, devices))


def elements(
    layer: GraphLayer, scheme: Scheme, workers: WorkerTotals, held: bool, reuse: Reuse = "everywhere"
) -> Fraction:
    """Return what a layer sends and returns, in elements.

    ``held``: the layer before it used LOP and nothing came in between, so each device holds its share of the input.
    """
    m, k = layer.inputs, layer.outputs
    everything, shares = m * workers.count, m * workers.share
    if scheme == "lop":
        return everything - held * shares + k * workers.share
    if scheme == "fuse1":
        return everything - (held and reuse == "everywhere") * shares
    if scheme == "lip":
        return (not (held and reuse == "everywhere")) * shares + Fraction(k * workers.count)
    if scheme == "fuse2":
        return Fraction(k * workers.count)
    return Fraction(0)


def held(graph: Graph, schemes: Sequence[Scheme], index: int) -> bool:
    """Whether the devices hold their shares of a layer's input, given the schemes up to it."""
    return graph.follows(index) and schemes[index - 1] == "lop"


def total(graph: Graph, schemes: Sequence[Scheme], workers: WorkerTotals, reuse: Reuse = "everywhere") -> Fraction:
    """Return C of a whole network, in elements: equation (10). Layers ``whole`` and ``tiled`` add nothing to it."""
    return sum(
        (
            elements(layer, scheme, workers, held(graph, schemes, index), reuse)
            for index, (layer, scheme) in enumerate(zip(graph.layers, schemes, strict=True))
        ),
        Fraction(0),
    )
