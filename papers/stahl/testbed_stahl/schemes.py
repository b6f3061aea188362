"""Communication of LOP, LIP and fused pairs, and the choice with the least (Stahl et al., Sections 4.1 to 4.3).

The paper's N equal devices are generalised to any shares: only the number of workers beside the source (N - 1 in the
paper) and their total share ((N - 1) / N) matter.

The cost of a layer depends only on its own scheme and on whether the previous layer used LOP. Dynamic programming from
the last layer therefore yields the exact optimum of the paper's integer program, equations (11) to (13).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from testbed.common.errors import InputError
from testbed.ml.models.graph import Graph, GraphLayer
from testbed_stahl.plan import Scheme

Reuse = Literal["with-reuse", "equation-9"]
"""Whether a layer after a LOP receives values already held. ``with-reuse``: never, only what is missing.
``equation-9``: as printed, where only LOP after LOP has the term and equation (9) charges FUSE1 for all its input."""
REUSES: tuple[Reuse, ...] = ("with-reuse", "equation-9")


@dataclass(frozen=True)
class WorkerTotals:
    """Number and total share of the workers, as used in the formulas."""

    count: int
    """Workers that take part, the source not among them."""
    share: Fraction
    """Share of each layer that the workers together compute."""

    @classmethod
    def of(cls, shares: Sequence[Fraction], source: int) -> WorkerTotals:
        """Return the totals of devices with these shares."""
        return cls(
            sum(share > 0 for index, share in enumerate(shares) if index != source),
            1 - shares[source],
        )

    @classmethod
    def equal(cls, devices: int) -> WorkerTotals:
        """Return the totals of N devices with equal shares, as in the paper."""
        return cls(devices - 1, Fraction(devices - 1, devices))


def elements(
    layer: GraphLayer,
    scheme: Scheme,
    workers: WorkerTotals,
    held: bool,
    reuse: Reuse = "with-reuse",
) -> Fraction:
    """Return the elements sent and returned by a layer.

    ``held``: each device already has its share of the input, since the previous layer used LOP and feeds this one
    directly.
    """
    m, k = layer.inputs, layer.outputs
    everything, shares = m * workers.count, m * workers.share
    if scheme == "lop":
        return everything - held * shares + k * workers.share
    if scheme == "fuse1":
        return everything - (held and reuse == "with-reuse") * shares
    if scheme == "lip":
        return (not (held and reuse == "with-reuse")) * shares + Fraction(
            k * workers.count
        )
    if scheme == "fuse2":
        return Fraction(k * workers.count)
    return Fraction(0)


def held(graph: Graph, schemes: Sequence[Scheme], index: int) -> bool:
    """Return whether the devices hold their shares of a layer's input, given the schemes up to this layer."""
    return graph.follows(index) and schemes[index - 1] == "lop"


def total(
    graph: Graph,
    schemes: Sequence[Scheme],
    workers: WorkerTotals,
    reuse: Reuse = "with-reuse",
) -> Fraction:
    """Return C of a whole network, in elements: equation (10). Layers ``whole`` and ``tiled`` add nothing to it."""
    return sum(
        (
            elements(layer, scheme, workers, held(graph, schemes, index), reuse)
            for index, (layer, scheme) in enumerate(
                zip(graph.layers, schemes, strict=True)
            )
        ),
        Fraction(0),
    )


Schemes = tuple[Scheme, ...]
LayerPair = tuple[int, int]


def everywhere(graph: Graph, scheme: Scheme, first: int = 0) -> Schemes:
    """Return one scheme for all splittable layers from layer ``first`` on; earlier layers are tiled."""
    return tuple(
        "tiled" if index < first else scheme if layer.splits else "whole"
        for index, layer in enumerate(graph.layers)
    )


def fused(graph: Graph, pairs: Collection[LayerPair], first: int = 0) -> Schemes:
    """Return LOP with the given pairs of layers fused; raises `InputError` listing the valid pairs."""
    schemes = list(everywhere(graph, "lop", first))
    for one, other in pairs:
        if (
            other != one + 1
            or one < first
            or not graph.fuses(one)
            or {schemes[one], schemes[other]} != {"lop"}
        ):
            able = ", ".join(
                f"{index}+{index + 1}"
                for index in range(first, len(schemes))
                if graph.fuses(index)
            )
            raise InputError(
                f"layers {one} and {other} of {graph.name} cannot be fused: a pair is two layers with "
                f"weights right after each other, in no other pair, whose output between is needed nowhere else; "
                f"choose from {able or 'none: this network has no such pair'}",
                ("method", "fused_pairs"),
            )
        schemes[one], schemes[other] = "fuse1", "fuse2"
    return tuple(schemes)


def least_communication(
    graph: Graph,
    workers: WorkerTotals,
    reuse: Reuse = "with-reuse",
    first: int = 0,
    lip: bool = True,
) -> Schemes:
    """Return the schemes with the least C from layer ``first`` on; ties prefer LOP, then LIP, then FUSE.

    Without ``lip`` only LOP and fused pairs are considered, as in the variants of the paper's Table 2.
    """
    count = len(graph.layers)
    # best[index][after_lop]: the least C of this and all later layers, and their schemes.
    best: dict[int, dict[bool, tuple[Fraction, Schemes]]] = {
        count: dict.fromkeys((False, True), (Fraction(0), ()))
    }
    for index in reversed(range(first, count)):
        best[index] = {}
        for after_lop in (False, True):
            held = after_lop and graph.follows(index)
            options = []
            for way in _possible_schemes(graph, index, lip):
                cost, rest = best[index + len(way)][way[-1] == "lop"]
                for offset, scheme in enumerate(way):
                    cost += elements(
                        graph.layers[index + offset],
                        scheme,
                        workers,
                        held and offset == 0,
                        reuse,
                    )
                options.append((cost, (*way, *rest)))
            best[index][after_lop] = min(options, key=lambda each: each[0])
    return (*everywhere(graph, "lop", first)[:first], *best[first][False][1])


def _possible_schemes(graph: Graph, index: int, lip: bool) -> list[Schemes]:
    """Return the possible schemes for a layer alone or fused with the next one."""
    if not graph.layers[index].splits:
        return [("whole",)]
    ways: list[Schemes] = [("lop",)]
    if lip:
        ways.append(("lip",))
    if graph.fuses(index):
        ways.append(("fuse1", "fuse2"))
    return ways


def pairs_of(schemes: Sequence[Scheme]) -> tuple[LayerPair, ...]:
    """Return the fused pairs among the schemes."""
    return tuple(
        (index, index + 1) for index, scheme in enumerate(schemes) if scheme == "fuse1"
    )
