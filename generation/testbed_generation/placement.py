"""Assignment of ranges of layers to a chain of devices that begins at the coordinator. Pure functions without torch.

The layers of a decoder are alike. Therefore the time of a stage depends on the number of its layers alone, and the
choice of devices, of their order and of their numbers of layers can be solved exactly:

- `minimize_latency` finds the chain of devices with the shortest time per token: EdgeShard's first problem (Zhang et
  al., 2024). The coordinator holds the first layer, any other device may stay unused, memory is limited, and the token
  returns to the coordinator.
- `minimize_bottleneck` finds the chain that generates most tokens per second when many requests are in flight:
  EdgeShard's second problem.
- `divide_evenly` and `divide_by_memory` keep the given devices and their order; `divide_by_memory` is exo's rule, which
  considers memory alone.

All functions take a `PlacementProblem` and return the number of layers of each device. They raise `InputError` if the
model does not fit into the memory of the devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from testbed.common.errors import InputError
from testbed_generation.sharding import apportion

LayerCounts = tuple[tuple[str, int], ...]
"""Devices in the order in which a token visits them, each with its number of layers."""

REMEDY = (
    "add memory or devices, shorten the sequences, or store the weights in fewer bits"
)
"""What a user can do if the model does not fit into memory."""

MAX_DEVICES = 16
"""Maximum number of devices among which an exact choice is made; time and memory double with each device."""

DevicePath = tuple[int, ...]
"""Indices of devices, in the order in which a token visits them."""

PathEnd = tuple[int, int]
"""The set of the devices of a path, as an integer with bit i set for device i, and the index of its last device.

Paths with equal ends can be extended by the same devices.
"""


@dataclass(frozen=True)
class PlacementProblem:
    """The inputs for choosing devices and dividing layers among them.

    >>> problem = PlacementProblem(
    ...     devices=("a", "b"),
    ...     layers=4,
    ...     layer_seconds={"a": 1, "b": 2},
    ...     capacity={"a": 3, "b": 3},
    ...     message_seconds=lambda sender, receiver: 0.5,
    ... )
    >>> problem.latency((("a", 3), ("b", 1)))
    5.5
    """

    devices: tuple[str, ...]
    """Names, the coordinator first."""
    layers: int
    """Number of layers of the model."""
    layer_seconds: Mapping[str, float]
    """Time of one layer on each device."""
    capacity: Mapping[str, int]
    """Number of layers that fit into the free memory of each device."""
    message_seconds: Callable[[str, str], float]
    """Time of sending a token's activations from one device to another; infinite without a link."""
    token_message_seconds: Callable[[str, str], float] = lambda sender, receiver: 0.0
    """Time of sending the chosen token from the last device to the coordinator."""
    output_matrix_seconds: Mapping[str, float] | None = None
    """Time of the output matrix on each device, if that device is the last one; None: no time."""

    def output_seconds(self, device: str) -> float:
        """Return the seconds of the output matrix on a device."""
        if self.output_matrix_seconds is None:
            return 0.0
        return self.output_matrix_seconds[device]

    def latency(self, layer_counts: LayerCounts) -> float:
        """Return the seconds of one token through all devices and back to the coordinator."""
        computing = 0.0
        for name, count in layer_counts:
            computing += count * self.layer_seconds[name]
        last, _ = layer_counts[-1]
        messages = self._message_seconds(layer_counts)
        return computing + messages + self.output_seconds(last)

    def _message_seconds(self, layer_counts: LayerCounts) -> float:
        """Return the seconds of all messages of one token."""
        names = [name for name, _ in layer_counts]
        seconds = 0.0
        for sender, receiver in pairwise(names):
            seconds += self.message_seconds(sender, receiver)
        if len(names) > 1:
            seconds += self.token_message_seconds(names[-1], names[0])
        return seconds

    def bottleneck(self, layer_counts: LayerCounts) -> float:
        """Return the seconds between two tokens when all stages and links are always busy."""
        names = [name for name, _ in layer_counts]
        busy_seconds = []
        for name, count in layer_counts:
            busy_seconds.append(count * self.layer_seconds[name])
        busy_seconds[-1] += self.output_seconds(names[-1])
        for sender, receiver in pairwise(names):
            busy_seconds.append(self.message_seconds(sender, receiver))
        if len(names) > 1:
            busy_seconds.append(self.token_message_seconds(names[-1], names[0]))
        # The slowest stage or link sets the pace of a pipeline that is always full.
        return max(busy_seconds)


def divide_evenly(problem: PlacementProblem) -> LayerCounts:
    """Return equal numbers of layers for all devices, as nearly as possible, in the order of the devices.

    >>> divide_evenly(
    ...     PlacementProblem(("a", "b"), 5, {"a": 1, "b": 1}, {"a": 9, "b": 9}, lambda sender, receiver: 0)
    ... )
    (('a', 3), ('b', 2))
    """
    return _divide_by_shares(problem, [1.0] * len(problem.devices))


def divide_by_memory(problem: PlacementProblem) -> LayerCounts:
    """Return numbers of layers in proportion to the memory of the devices, in the order of the devices.

    >>> divide_by_memory(
    ...     PlacementProblem(("a", "b"), 4, {"a": 1, "b": 2}, {"a": 9, "b": 3}, lambda sender, receiver: 0.5)
    ... )
    (('a', 3), ('b', 1))
    """
    # Shares must be positive. A device without room gets a small share, so that the error names this device.
    shares = [max(problem.capacity[name], 1e-9) for name in problem.devices]
    return _divide_by_shares(problem, shares)


def _divide_by_shares(
    problem: PlacementProblem, shares: Sequence[float]
) -> LayerCounts:
    counts = apportion(problem.layers, shares, "layers")
    layer_counts = tuple(zip(problem.devices, counts, strict=True))
    for name, count in layer_counts:
        if count > problem.capacity[name]:
            raise InputError(
                f"{name} has room for {problem.capacity[name]} of {count} layers: {REMEDY}"
            )
    return layer_counts


def minimize_latency(problem: PlacementProblem) -> LayerCounts:
    """Return the devices, their order and their layers with the shortest time per token.

    >>> minimize_latency(
    ...     PlacementProblem(("a", "b"), 5, {"a": 1, "b": 1}, {"a": 3, "b": 9}, lambda sender, receiver: 0.1)
    ... )
    (('a', 3), ('b', 2))
    """
    best: LayerCounts | None = None
    best_seconds = math.inf
    for names, travel in _shortest_chains(problem):
        layer_counts = _fill_devices(problem, names)
        if layer_counts is None:
            continue
        computing = 0.0
        for name, count in layer_counts:
            computing += count * problem.layer_seconds[name]
        seconds = travel + computing
        # Strictly less: the first of equally fast chains, which has the fewest devices, is kept.
        if seconds < best_seconds:
            best, best_seconds = layer_counts, seconds
    if best is None:
        raise _no_memory_error(problem)
    return best


def minimize_bottleneck(problem: PlacementProblem) -> LayerCounts:
    """Return the devices, their order and their layers with the shortest time between tokens.

    The bottleneck is one of finitely many times: those of 1 to all layers on some device, and those of links. A
    bisection finds the shortest of these times that allows a chain, since a longer time allows every chain of a shorter
    one.
    """
    times = sorted(_possible_bottlenecks(problem))
    best: LayerCounts | None = None
    low, high = 0, len(times) - 1
    while low <= high:
        middle = (low + high) // 2
        layer_counts = _chain_within(problem, times[middle])
        if layer_counts is None:
            low = middle + 1
        else:
            best, high = layer_counts, middle - 1
    if best is None:
        raise _no_memory_error(problem)
    return best


def _no_memory_error(problem: PlacementProblem) -> InputError:
    capacities = []
    for name in problem.devices:
        capacities.append(f"{name} {problem.capacity[name]}")
    return InputError(
        f"{problem.layers} layers do not fit into the memory of the devices with links between them (room for layers: "
        f"{', '.join(capacities)}): {REMEDY}"
    )


def _check_device_count(problem: PlacementProblem) -> None:
    count = len(problem.devices)
    if count > MAX_DEVICES:
        raise InputError(
            f"{count} devices are too many to choose from: name at most {MAX_DEVICES}, or use partition: even or memory"
        )


def _fill_devices(
    problem: PlacementProblem, names: Sequence[str]
) -> LayerCounts | None:
    """Return the numbers of layers with the shortest computing time; None if the layers do not fit."""
    remaining = problem.layers - len(names)
    if remaining < 0:
        return None
    for name in names:
        if problem.capacity[name] < 1:
            return None
    # Time is linear in the number of layers: after one layer for each device, the fastest devices get the others.
    counts = dict.fromkeys(names, 1)
    for name in sorted(names, key=lambda name: problem.layer_seconds[name]):
        added = min(remaining, problem.capacity[name] - 1)
        counts[name] += added
        remaining -= added
    return None if remaining else tuple(counts.items())


def _extensions(visited: int, device_count: int) -> Iterator[tuple[int, PathEnd]]:
    """Yield each device outside the set ``visited``, and the end of a path continuing to the device."""
    # The coordinator, with index 0, begins every path and is never visited again.
    for index in range(1, device_count):
        bit = 1 << index
        if not visited & bit:
            yield index, (visited | bit, index)


def _shortest_chains(
    problem: PlacementProblem,
) -> list[tuple[tuple[str, ...], float]]:
    """Return, for each set of devices with the coordinator, the order with the shortest time, and this time.

    The time, in seconds, is that of all messages and of the output matrix; the time of layers does not depend on the
    order. The recurrence is that of Held and Karp (1962): the best path through a set that ends at a device extends the
    best path through the set without that device.
    """
    _check_device_count(problem)
    coordinator, device_count = problem.devices[0], len(problem.devices)
    output_seconds = problem.output_seconds(coordinator)
    # The chain of the coordinator alone has no messages.
    chains: list[tuple[tuple[str, ...], float]] = [((coordinator,), output_seconds)]
    paths: dict[PathEnd, tuple[float, DevicePath]] = {(1, 0): (0.0, (0,))}
    for size in range(2, device_count + 1):
        extended: dict[PathEnd, tuple[float, DevicePath]] = {}
        for (visited, last), (seconds, path) in paths.items():
            sender = problem.devices[last]
            for index, end in _extensions(visited, device_count):
                total = seconds + problem.message_seconds(
                    sender, problem.devices[index]
                )
                shortest, _ = extended.get(end, (math.inf, ()))
                if total < shortest:
                    extended[end] = (total, (*path, index))
        chains += _close_paths(problem, extended)
        paths = extended
        # In a chain with more devices than layers, some device would have no layer.
        if size == problem.layers:
            break
    return chains


def _close_paths(
    problem: PlacementProblem, paths: Mapping[PathEnd, tuple[float, DevicePath]]
) -> list[tuple[tuple[str, ...], float]]:
    """Return the chain with the shortest time for each set of devices, and this time.

    The time includes the message to the coordinator, and the output matrix on the last device.
    """
    shortest_paths: dict[int, tuple[float, DevicePath]] = {}
    """By the set of devices of a path."""
    for (visited, last), (seconds, path) in paths.items():
        name = problem.devices[last]
        return_seconds = problem.token_message_seconds(name, problem.devices[0])
        total = seconds + return_seconds + problem.output_seconds(name)
        shortest, _ = shortest_paths.get(visited, (math.inf, ()))
        if total < shortest:
            shortest_paths[visited] = (total, path)
    chains = []
    for seconds, path in shortest_paths.values():
        names = tuple(problem.devices[index] for index in path)
        chains.append((names, seconds))
    return chains


def _possible_bottlenecks(problem: PlacementProblem) -> set[float]:
    """Return all possible bottleneck times of a chain.

    They are those of 1 to all layers on a device, with and without the output matrix, and those of links.
    """
    times = set()
    for name in problem.devices:
        for count in range(1, min(problem.capacity[name], problem.layers) + 1):
            computing = count * problem.layer_seconds[name]
            times.add(computing)
            times.add(computing + problem.output_seconds(name))
        for receiver in problem.devices:
            if receiver != name:
                times.add(problem.message_seconds(name, receiver))
                times.add(problem.token_message_seconds(name, receiver))
    times.discard(math.inf)
    return times


def _chain_within(problem: PlacementProblem, limit: float) -> LayerCounts | None:
    """Return a chain whose stages and links take at most ``limit`` seconds per token; None without such a chain.

    Paths grow by one device at a time over links within the limit, and the first path with room for all layers is
    chosen. Of paths with the same end only one is kept: they have the same devices, and therefore the same room.
    """
    _check_device_count(problem)
    device_count = len(problem.devices)
    # The limit is one of the sums compared with it, which may differ in the last bit if added in another order.
    limit *= 1 + 1e-12
    inner_capacity, end_capacity = _capacities_within(problem, limit)
    if inner_capacity[0] < 1:
        return None
    paths: dict[PathEnd, DevicePath] = {(1, 0): (0,)}
    while paths:
        extended: dict[PathEnd, DevicePath] = {}
        for (visited, last), path in paths.items():
            capacities = [inner_capacity[index] for index in path]
            capacities[-1] = end_capacity[last]
            if _is_sufficient(problem, path, capacities, limit):
                return _spread_layers(problem, path, capacities)
            for index, end in _extensions(visited, device_count):
                if inner_capacity[index] < 1:
                    continue
                seconds = problem.message_seconds(
                    problem.devices[last], problem.devices[index]
                )
                if seconds <= limit:
                    extended.setdefault(end, (*path, index))
        paths = extended
    return None


def _is_sufficient(
    problem: PlacementProblem,
    path: DevicePath,
    capacities: Sequence[int],
    limit: float,
) -> bool:
    """Return whether the devices of a path have room for all layers, and the token returns within the limit."""
    if len(path) > 1:
        last, coordinator = problem.devices[path[-1]], problem.devices[0]
        if problem.token_message_seconds(last, coordinator) > limit:
            return False
    # Each device of the path needs at least one layer.
    return capacities[-1] >= 1 and sum(capacities) >= problem.layers >= len(path)


def _capacities_within(
    problem: PlacementProblem, limit: float
) -> tuple[list[int], list[int]]:
    """Return how many layers each device can compute in ``limit`` seconds: inside a chain, and at its end."""
    inner_capacity = []
    end_capacity = []
    for name in problem.devices:
        seconds, capacity = problem.layer_seconds[name], problem.capacity[name]
        inner_capacity.append(min(capacity, int(limit / seconds)))
        # The last device also multiplies with the output matrix.
        remaining = limit - problem.output_seconds(name)
        end_capacity.append(min(capacity, int(remaining / seconds)))
    return inner_capacity, end_capacity


def _spread_layers(
    problem: PlacementProblem, path: DevicePath, capacities: Sequence[int]
) -> LayerCounts:
    """Return one layer for each device of a path; the first devices with room get the remaining layers."""
    remaining = problem.layers - len(path)
    layer_counts = []
    for index, capacity in zip(path, capacities, strict=True):
        added = min(remaining, capacity - 1)
        layer_counts.append((problem.devices[index], 1 + added))
        remaining -= added
    return tuple(layer_counts)
