"""F, T and C of a plan, beside those of the other schemes over the same devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from testbed.common.errors import InputError
from testbed.hardware import DeviceSpec
from testbed.methods.distributed.candidates import SCHEMES, Candidate, PlanRequest, candidate
from testbed.methods.distributed.communication import elements, of_tiles, transfers
from testbed.methods.distributed.dataflow import Dataflow
from testbed.methods.distributed.demands import longest_path, weights
from testbed.methods.distributed.parts import equal
from testbed.methods.distributed.plan import Scheme
from testbed.methods.distributed.schemes import Reuse, WorkerTotals, total
from testbed.methods.distributed.tiles import redundant_multiplications
from testbed.models.graph import Graph


@dataclass(frozen=True)
class SchemeFigures:
    """What a plan takes, for one request."""

    scheme: str
    schemes: tuple[Scheme, ...]
    """Of each layer."""
    weights: tuple[int, ...]
    """F: elements of weights on each device."""
    memory: tuple[float, ...]
    """Bytes on each device, activations among them."""
    fits: bool
    """Whether each device has that much memory."""
    longest_path: int
    """T: multiplications one after the other, for one sample."""
    redundant: int
    """Multiplications that tiles do more than once."""
    formula: float
    """C by the paper's formulas, in elements of one sample: of the layers that are not tiled."""
    elements: int
    """C as it is sent, in elements of one sample: shares in whole channels, tiles and the result included."""
    tiled: int
    """Of these, those of tiles."""
    wire_bytes: float
    """Bytes on the wire of all messages of a request."""
    messages: int
    flow: Dataflow


def figures(found: Candidate, devices: Sequence[DeviceSpec], reuse: Reuse) -> SchemeFigures:
    """Return the figures of a plan."""
    spread = found.flow
    plan, graph, sent = spread.plan, spread.graph, transfers(spread)
    return SchemeFigures(
        scheme=plan.scheme,
        schemes=tuple(part.scheme for part in plan.layers),
        weights=tuple(weights(spread, device) for device in spread.devices),
        memory=found.needs,
        fits=not found.excess(devices),
        longest_path=longest_path(spread),
        redundant=redundant_multiplications(graph.layers[: plan.tiled], spread.computed) if plan.tiling else 0,
        formula=formula(spread, reuse),
        elements=elements(sent),
        tiled=elements(of_tiles(spread)),
        wire_bytes=sum(each.wire_bytes(spread.execution.samples) for each in sent),
        messages=sum(len(each.messages) for each in sent),
        flow=spread,
    )


def formula(spread: Dataflow, reuse: Reuse) -> float:
    """Return C by the paper's formulas; of sequential layer mapping, which has none, what crosses between devices."""
    graph, plan = spread.graph, spread.plan
    if spread.way == "row":
        # The result's way back is left out.
        return float(elements([each for each in transfers(spread) if each.value != len(graph.layers) - 1]))
    schemes = [part.scheme for part in plan.layers]
    # As shares they are ratios of small numbers, of which a plan that travels as JSON keeps the nearest float.
    shares = [Fraction(share).limit_denominator(10**9) for share in plan.shares] or equal(len(plan.devices))
    return float(total(graph, schemes, WorkerTotals.of(shares, plan.source), reuse))


def compare(graph: Graph, devices: Sequence[DeviceSpec], request: PlanRequest) -> list[SchemeFigures]:
    """Return the figures of every scheme; of the one that is wished for with the pairs that are wished for.

    Schemes that cannot be, e.g. since pairs do not fit, are left out.
    """
    found = []
    for name in SCHEMES:
        other = replace(request, scheme=name)
        try:
            found.append(figures(candidate(graph, devices, other), devices, other.reuse))
        except InputError:
            if name == request.scheme:
                raise
    return found
