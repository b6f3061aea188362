"""Which scheme each layer gets: the same one everywhere, given pairs, or the least communication there is.

What a layer costs depends on its own scheme and on whether the one before it used LOP, on nothing further back. So
the optimum is found along the chain from its end: exact, and the default because it can be read at a glance.
`testbed.methods.distributed.partition.integer_program` is the paper's formulation of the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fractions import Fraction

from testbed.common.errors import InputError
from testbed.methods.distributed.partition.communication import Reuse, WorkerTotals, elements
from testbed.methods.distributed.partition.distributed_plan import Scheme
from testbed.models.graph import Graph

Schemes = tuple[Scheme, ...]
LayerPair = tuple[int, int]


def everywhere(graph: Graph, scheme: Scheme, first: int = 0) -> Schemes:
    """Return one scheme for all layers that can be split, from layer ``first`` on; before it layers are tiled."""
    return tuple(
        "tiled" if index < first else scheme if layer.splits else "whole" for index, layer in enumerate(graph.layers)
    )


def fused(graph: Graph, pairs: Collection[LayerPair], first: int = 0) -> Schemes:
    """Return LOP with the given pairs of layers fused.

    Raises:
        InputError: where a pair cannot be fused or overlaps another, naming those that can.
    """
    schemes = list(everywhere(graph, "lop", first))
    for one, other in pairs:
        if other != one + 1 or one < first or not graph.fuses(one) or {schemes[one], schemes[other]} != {"lop"}:
            able = ", ".join(f"{index}+{index + 1}" for index in range(first, len(schemes)) if graph.fuses(index))
            raise InputError(
                f"layers {one} and {other} of {graph.name} cannot be fused: a pair is two layers with "
                f"weights right after each other, in no other pair, whose output between is needed nowhere else; "
                f"choose from {able or 'none: this network has no such pair'}",
                ("method", "fused"),
            )
        schemes[one], schemes[other] = "fuse1", "fuse2"
    return tuple(schemes)


def least_communication(
    graph: Graph, workers: WorkerTotals, reuse: Reuse = "everywhere", first: int = 0, lip: bool = True
) -> Schemes:
    """Return the schemes with the least C from layer ``first`` on; of equals LOP before LIP before FUSE.

    Without ``lip`` only LOP and fused pairs are looked at, as the variants of the paper's Table 2 do.
    """
    count = len(graph.layers)
    # best[index][after_lop]: the least C of this and all later layers, and their schemes.
    best: dict[int, dict[bool, tuple[Fraction, Schemes]]] = {count: dict.fromkeys((False, True), (Fraction(0), ()))}
    for index in reversed(range(first, count)):
        best[index] = {}
        for after_lop in (False, True):
            held = after_lop and graph.follows(index)
            found = []
            for way in _ways(graph, index, lip):
                cost, rest = best[index + len(way)][way[-1] == "lop"]
                for offset, scheme in enumerate(way):
                    cost += elements(graph.layers[index + offset], scheme, workers, held and offset == 0, reuse)
                found.append((cost, (*way, *rest)))
            best[index][after_lop] = min(found, key=lambda each: each[0])
    return (*everywhere(graph, "lop", first)[:first], *best[first][False][1])


def _ways(graph: Graph, index: int, lip: bool) -> list[Schemes]:
    """Return what can be done with a layer, or with it and the next."""
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
    return tuple((index, index + 1) for index, scheme in enumerate(schemes) if scheme == "fuse1")
