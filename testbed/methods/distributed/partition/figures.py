"""F, T and C of a plan, beside those of the other schemes over the same devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from testbed.errors import InputError
from testbed.hardware import DeviceSpec
from testbed.methods.distributed.partition.communication import Crew, Reuse, total
from testbed.methods.distributed.partition.drafts import NAMES, Draft, Wish, draft
from testbed.methods.distributed.partition.flow import Flow
from testbed.methods.distributed.partition.network import Network
from testbed.methods.distributed.partition.plan import Scheme
from testbed.methods.distributed.partition.resources import longest_path, weights
from testbed.methods.distributed.partition.shares import equal
from testbed.methods.distributed.partition.tiles import redundant_multiplications
from testbed.methods.distributed.partition.traffic import elements, of_tiles, transfers


@dataclass(frozen=True)
class Figures:
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
    """C by the paper's formulas, in elements of one sample: for equal shares, of the layers that are not tiled."""
    elements: int
    """C as it is sent, in elements of one sample: shares in whole channels, tiles and the result included."""
    tiled: int
    """Of these, those of tiles."""
    wire_bytes: float
    """Bytes on the wire of all messages of a request."""
    messages: int
    flow: Flow


def figures(found: Draft, devices: Sequence[DeviceSpec], reuse: Reuse) -> Figures:
    """Return the figures of a plan."""
    spread = found.flow
    plan, network, sent = spread.plan, spread.network, transfers(spread)
    return Figures(
        scheme=plan.scheme,
        schemes=tuple(part.scheme for part in plan.layers),
        weights=tuple(weights(spread, device) for device in spread.devices),
        memory=found.needs,
        fits=not found.excess(devices),
        longest_path=longest_path(spread),
        redundant=redundant_multiplications(network.layers[: plan.tiled], plan.tiling) if plan.tiling else 0,
        formula=formula(spread, reuse),
        elements=elements(sent),
        tiled=elements(of_tiles(spread)),
        wire_bytes=sum(each.wire_bytes(spread.execution.samples) for each in sent),
        messages=sum(len(each.messages) for each in sent),
        flow=spread,
    )


def formula(spread: Flow, reuse: Reuse) -> float:
    """Return C by the paper's formulas; of sequential layer mapping, which has none, what crosses between devices."""
    network, plan = spread.network, spread.plan
    if spread.way == "row":
        # The result's way back is left out.
        return float(elements([each for each in transfers(spread) if each.value != len(network.layers) - 1]))
    schemes = [part.scheme for part in plan.layers]
    return float(total(network, schemes, Crew.of(equal(len(plan.devices)), plan.source), reuse))


def compare(network: Network, devices: Sequence[DeviceSpec], wish: Wish) -> list[Figures]:
    """Return the figures of every scheme; of the one that is wished for with the pairs that are wished for.

    Schemes that cannot be, e.g. since pairs do not fit, are left out.
    """
    found = []
    for name in NAMES:
        other = replace(wish, scheme=name)
        try:
            found.append(figures(draft(network, devices, other), devices, other.reuse))
        except InputError:
            if name == wish.scheme:
                raise
    return found
