"""Small chains, meshes of links, and all partitions of a chain, for tests of partitioning."""

from collections.abc import Callable, Iterable
from itertools import combinations, pairwise, permutations

from testbed.hardware import DeviceSpec
from testbed.ml.models.chain import Model, chain
from testbed.ml.models.layers import Linear
from testbed.ml.partition.cuts import Cuts
from testbed.network.link import Link


def all_cuts(units: int, stages: int) -> list[Cuts]:
    """Return every partition of a chain into contiguous stages."""
    return [(0, *inner, units) for inner in combinations(range(1, units), stages - 1)]


def linear_model(*sizes: int, bias: bool = True) -> Model:
    """Build a model of fully connected units; ``sizes`` are the sizes of the input and of each unit's output."""
    units = []
    for number, size in enumerate(sizes[1:]):
        units.append((f"u{number}", [Linear(size, bias)]))
    return chain("linear", sizes[:1], sizes[-1], units)


def mesh(devices: Iterable[DeviceSpec], link: Link) -> dict[tuple[str, str], Link]:
    """Return equal links between all devices, in both directions."""
    names = [device.name for device in devices]
    return dict.fromkeys(permutations(names, 2), link)


def fits(
    cuts: Cuts,
    devices: Iterable[DeviceSpec],
    memory: Callable[[int, int, int], float],
) -> bool:
    """Return whether each stage of a partition fits the memory of its device."""
    needs = [memory(stage, *ends) for stage, ends in enumerate(pairwise(cuts))]
    return all(
        need <= device.memory for need, device in zip(needs, devices, strict=True)
    )
