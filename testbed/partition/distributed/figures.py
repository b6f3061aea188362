"""F, T and C of a plan, beside those of the other schemes over the same devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from testbed.errors import InputError
from testbed.hardware import DeviceSpec
from testbed.partition.distributed.communication import Crew, total
from testbed.partition.distributed.flow import flow
from testbed.partition.distributed.memory import memory
from testbed.partition.distributed.network import Network
from testbed.partition.distributed.plan import DistributedPlan, Scheme
from testbed.partition.distributed.planning import NAMES, Wish, draft
from testbed.partition.distributed.resources import longest_path, weights
from testbed.partition.distributed.shares import equal
from testbed.partition.distributed.tiles import redundant_multiplications
from testbed.partition.distributed.traffic import elements, of_tiles, transfers


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
    plan: DistributedPlan


def figures(network: Network, devices: Sequence[DeviceSpec], plan: DistributedPlan, wish: Wish) -> Figures:
    """Return the figures of a plan."""
    carried_out = flow(network, plan, wish.execution)
    sent, needs = transfers(carried_out), memory(carried_out)
    schemes = tuple(part.scheme for part in plan.layers)
    crew = Crew.of(equal(len(devices)), plan.source)
    # Sequential layer mapping has no formula but what crosses between two devices; the result's way back is left out.
    crossing = elements([each for each in sent if each.value != len(network.layers) - 1])
    return Figures(
        scheme=plan.scheme,
        schemes=schemes,
        weights=tuple(weights(carried_out, device) for device in carried_out.devices),
        memory=needs,
        fits=all(need <= device.memory for need, device in zip(needs, devices, strict=True)),
        longest_path=longest_path(carried_out),
        redundant=redundant_multiplications(network.layers[: plan.tiled], plan.tiling) if plan.tiling else 0,
        formula=float(crossing if set(schemes) == {"whole"} else total(network, schemes, crew, wish.reuse)),
        elements=elements(sent),
        tiled=elements(of_tiles(carried_out)),
        wire_bytes=sum(each.wire_bytes(wish.execution.samples) for each in sent),
        messages=sum(len(each.messages) for each in sent),
        plan=plan,
    )


def compare(network: Network, devices: Sequence[DeviceSpec], wish: Wish) -> list[Figures]:
    """Return the figures of every scheme; of the one that is wished for with the pairs that are wished for.

    Schemes that cannot be, e.g. since pairs do not fit, are left out.
    """
    found = []
    for name in NAMES:
        other = replace(wish, scheme=name)
        try:
            found.append(figures(network, devices, draft(network, devices, other), other))
        except InputError:
            if name == wish.scheme:
                raise
    return found
