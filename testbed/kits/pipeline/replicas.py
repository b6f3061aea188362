"""Copies of units as they were at points of the training: what every device keeps for restarts, and hands out."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

from testbed.common.lazy import torch
from testbed.kits.layers.shard import State, restrict
from testbed.kits.messaging.mailbox import Mailbox
from testbed.kits.messaging.membership import Held
from testbed.kits.pipeline.messages import Fetch, FetchedUnit, Keep, Replica
from testbed.kits.pipeline.placement import Point
from testbed.wire.message import Message


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

    def keep(self, points: Collection[Point], later: bool = True) -> None:
        """Free every point that is none of these; with ``later`` spare what came after all of them.

        That is what the newest of their configurations has made since.
        """
        newest = max(points, default=None)
        self._held = {
            point: held
            for point, held in self._held.items()
            if point in points
            or (later and newest and point.configuration == newest.configuration and point.step > newest.step)
        }

    def points(self) -> list[Point]:
        """Return the points of which something is here, oldest first."""
        return sorted(self._held)

    def inventory(self) -> Held:
        """Return what is here, as it travels."""
        return [(point.configuration, point.step, sorted(self._held[point])) for point in self.points()]

    def bytes(self) -> int:
        """Return how many bytes all this takes."""
        return sum(
            tensor.nbytes for held in self._held.values() for state in held.values() for tensor in state.values()
        )

    def dump(self) -> Message:
        """Return all replicas as one message, for the disk."""
        tensors = {
            f"{point.configuration}/{point.step}/{name}": tensor
            for point in self.points()
            for name, tensor in self.state(point, sorted(self.units(point))).items()
        }
        return Message("replicas", {"held": self.inventory()}, tensors)

    def load(self, dumped: Message) -> None:
        """Take in what `dump` has returned."""
        states: dict[Point, dict[str, torch.Tensor]] = {}
        for path, tensor in dumped.tensors.items():
            made, step, name = path.split("/", 2)
            states.setdefault(Point(int(made), int(step)), {})[name] = tensor
        for configuration, done, units in dumped["held"]:
            point = Point(configuration, done)
            self.put(point, states.get(point, {}), units)


class ReplicaStore:
    """The replicas of a device, open to the others: outlives configurations, which all begin from replicas alone."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.replicas = Replicas()
        self.spreading: asyncio.Task[None] | None = None
        """The replicas that are being sent."""
        self._mailbox = mailbox
        mailbox.on(Fetch, self._hand_out)
        mailbox.on(Replica, self._take_in)
        mailbox.on(Keep, lambda keep: self.replicas.keep([Point(*point) for point in keep.keep]))

    async def spread(self) -> None:
        """Wait until no replicas are being sent any more."""
        if self.spreading is not None:
            await asyncio.wait({self.spreading})

    def _take_in(self, replica: Replica) -> None:
        self.replicas.put(Point(replica.configuration, replica.step), replica.state, [replica.unit])

    def _hand_out(self, fetch: Fetch) -> None:
        self._mailbox.open(fetch.configuration)
        point = Point(fetch.made, fetch.step)
        if not self.replicas.units(point) >= set(fetch.units):
            return  # it has started again since it said what it has, and the coordinator is about to learn that
        for unit in fetch.units:
            state = self.replicas.state(point, [unit])
            found = FetchedUnit(fetch.configuration, fetch.made, fetch.step, unit, state)
            self._mailbox.post(fetch.sender, found)
