"""Replicas of units at points of the training, and the choice of the point to resume from.

A replica is a copy of a unit's weights and optimizer state. A point is a state of the whole model, named by the batches
that led to it; a device holds some units of some points.

Batches are counted from 0; "after n batches" is the state made by the update of batch n - 1, and batch n comes next. A
state is complete only if every unit is held by some device. Each stage therefore keeps, beside the replicas it sends to
others, its own units at that point.

After a loss there are two ways to resume (option ``resume``). ``last-replica`` returns to one state of the model
(`place`). ``next-batch``, as FTPipeHD describes it, continues with the first batch without gradients: units of
remaining stages keep the weights they were trained with, and lost units come from their newest replicas
(`place_newest`). That mixture is a point of its own, made by the configuration that begins with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from testbed.messaging.mailbox import Mailbox
from testbed.messaging.membership import ReplicaList
from testbed.ml.layers.shard import State, restrict
from testbed.ml.lazy import torch
from testbed.ml.partition.redistribution import (
    HeldUnits,
    Need,
    StagePartition,
    missing_units,
    needs,
)
from testbed.ml.pipeline.messages import Fetch, FetchedUnit, Keep, Replica
from testbed.wire.message import Message

StepInventory = Mapping[str, Mapping[int, Collection[int]]]
"""Device -> number of batches done -> units of this state that the device holds."""


@dataclass(frozen=True, order=True)
class Point:
    """A state of the whole model: the result of the batches before ``step`` in one configuration.

    After a recovery the same batches may be trained again in another configuration, with another result: a point is
    therefore more than the number of its batches.
    """

    configuration: int
    step: int


BEGINNING = Point(0, 0)
"""The initial state: from the seed, or the coordinator's given weights."""
RUNNING = -1
"""Step of the point for the weights that a stage was training with; no lineage contains such a point."""


@dataclass(frozen=True)
class Lineage:
    """The history of the training: (configuration, first step), with nondecreasing steps.

    Each configuration resumed from a state of an earlier one. Batches of a configuration beyond the first step of the
    next one have been undone, and their points are void wherever they reappear.

    >>> lineage = Lineage(((1, 0), (2, 6)))
    >>> Point(1, 6) in lineage, Point(1, 7) in lineage, Point(2, 7) in lineage
    (True, False, True)
    >>> lineage.point(5), lineage.point(9)
    (Point(configuration=1, step=5), Point(configuration=2, step=9))
    >>> lineage.branch(8, configuration=3)
    Lineage(begun=((1, 0), (2, 6), (3, 8)))
    """

    begun: tuple[tuple[int, int], ...] = ()
    """(configuration, first step) of each configuration, in order."""

    def __contains__(self, point: Point) -> bool:
        """Return whether no batch of a state has been undone."""
        if point == BEGINNING:
            return True
        for index, (configuration, begin) in enumerate(self.begun):
            if configuration != point.configuration:
                continue
            # The state a configuration resumed from belongs to the configuration that made it.
            if point.step <= begin:
                return False
            is_last = index + 1 == len(self.begun)
            if is_last:
                return True
            _, next_begin = self.begun[index + 1]
            return point.step <= next_begin
        return False

    def branch(self, step: int, configuration: int) -> Lineage:
        """Return the lineage of a configuration that resumes after ``step`` batches of this lineage."""
        earlier = []
        for other, begin in self.begun:
            # A configuration that began later has no state of its own that is still valid.
            if begin < step:
                earlier.append((other, begin))
        return Lineage((*earlier, (configuration, step)))

    def point(self, step: int) -> Point:
        """Return the valid state after ``step`` batches, with the configuration that has made the state."""
        makers = [made for made, begin in self.begun if begin < step]
        if not makers:
            return BEGINNING
        return Point(max(makers), step)

    def valid_units(
        self, inventory: Mapping[str, ReplicaList]
    ) -> dict[str, dict[int, Sequence[int]]]:
        """Return the units of each device by step, without void points."""
        valid: dict[str, dict[int, Sequence[int]]] = {}
        for device, points in inventory.items():
            by_step = valid.setdefault(device, {})
            # A lineage has one point for each step, so the configuration is no longer needed.
            for made, step, units in points:
                if Point(made, step) in self:
                    by_step[step] = units
        return valid


@dataclass(frozen=True)
class RestorePlan:
    """The state that a configuration resumes from, and the sources of the units of each stage."""

    point: Point
    needs: Mapping[str, Need]
    """By device; empty if all units come from the seed."""
    origins: Mapping[int, Point] = field(default_factory=dict)
    """Unit -> the point whose weights the unit has; empty if all have those of the resume point."""

    @property
    def branch_step(self) -> int:
        """The step after which the configuration makes states of its own.

        A mixture of weights from several points is the first state made by the configuration that begins with the
        mixture, so the branch lies one step before the mixture.
        """
        if self.origins:
            return self.point.step - 1
        return self.point.step

    def origins_of(self, device: str) -> list[tuple[int, int, list[int]]] | None:
        """Return the origins of a device's units in message form; None where all come from the resume point."""
        if not self.origins:
            return None
        need = self.needs[device]
        units = set(need.local).union(*need.fetch.values())
        by_point: dict[Point, list[int]] = {}
        for unit in sorted(units):
            of_point = by_point.setdefault(self.origins[unit], [])
            of_point.append(unit)
        origins = []
        for point in sorted(by_point):
            origins.append((point.configuration, point.step, by_point[point]))
        return origins


def place(
    lineage: Lineage,
    inventory: Mapping[str, ReplicaList],
    old: StagePartition,
    new: StagePartition,
    *,
    seeded: bool,
    steps: int,
    local_first: bool = False,
) -> RestorePlan:
    """Choose the newest complete state, and the sources of units for each device of the new partition.

    ``inventory`` covers the present devices including the coordinator; with ``seeded`` the initial state is available
    without a source. After the last of all ``steps`` the coordinator needs every unit, because the trained model is its
    result. Raises ValueError if even the initial state is lost.
    """
    valid = lineage.valid_units(inventory)
    if seeded:
        # Any device draws initial weights from the seed: the coordinator stands for all of them.
        of_coordinator = valid.setdefault(old.coordinator, {})
        of_coordinator[0] = list(range(old.units))
    step = resume_point(valid, old.units)
    if step is None:
        raise ValueError("no device has the initial state")
    if seeded and step == 0:
        return RestorePlan(lineage.point(0), {})
    holders = units_at(valid, step)
    sources = needs(old, new, holders, local_first=local_first)
    if step == steps:
        sources |= _needs_of_coordinator(old, holders, local_first=local_first)
    return RestorePlan(lineage.point(step), sources)


def _needs_of_coordinator(
    old: StagePartition, holders: HeldUnits, *, local_first: bool
) -> dict[str, Need]:
    """Return the sources of all units for the coordinator, which exposes the trained model."""
    whole = StagePartition((old.coordinator,), (0, old.units))
    return needs(old, whole, holders, local_first=local_first)


def place_newest(
    lineage: Lineage,
    inventory: Mapping[str, ReplicaList],
    old: StagePartition,
    new: StagePartition,
    *,
    resumed: Point,
    running: int,
    steps: int,
    local_first: bool = False,
) -> RestorePlan | None:
    """Choose the newest weights of every unit, and their sources, to continue with the batch ``resumed.step``.

    ``running`` is the configuration whose stages were training; the weights of its remaining stages count as the
    newest. Returns None if a unit exists in its initial state alone: the point of `place` is the only one then. Other
    arguments are as in `place`.
    """
    origins: dict[int, Point] = {}
    holders: dict[str, set[int]] = {}
    for unit in range(old.units):
        newest = _newest_of(unit, lineage, inventory, running)
        if newest is None:
            return None
        origins[unit], devices = newest
        for device in devices:
            holders.setdefault(device, set()).add(unit)
    sources = needs(old, new, holders, local_first=local_first)
    if resumed.step == steps:
        sources |= _needs_of_coordinator(old, holders, local_first=local_first)
    return RestorePlan(resumed, sources, origins)


def _newest_of(
    unit: int,
    lineage: Lineage,
    inventory: Mapping[str, ReplicaList],
    running: int,
) -> tuple[Point, list[str]] | None:
    """Return the newest point of a unit with the devices that hold the unit there; None without trained weights."""
    holders: dict[Point, list[str]] = {}
    for device, points in inventory.items():
        for made, step, units in points:
            if unit in units:
                holders_at_point = holders.setdefault(Point(made, step), [])
                holders_at_point.append(device)
    # Weights under training are newer than any replica.
    trained = Point(running, RUNNING)
    if trained in holders:
        return trained, holders[trained]
    newest: Point | None = None
    for point in holders:
        if point not in lineage or point.step == 0:
            continue
        if newest is None or point.step > newest.step:
            newest = point
    if newest is None:
        return None
    return newest, holders[newest]


def resume_point(inventory: StepInventory, units: int) -> int | None:
    """Return the number of batches done in the newest complete state; None if all states are incomplete.

    The number is also the batch to resume with: later batches are undone on all devices. The inventory must exclude
    lost devices. State 0 is the initial one; a device able to produce it (from the seed or the coordinator's disk) has
    an entry for it.

    >>> resume_point({"a": {0: [0, 1, 2], 20: [0, 1]}, "b": {20: [2], 40: [2]}}, units=3)
    20
    """
    states: set[int] = set()
    for by_step in inventory.values():
        states.update(by_step)
    for done in sorted(states, reverse=True):
        if not missing_units(units_at(inventory, done), units):
            return done
    return None


def units_at(inventory: StepInventory, done: int) -> dict[str, Collection[int]]:
    """Return the units of one state by device, for `testbed.ml.partition.redistribution.needs`.

    >>> units_at({"a": {20: [0, 1]}, "b": {20: [2], 40: [2]}}, done=40)
    {'b': [2]}
    """
    units: dict[str, Collection[int]] = {}
    for device, by_step in inventory.items():
        if done in by_step:
            units[device] = by_step[done]
    return units


@dataclass(frozen=True)
class FailureCase:
    """One of the three cases of FTPipeHD's fault handler, with the affected devices."""

    case: Literal["restart", "refill", "redistribute"]
    """``restart``: all stages are present with their memory. ``refill``: one returned without its memory, and receives
    its units again. ``redistribute``: some are absent, or several lost their memory; the present devices receive a new
    partition."""
    gone: tuple[str, ...]
    """Stages that did not answer, in the order of the stages."""
    empty: tuple[str, ...]
    """Stages that answered after a restart without their memory."""

    @property
    def lost(self) -> tuple[str, ...]:
        """Stages whose memory is lost."""
        return (*self.gone, *self.empty)


def classify_failure(
    stages: Mapping[str, float], answers: Mapping[str, float]
) -> FailureCase:
    """Return the case of FTPipeHD's fault handler (Section III-F) for the answers of the devices.

    ``stages`` and ``answers`` have the incarnation of a device's program, the time of its start: when its stage was set
    up, and in its answer. A device with a changed incarnation has lost its memory, whatever its answer contains.
    Answers of devices without a stage are ignored.

    >>> classify_failure({"a": 0.0, "b": 0.0}, answers={"a": 0.0, "b": 7.5})
    FailureCase(case='refill', gone=(), empty=('b',))
    >>> classify_failure({"a": 0.0, "b": 0.0}, answers={"a": 0.0}).case
    'redistribute'
    """
    gone = []
    empty = []
    for device, before in stages.items():
        if device not in answers:
            gone.append(device)
        elif answers[device] != before:
            empty.append(device)
    case: Literal["restart", "refill", "redistribute"] = "restart"
    if gone or len(empty) > 1:
        case = "redistribute"
    elif empty:
        case = "refill"
    return FailureCase(case, tuple(gone), tuple(empty))


class Replicas:
    """The replicas on one device: of its own units at points of the training, and of units of other stages.

    >>> import torch
    >>> replicas = Replicas()
    >>> replicas.put(Point(1, 20), {"0.weight": torch.ones(2), "1.weight": torch.ones(3)}, units=[0, 1])
    >>> replicas.inventory(), replicas.bytes()
    ([(1, 20, [0, 1])], 20)
    """

    def __init__(self) -> None:
        self._held: dict[Point, dict[int, State]] = {}
        """Point -> unit -> weights and optimizer state of the unit."""

    def put(self, point: Point, state: State, units: Iterable[int]) -> None:
        """Keep units of a point."""
        held = self._held.setdefault(point, {})
        for unit in units:
            held[unit] = restrict(state, unit, unit + 1)

    def units(self, point: Point) -> set[int]:
        """Return the held units of a point."""
        return set(self._held.get(point, ()))

    def state(self, point: Point, units: Iterable[int]) -> dict[str, torch.Tensor]:
        """Return the state of units at a point; raises KeyError for a missing unit."""
        held = self._held.get(point, {})
        state: dict[str, torch.Tensor] = {}
        for unit in units:
            state.update(held[unit])
        return state

    def keep(self, points: Collection[Point], *, later: bool = True) -> None:
        """Free every point except these; with ``later`` also keep newer points of the newest configuration."""
        newest = max(points, default=None)
        # A later replication may be under way while the message about this one arrives.
        for point in self.points():
            is_later = (
                newest is not None
                and point.configuration == newest.configuration
                and point.step > newest.step
            )
            if point not in points and not (later and is_later):
                del self._held[point]

    def points(self) -> list[Point]:
        """Return the points with held units, oldest first."""
        return sorted(self._held)

    def inventory(self) -> ReplicaList:
        """Return the held units by point, in message form."""
        inventory = []
        for point in self.points():
            units = sorted(self._held[point])
            inventory.append((point.configuration, point.step, units))
        return inventory

    def bytes(self) -> int:
        """Return the bytes of all replicas."""
        total = 0
        for held in self._held.values():
            for state in held.values():
                total += sum(tensor.nbytes for tensor in state.values())
        return total

    def dump(self) -> Message:
        """Serialize all replicas as one message, for the disk."""
        tensors = {}
        for point in self.points():
            # In front, so that `load` can split them off whatever the name contains.
            prefix = f"{point.configuration}/{point.step}"
            state = self.state(point, sorted(self.units(point)))
            for name, tensor in state.items():
                tensors[f"{prefix}/{name}"] = tensor
        return Message("replicas", {"held": self.inventory()}, tensors)

    def load(self, dumped: Message) -> None:
        """Add the replicas of a `dump`."""
        states: dict[Point, dict[str, torch.Tensor]] = {}
        for path, tensor in dumped.tensors.items():
            made, step, name = path.split("/", 2)
            point = Point(int(made), int(step))
            state = states.setdefault(point, {})
            state[name] = tensor
        for configuration, done, units in dumped["held"]:
            point = Point(configuration, done)
            self.put(point, states.get(point, {}), units)


class RunningStage(Protocol):
    """A stage whose weights other devices may fetch after the end of the stage's configuration."""

    @property
    def point(self) -> Point:
        """The point of the weights under training."""

    @property
    def held_units(self) -> list[int]:
        """The units of the stage; none before their weights are loaded."""

    async def snapshot(self) -> State:
        """Return a copy of the newest weights and the optimizer's state."""


class ReplicaStore:
    """The replicas of a device, which other devices fetch from and add to.

    The store outlives configurations, since each configuration begins with replicas of earlier ones.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self.replicas = Replicas()
        self.running: RunningStage | None = None
        """The stage that was committed last, if its weights are offered to others after a loss."""
        self.sending: asyncio.Task[None] | None = None
        """Sends the last replicas."""
        self._copying = asyncio.Lock()
        self._mailbox = mailbox
        mailbox.on(Fetch, self._answer_fetch)
        mailbox.on(Replica, self._store_replica)
        mailbox.on(Keep, self._free_others)

    def inventory(self) -> ReplicaList:
        """Return the held units by point in message form, including the units of the running stage."""
        held = list(self.replicas.inventory())
        if self.running is not None and self.running.held_units:
            point = self.running.point
            held.append((point.configuration, point.step, self.running.held_units))
        return held

    async def keep_running(self) -> None:
        """Copy the weights of the stage that has stopped to the replicas, once."""
        # Several devices may ask at the same time: the later ones wait for the copy of the first.
        async with self._copying:
            stage = self.running
            if stage is not None:
                state = await stage.snapshot()
                self.replicas.put(stage.point, state, stage.held_units)
                self.running = None

    async def finish_sending(self) -> None:
        """Wait until no replica is being sent."""
        if self.sending is not None:
            # The task may have been cancelled with its configuration, which `wait` does not raise.
            await asyncio.wait({self.sending})

    def _free_others(self, keep: Keep) -> None:
        points = [Point(made, step) for made, step in keep.keep]
        self.replicas.keep(points)

    def _store_replica(self, replica: Replica) -> None:
        point = Point(replica.configuration, replica.step)
        self.replicas.put(point, replica.state, [replica.unit])

    def _answer_fetch(self, fetch: Fetch) -> None:
        self._mailbox.open(fetch.configuration)
        if fetch.step == RUNNING:
            self._mailbox.start_in_configuration(self._send_running_units(fetch))
        else:
            self._send_units(fetch)

    async def _send_running_units(self, fetch: Fetch) -> None:
        await self.keep_running()
        self._send_units(fetch)

    def _send_units(self, fetch: Fetch) -> None:
        point = Point(fetch.made, fetch.step)
        if not self.replicas.units(point) >= set(fetch.units):
            # This device has restarted since its inventory, which the coordinator is about to learn.
            return
        for unit in fetch.units:
            state = self.replicas.state(point, [unit])
            answer = FetchedUnit(
                configuration=fetch.configuration,
                made=fetch.made,
                step=fetch.step,
                unit=unit,
                state=state,
            )
            self._mailbox.post(fetch.sender, answer)
