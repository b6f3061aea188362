"""Assignment of ranges of layers to devices in a row, from the source on. Pure functions without torch.

The layers of a decoder are alike, so the time of a stage depends on the number of its layers and not on which ones it
has. Therefore the choice of devices, of their order and of their numbers of layers can be solved exactly:

- `least_latency` finds the row of devices with the least time of one token, as EdgeShard's first problem asks for
  (Zhang et al., 2024): the source holds the first layer, any other device may stay unused, memory is limited, and the
  token returns to the source.
- `least_bottleneck` finds the row with the most tokens a second when many requests are in flight: EdgeShard's second
  problem.
- `even` and `by_memory` keep the given row; `by_memory` is exo's rule, which looks at memory alone.

All functions take one `Row` and return layers by device; they raise `InputError` where the network does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from testbed.common.errors import InputError
from testbed_generation.sharding import apportion

Layers = tuple[tuple[str, int], ...]
"""Devices in the order of the row, each with its number of layers."""

REMEDY = (
    "add memory or devices, shorten the sequences, or store the weights in fewer bits"
)
MOST_DEVICES = 16
"""Maximum number of devices among which an exact choice is made; time and memory double with each one."""

Way = tuple[int, ...]
"""Places of devices, in the order in which a token visits them."""

WayEnd = tuple[int, int]
"""A set of devices as bits, and the place of the last one visited. Ways with the same end are continued alike."""


@dataclass(frozen=True)
class Row:
    """Inputs for choosing devices and layers."""

    devices: tuple[str, ...]
    """The source first."""
    layers: int
    seconds: Mapping[str, float]
    """Time of one layer on each device."""
    capacity: Mapping[str, int]
    """Number of layers that fit into the free memory of each device."""
    send: Callable[[str, str], float]
    """Seconds of a token's values from one device to another; infinite where there is no link."""
    answer: Callable[[str, str], float] = lambda one, other: 0.0
    """Seconds of the chosen token from the last device to the source."""
    last_seconds: Mapping[str, float] | None = None
    """Time of the output matrix on each device, where it is the last one of the row; None: no time."""

    def output_seconds(self, device: str) -> float:
        """Return the seconds of the output matrix on a device."""
        return 0.0 if self.last_seconds is None else self.last_seconds[device]

    def latency(self, layers: Layers) -> float:
        """Return the seconds of one token through a row and back to the source.

        >>> row = Row(("a", "b"), 4, {"a": 1, "b": 2}, {"a": 3, "b": 3}, lambda one, other: 0.5)
        >>> row.latency((("a", 3), ("b", 1)))
        5.5
        """
        computing = 0.0
        for name, count in layers:
            computing += count * self.seconds[name]
        last = layers[-1][0]
        return computing + self._travel_seconds(layers) + self.output_seconds(last)

    def _travel_seconds(self, layers: Layers) -> float:
        names = [name for name, _ in layers]
        travel = 0.0
        for one, other in pairwise(names):
            travel += self.send(one, other)
        if len(names) > 1:
            travel += self.answer(names[-1], names[0])
        return travel

    def bottleneck(self, layers: Layers) -> float:
        """Return the seconds between two tokens when all stages and links of a row are always busy."""
        names = [name for name, _ in layers]
        busy = []
        for name, count in layers:
            busy.append(count * self.seconds[name])
        busy[-1] += self.output_seconds(names[-1])
        for one, other in pairwise(names):
            busy.append(self.send(one, other))
        if len(names) > 1:
            busy.append(self.answer(names[-1], names[0]))
        # The slowest stage or link sets the pace of a pipeline that is always full.
        return max(busy)


def even(row: Row) -> Layers:
    """Return about as many layers for each device, in the given order.

    >>> row = Row(("a", "b"), 5, {"a": 1, "b": 1}, {"a": 9, "b": 9}, lambda one, other: 0)
    >>> even(row)
    (('a', 3), ('b', 2))
    """
    return _given_row(row, [1.0] * len(row.devices))


def by_memory(row: Row) -> Layers:
    """Return layers in proportion to the memory of the devices, in the given order.

    >>> by_memory(Row(("a", "b"), 4, {"a": 1, "b": 2}, {"a": 9, "b": 3}, lambda one, other: 0.5))
    (('a', 3), ('b', 1))
    """
    # A device without room has a share as well, and is then named by the check of the capacities.
    return _given_row(row, [max(row.capacity[name], 1e-9) for name in row.devices])


def _given_row(row: Row, shares: Sequence[float]) -> Layers:
    counts = apportion(row.layers, shares, "layers")
    layers = tuple(zip(row.devices, counts, strict=True))
    for name, count in layers:
        if count > row.capacity[name]:
            raise InputError(
                f"{name} has room for {row.capacity[name]} of {count} layers: {REMEDY}"
            )
    return layers


def least_latency(row: Row) -> Layers:
    """Return the devices, their order and their layers with the least latency of one token.

    >>> row = Row(("a", "b"), 5, {"a": 1, "b": 1}, {"a": 3, "b": 9}, lambda one, other: 0.1)
    >>> least_latency(row)
    (('a', 3), ('b', 2))
    """
    best: Layers | None = None
    best_seconds = math.inf
    for names, travel in _shortest_rows(row):
        filled = _fill_row(row, names)
        if filled is None:
            continue
        computing = 0.0
        for name, count in filled:
            computing += count * row.seconds[name]
        seconds = travel + computing
        # Strictly less: of equal rows the first one stays, which has the fewest devices.
        if seconds < best_seconds:
            best, best_seconds = filled, seconds
    if best is None:
        raise _does_not_fit(row)
    return best


def least_bottleneck(row: Row) -> Layers:
    """Return the devices, their order and their layers with the least time between tokens.

    The bottleneck is one of finitely many times: those of 1 to all layers on some device, and those of links. The
    least one that some row can keep is found by bisection.
    """
    times = sorted(_possible_bottlenecks(row))
    best: Layers | None = None
    low, high = 0, len(times) - 1
    while low <= high:
        middle = (low + high) // 2
        layers = _row_within(row, times[middle])
        if layers is None:
            low = middle + 1
        else:
            best, high = layers, middle - 1
    if best is None:
        raise _does_not_fit(row)
    return best


def _does_not_fit(row: Row) -> InputError:
    rooms = ", ".join(f"{name} {row.capacity[name]}" for name in row.devices)
    return InputError(
        f"{row.layers} layers do not fit into the memory of the devices with links between them (room for layers: "
        f"{rooms}): {REMEDY}"
    )


def _check_number(row: Row) -> None:
    if len(row.devices) > MOST_DEVICES:
        raise InputError(
            f"{len(row.devices)} devices are too many to choose from: name at most {MOST_DEVICES}, or use partition: "
            "even or memory"
        )


def _fill_row(row: Row, names: Sequence[str]) -> Layers | None:
    """Return the layers of a row with the least computing time: one for each device, and the rest on the fastest."""
    # Layers are alike, so time is linear in their numbers: after one for each device, the fastest get the rest.
    left = row.layers - len(names)
    if left < 0:
        return None
    for name in names:
        if row.capacity[name] < 1:
            return None
    counts = dict.fromkeys(names, 1)
    for name in sorted(names, key=lambda name: row.seconds[name]):
        more = min(left, row.capacity[name] - 1)
        counts[name] += more
        left -= more
    return None if left else tuple(counts.items())


def _extensions(members: int, number: int) -> Iterator[tuple[int, WayEnd]]:
    """Yield each of ``number`` devices outside a set, and the end of a way that continues to that device."""
    # The source, at place 0, begins every way and is never visited again.
    for place in range(1, number):
        bit = 1 << place
        if not members & bit:
            yield place, (members | bit, place)


def _shortest_rows(row: Row) -> list[tuple[tuple[str, ...], float]]:
    """Return the order with the least travel time, and this time in seconds, for each set of devices with the source.

    The recurrence is that of Held and Karp (1962): the best way through a set that ends at a device extends the best
    way through the set without that device.
    """
    _check_number(row)
    source, number = row.devices[0], len(row.devices)
    rows: list[tuple[tuple[str, ...], float]] = [
        ((source,), row.output_seconds(source))
    ]
    ways: dict[WayEnd, tuple[float, Way]] = {(1, 0): (0.0, (0,))}
    for size in range(2, number + 1):
        longer: dict[WayEnd, tuple[float, Way]] = {}
        for (members, last), (seconds, way) in ways.items():
            for place, end in _extensions(members, number):
                total = seconds + row.send(row.devices[last], row.devices[place])
                least, _ = longer.get(end, (math.inf, ()))
                if total < least:
                    longer[end] = (total, (*way, place))
        rows += _closed_rows(row, longer)
        ways = longer
        # A row with more devices than layers would leave one without a layer.
        if size == row.layers:
            break
    return rows


def _closed_rows(
    row: Row, ways: Mapping[WayEnd, tuple[float, Way]]
) -> list[tuple[tuple[str, ...], float]]:
    """Return the best row of each set of devices.

    Its seconds include the way back to the source, and the output matrix on the last device.
    """
    best: dict[int, tuple[float, Way]] = {}
    for (members, last), (seconds, way) in ways.items():
        name = row.devices[last]
        total = seconds + row.answer(name, row.devices[0]) + row.output_seconds(name)
        least, _ = best.get(members, (math.inf, ()))
        if total < least:
            best[members] = (total, way)
    rows = []
    for seconds, way in best.values():
        names = tuple(row.devices[place] for place in way)
        rows.append((names, seconds))
    return rows


def _possible_bottlenecks(row: Row) -> set[float]:
    """Return all times that can be the bottleneck of a row.

    They are those of 1 to all layers on a device, with and without the output matrix, and those of links.
    """
    times = set()
    for name in row.devices:
        for count in range(1, min(row.capacity[name], row.layers) + 1):
            times.add(count * row.seconds[name])
            times.add(count * row.seconds[name] + row.output_seconds(name))
        for other in row.devices:
            if other != name:
                times.add(row.send(name, other))
                times.add(row.answer(name, other))
    times.discard(math.inf)
    return times


def _row_within(row: Row, limit: float) -> Layers | None:
    """Return a row with stages and links of at most ``limit`` seconds a token each; None if no row suffices.

    Ways grow by one device at a time over links within the limit, and the first one with room for all layers is
    chosen. Among ways with the same end any will do: they have the same devices, so the same room.
    """
    _check_number(row)
    number = len(row.devices)
    # The limit is one of the sums compared with it, which may differ in the last bit when added in another order.
    slack = limit * (1 + 1e-12)
    inside, at_end = _layers_within(row, slack)
    if inside[0] < 1:
        return None
    reached: dict[WayEnd, Way] = {(1, 0): (0,)}
    while reached:
        longer: dict[WayEnd, Way] = {}
        for (members, last), way in reached.items():
            most = [inside[place] for place in way]
            most[-1] = at_end[last]
            is_within = True
            if len(way) > 1:
                answer = row.answer(row.devices[last], row.devices[0])
                is_within = answer <= slack
            if is_within and most[-1] >= 1 and sum(most) >= row.layers >= len(way):
                return _spread_layers(row, way, most)
            for place, end in _extensions(members, number):
                if inside[place] < 1:
                    continue
                if row.send(row.devices[last], row.devices[place]) <= slack:
                    longer.setdefault(end, (*way, place))
        reached = longer
    return None


def _layers_within(row: Row, limit: float) -> tuple[list[int], list[int]]:
    """Return the number of layers that each device computes in ``limit`` seconds, inside a row and at its end."""
    inside = []
    at_end = []
    for name in row.devices:
        seconds, capacity = row.seconds[name], row.capacity[name]
        inside.append(min(capacity, int(limit / seconds)))
        # The last device multiplies with the output matrix as well.
        left = limit - row.output_seconds(name)
        at_end.append(min(capacity, int(left / seconds)))
    return inside, at_end


def _spread_layers(row: Row, way: Sequence[int], most: Sequence[int]) -> Layers:
    """Return layers for the devices of a way, at most ``most`` for each: one each, then the rest from the front on."""
    left = row.layers - len(way)
    layers = []
    for index, bound in zip(way, most, strict=True):
        more = min(left, bound - 1)
        layers.append((row.devices[index], 1 + more))
        left -= more
    return tuple(layers)
