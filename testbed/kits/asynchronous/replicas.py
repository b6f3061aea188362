"""Copies of units as they were at one point of the training, and which of those points still count."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from testbed.kits.layers.shard import State, restrict
from testbed.kits.messaging.membership import Held
from testbed.partition.redistribution import StagePartition
from testbed.wire.message import Message

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, order=True)
class Point:
    """A state of the whole model: what the updates of the batches before ``step`` have made, in one configuration."""

    configuration: int
    step: int


BEGINNING = Point(0, 0)
"""The state that a run begins with: from the seed, or the weights that the lead was given."""


class Replicas:
    """What one device keeps for a restart: its own units as they were, and others' that it keeps for them."""

    def __init__(self) -> None:
        self._held: dict[Point, dict[int, State]] = {}

    def put(self, point: Point, state: State, units: Iterable[int]) -> None:
        """Keep units as they were at a point."""
        held = self._held.setdefault(point, {})
        for unit in units:
            held[unit] = restrict(state, unit, unit + 1)

    def units(self, point: Point) -> set[int]:
        """Return which units of a point are here."""
        return set(self._held.get(point, ()))

    def state(self, point: Point, units: Iterable[int]) -> dict[str, torch.Tensor]:
        """Return units of a point; raises KeyError where one is not here."""
        held = self._held.get(point, {})
        return {name: tensor for unit in units for name, tensor in held[unit].items()}

    def keep(self, points: Collection[Point]) -> None:
        """Free every point that is none of these, but what was taken later than all of them in their configurations."""
        latest = {point.configuration: 0 for point in points}
        for point in points:
            latest[point.configuration] = max(latest[point.configuration], point.step)
        newest = max(latest, default=0)
        self._held = {
            point: held
            for point, held in self._held.items()
            if point in points or (point.configuration == newest and point.step > latest.get(newest, 0))
        }

    def clear_but(self, points: Collection[Point]) -> None:
        """Free every point that is none of these."""
        self._held = {point: held for point, held in self._held.items() if point in points}

    def points(self) -> list[Point]:
        """Return the points of which something is here, oldest first."""
        return sorted(self._held)

    def inventory(self) -> Held:
        """Say what is here."""
        return [(point.configuration, point.step, sorted(self._held[point])) for point in self.points()]

    def bytes(self) -> int:
        """Return how many bytes all this takes."""
        return sum(
            tensor.nbytes for held in self._held.values() for state in held.values() for tensor in state.values()
        )


@dataclass(frozen=True)
class Lineage:
    """How the present training came about: (configuration, the step it began with), the steps never falling.

    Each configuration went on from a state that an earlier one of these made. What a configuration did beyond the step
    from which the next went on has been undone, and its points are void, wherever they turn up again.
    """

    begun: tuple[tuple[int, int], ...] = ()

    def __contains__(self, point: Point) -> bool:
        """Say whether a state belongs to what has not been undone."""
        if point == BEGINNING:
            return True
        for index, (configuration, begin) in enumerate(self.begun):
            if configuration == point.configuration:
                end = self.begun[index + 1][1] if index + 1 < len(self.begun) else point.step
                return begin < point.step <= end
        return False

    def branch(self, step: int, configuration: int) -> Lineage:
        """Return the lineage of a configuration that goes on from one of these states."""
        return Lineage((*((old, begin) for old, begin in self.begun if begin < step), (configuration, step)))

    def point(self, step: int) -> Point:
        """Return the point of a step, in the configuration that made it."""
        return max((Point(made, step) for made, begin in self.begun if begin < step), default=BEGINNING)

    def held(self, inventory: Mapping[str, Held]) -> dict[str, dict[int, Sequence[int]]]:
        """Return which units each device has of each step, leaving out what is void."""
        return {
            device: {step: units for made, step, units in points if Point(made, step) in self}
            for device, points in inventory.items()
        }


def dump(replicas: Replicas) -> Message:
    """Return all replicas as one message, for the disk."""
    tensors = {
        f"{point.configuration}/{point.step}/{name}": tensor
        for point in replicas.points()
        for name, tensor in replicas.state(point, sorted(replicas.units(point))).items()
    }
    return Message("replicas", {"held": replicas.inventory()}, tensors)


def load(replicas: Replicas, written: Message) -> None:
    """Take in what `dump` has written."""
    states: dict[Point, dict[str, torch.Tensor]] = {}
    for path, tensor in written.tensors.items():
        made, step, name = path.split("/", 2)
        states.setdefault(Point(int(made), int(step)), {})[name] = tensor
    for configuration, done, units in written["held"]:
        point = Point(configuration, done)
        replicas.put(point, states.get(point, {}), units)


def written(lineage: Lineage, partition: StagePartition) -> Message:
    """Return how training stands, beside the replicas, for the disk."""
    return Message("training", {"begun": lineage.begun, "devices": partition.devices, "cuts": partition.cuts})


def read(training: Message) -> tuple[Lineage, StagePartition]:
    """Return what `written` has put down."""
    begun = tuple((made, begin) for made, begin in training["begun"])
    return Lineage(begun), StagePartition(tuple(training["devices"]), tuple(training["cuts"]))
