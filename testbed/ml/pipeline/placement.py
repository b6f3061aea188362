"""Replicas of units at points of the training, and the choice of the point to resume from.

A replica is a copy of a unit's weights and optimizer state. A point is a state of the whole model, named by the batches
that led to it; a device holds some units of some points. A configuration is a numbered period of the training with the
same stages on the same devices: each change of the stages, and each recovery, opens the next one.

Batches are counted from 0; "after n batches" is the state made by the update of batch n - 1, and batch n comes next. A
state is complete only if every unit is held by some device. Each stage therefore keeps, beside the replicas it sends to
others, its own units at that point.

After a loss there are two ways to resume (option ``resume``). ``last-replica`` returns to one state of the model
(`restore_complete`). ``next-batch``, as FTPipeHD describes it, continues with the first batch without gradients: units
of remaining stages keep the weights they were trained with, and lost units come from their newest replicas
(`restore_newest`). This mixture of weights is a new point, made by the configuration that begins with the mixture.
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
"""Device -> step (number of batches done) -> units of the state after this step that the device holds."""


@dataclass(frozen=True, order=True)
class Point:
    """A state of the whole model: the result of the batches before ``step`` in one configuration.

    After a recovery the same batches may be trained again in another configuration, with another result, so the step
    alone does not identify a state.
    """

    configuration: int
    step: int


BEGINNING = Point(0, 0)
"""The initial state: weights drawn from the seed, or initial weights of the scenario, which the coordinator has."""
RUNNING_STEP = -1
"""Stands for the step in the point of a stage's current weights, which have no replica yet. No lineage contains such a
point."""


@dataclass(frozen=True)
class Lineage:
    """The history of the training: the configurations leading to the present state.

    Each configuration resumed from a state of an earlier one. Batches of a configuration beyond the first step of the
    next one have been undone; their points are void, even if a device that returns still holds replicas of them.

    >>> lineage = Lineage(((1, 0), (2, 6)))
    >>> Point(1, 6) in lineage, Point(1, 7) in lineage, Point(2, 7) in lineage
    (True, False, True)
    >>> lineage.point(5), lineage.point(9)
    (Point(configuration=1, step=5), Point(configuration=2, step=9))
    >>> lineage.branch(8, configuration=3)
    Lineage(branches=((1, 0), (2, 6), (3, 8)))
    """

    branches: tuple[tuple[int, int], ...] = ()
    """(configuration, first step) of each configuration, in order; the steps never decrease."""

    def __contains__(self, point: Point) -> bool:
        """Return whether no batch of a state has been undone."""
        if point == BEGINNING:
            return True
        for index, (configuration, first_step) in enumerate(self.branches):
            if configuration != point.configuration:
                continue
            # The state from which a configuration resumed is a point of the configuration that made the state.
            if point.step <= first_step:
                return False
            is_newest = index + 1 == len(self.branches)
            if is_newest:
                return True
            _, next_first_step = self.branches[index + 1]
            return point.step <= next_first_step
        return False

    def branch(self, step: int, configuration: int) -> Lineage:
        """Return the lineage of a configuration that resumes after ``step`` batches of this lineage."""
        earlier = []
        for earlier_configuration, first_step in self.branches:
            # All batches of a configuration that began later have been undone.
            if first_step < step:
                earlier.append((earlier_configuration, first_step))
        return Lineage((*earlier, (configuration, step)))

    def point(self, step: int) -> Point:
        """Return the point of the valid state after ``step`` batches."""
        makers = []
        for configuration, first_step in self.branches:
            if first_step < step:
                makers.append(configuration)
        if not makers:
            return BEGINNING
        # Of several configurations that began before this step, the newest one made the valid state.
        return Point(max(makers), step)

    def valid_units(
        self, inventory: Mapping[str, ReplicaList]
    ) -> dict[str, dict[int, Sequence[int]]]:
        """Return a `StepInventory` of the replicas at valid points."""
        valid: dict[str, dict[int, Sequence[int]]] = {}
        for device, replicas in inventory.items():
            by_step = valid.setdefault(device, {})
            # A lineage has one valid point for each step, so the step identifies the point.
            for configuration, step, units in replicas:
                if Point(configuration, step) in self:
                    by_step[step] = units
        return valid


@dataclass(frozen=True)
class RestorePlan:
    """The state from which a configuration resumes, and the sources of the units of each stage."""

    point: Point
    needs: Mapping[str, Need]
    """The sources of the units of each device; empty if all units come from the seed."""
    origins: Mapping[int, Point] = field(default_factory=dict)
    """Unit -> the point whose weights the unit resumes with; empty if all units resume with ``point``."""

    @property
    def branch_step(self) -> int:
        """The step after which the configuration makes new states.

        A mixture of weights from several points is the first state made by the configuration that begins with the
        mixture, so the configuration branches off one step before ``point``.
        """
        if self.origins:
            return self.point.step - 1
        return self.point.step

    def origins_of(self, device: str) -> list[tuple[int, int, list[int]]] | None:
        """Return (configuration, step, units) for each point from which the device's units come.

        Returns None if all units come from ``point``.
        """
        if not self.origins:
            return None
        need = self.needs[device]
        units = set(need.local).union(*need.fetch.values())
        by_point: dict[Point, list[int]] = {}
        for unit in sorted(units):
            units_at_point = by_point.setdefault(self.origins[unit], [])
            units_at_point.append(unit)
        origins = []
        for point in sorted(by_point):
            origins.append((point.configuration, point.step, by_point[point]))
        return origins


def restore_complete(
    lineage: Lineage,
    inventory: Mapping[str, ReplicaList],
    old: StagePartition,
    new: StagePartition,
    *,
    seeded: bool,
    steps: int,
    local_first: bool = False,
) -> RestorePlan:
    """Plan to resume from the newest complete state, with the sources of units for each device of the new partition.

    ``inventory`` contains the present devices including the coordinator. With ``seeded`` training began with weights
    from the seed, which every device can draw. After the last of all ``steps`` the coordinator needs every unit,
    because it exposes the trained model as the result of the run. Raises ValueError if even the initial state is lost.
    """
    valid = lineage.valid_units(inventory)
    if seeded:
        # Every device can draw initial weights from the seed. One entry, for the coordinator, makes step 0 complete.
        coordinator_units = valid.setdefault(old.coordinator, {})
        coordinator_units[0] = list(range(old.units))
    step = newest_complete_step(valid, old.units)
    if step is None:
        raise ValueError("no device has the initial state")
    if seeded and step == 0:
        return RestorePlan(lineage.point(0), {})
    holders = units_after(valid, step)
    sources = needs(old, new, holders, local_first=local_first)
    if step == steps:
        sources |= _needs_of_coordinator(old, holders, local_first=local_first)
    return RestorePlan(lineage.point(step), sources)


def _needs_of_coordinator(
    old: StagePartition, holders: HeldUnits, *, local_first: bool
) -> dict[str, Need]:
    """Return the sources of all units for the coordinator, which exposes the trained model as the result."""
    whole = StagePartition((old.coordinator,), (0, old.units))
    return needs(old, whole, holders, local_first=local_first)


def restore_newest(
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
    """Plan to continue with the newest weights of every unit, as the new point ``resumed``.

    ``running`` is the configuration whose stages were training; the weights of its remaining stages count as the
    newest. Returns None if the weights of some unit are only available in their initial state: then `restore_complete`
    has the only plan. Other arguments are as in `restore_complete`.
    """
    origins: dict[int, Point] = {}
    holders: dict[str, set[int]] = {}
    for unit in range(old.units):
        newest = _find_newest(unit, lineage, inventory, running)
        if newest is None:
            return None
        origins[unit], devices = newest
        for device in devices:
            holders.setdefault(device, set()).add(unit)
    sources = needs(old, new, holders, local_first=local_first)
    if resumed.step == steps:
        sources |= _needs_of_coordinator(old, holders, local_first=local_first)
    return RestorePlan(resumed, sources, origins)


def _find_newest(
    unit: int,
    lineage: Lineage,
    inventory: Mapping[str, ReplicaList],
    running: int,
) -> tuple[Point, list[str]] | None:
    """Return the newest point at which a device holds the unit, and all these devices; None without trained weights."""
    holders: dict[Point, list[str]] = {}
    for device, replicas in inventory.items():
        for configuration, step, units in replicas:
            if unit in units:
                point = Point(configuration, step)
                holders_at_point = holders.setdefault(point, [])
                holders_at_point.append(device)
    # The current weights of a running stage are newer than any replica.
    running_point = Point(running, RUNNING_STEP)
    if running_point in holders:
        return running_point, holders[running_point]
    newest: Point | None = None
    for point in holders:
        if point not in lineage or point.step == 0:
            continue
        if newest is None or point.step > newest.step:
            newest = point
    if newest is None:
        return None
    return newest, holders[newest]


def newest_complete_step(inventory: StepInventory, units: int) -> int | None:
    """Return the step of the newest complete state of a model with ``units`` units; None if all are incomplete.

    The step is also the batch to resume with: later batches are undone on all devices. The inventory must exclude lost
    devices. Step 0 is the initial state; a device that can produce this state has an entry for step 0.

    >>> newest_complete_step({"a": {0: [0, 1, 2], 20: [0, 1]}, "b": {20: [2], 40: [2]}}, units=3)
    20
    """
    steps: set[int] = set()
    for by_step in inventory.values():
        steps.update(by_step)
    for step in sorted(steps, reverse=True):
        if not missing_units(units_after(inventory, step), units):
            return step
    return None


def units_after(inventory: StepInventory, step: int) -> dict[str, Collection[int]]:
    """Return each device's units of the state after ``step``, without devices holding none.

    >>> units_after({"a": {20: [0, 1]}, "b": {20: [2], 40: [2]}}, step=40)
    {'b': [2]}
    """
    units: dict[str, Collection[int]] = {}
    for device, by_step in inventory.items():
        if step in by_step:
            units[device] = by_step[step]
    return units


@dataclass(frozen=True)
class FailureCase:
    """One of the three cases of FTPipeHD's fault handler, with the affected devices."""

    case: Literal["restart", "refill", "redistribute"]
    """``restart``: all devices with a stage are present with their memory. ``refill``: one device returned without its
    memory, and receives its units again. ``redistribute``: some devices are absent, or several lost their memory; the
    present devices receive a new partition."""
    absent: tuple[str, ...]
    """Devices that did not answer, in the order of their stages."""
    restarted: tuple[str, ...]
    """Devices that answered after a restart, and thus without their memory."""

    @property
    def lost(self) -> tuple[str, ...]:
        """Devices whose memory is lost."""
        return (*self.absent, *self.restarted)


def classify_failure(
    stages: Mapping[str, float], answers: Mapping[str, float]
) -> FailureCase:
    """Return the case of FTPipeHD's fault handler (Section III-F) for the answers of the devices.

    The incarnation of a device is the start time of its program. ``stages`` has the incarnation of each device with a
    stage at the time when the stage was set up, and ``answers`` the incarnation in the device's answer. A device with a
    changed incarnation has lost its memory. Answers of devices without a stage are ignored.

    >>> classify_failure({"a": 0.0, "b": 0.0}, answers={"a": 0.0, "b": 7.5})
    FailureCase(case='refill', absent=(), restarted=('b',))
    >>> classify_failure({"a": 0.0, "b": 0.0}, answers={"a": 0.0}).case
    'redistribute'
    """
    absent = []
    restarted = []
    for device, incarnation in stages.items():
        if device not in answers:
            absent.append(device)
        elif answers[device] != incarnation:
            restarted.append(device)
    case: Literal["restart", "refill", "redistribute"] = "restart"
    if absent or len(restarted) > 1:
        case = "redistribute"
    elif restarted:
        case = "refill"
    return FailureCase(case, tuple(absent), tuple(restarted))


class Replicas:
    """The replicas on one device: units of the device's stage, and of other stages, at points of the training.

    >>> import torch
    >>> replicas = Replicas()
    >>> replicas.put(Point(1, 20), {"0.weight": torch.ones(2), "1.weight": torch.ones(3)}, units=[0, 1])
    >>> replicas.inventory(), replicas.bytes()
    ([(1, 20, [0, 1])], 20)
    """

    def __init__(self) -> None:
        self._states: dict[Point, dict[int, State]] = {}
        """Point -> unit -> weights and optimizer state of the unit."""

    def put(self, point: Point, state: State, units: Iterable[int]) -> None:
        """Store the units ``units`` of a state as replicas at a point."""
        states = self._states.setdefault(point, {})
        for unit in units:
            states[unit] = restrict(state, unit, unit + 1)

    def units(self, point: Point) -> set[int]:
        """Return the units with a replica at a point."""
        return set(self._states.get(point, ()))

    def state(self, point: Point, units: Iterable[int]) -> dict[str, torch.Tensor]:
        """Return the state of units at a point; raises KeyError for a missing unit."""
        states = self._states.get(point, {})
        state: dict[str, torch.Tensor] = {}
        for unit in units:
            state.update(states[unit])
        return state

    def free_except(
        self, points: Collection[Point], *, keeps_newer: bool = True
    ) -> None:
        """Free the replicas at all points except ``points``.

        With ``keeps_newer`` those points also stay that are in the configuration of the newest one and newer: the next
        replication may be under way while the message to free older points arrives.
        """
        newest = max(points, default=None)
        for point in self.points():
            is_newer = (
                newest is not None
                and point.configuration == newest.configuration
                and point.step > newest.step
            )
            if point not in points and not (keeps_newer and is_newer):
                del self._states[point]

    def points(self) -> list[Point]:
        """Return the points with replicas, oldest first."""
        return sorted(self._states)

    def inventory(self) -> ReplicaList:
        """Return (configuration, step, units) for each point, oldest first."""
        inventory = []
        for point in self.points():
            units = sorted(self._states[point])
            inventory.append((point.configuration, point.step, units))
        return inventory

    def bytes(self) -> int:
        """Return the bytes of all replicas."""
        total = 0
        for states in self._states.values():
            for state in states.values():
                total += sum(tensor.nbytes for tensor in state.values())
        return total

    def dump(self) -> Message:
        """Serialize all replicas as one message, for the disk."""
        tensors = {}
        for point in self.points():
            # The point precedes the name, so that `load` can split it off even if the name contains a slash.
            prefix = f"{point.configuration}/{point.step}"
            state = self.state(point, sorted(self.units(point)))
            for name, tensor in state.items():
                tensors[f"{prefix}/{name}"] = tensor
        return Message("replicas", {"held": self.inventory()}, tensors)

    def load(self, dumped: Message) -> None:
        """Add the replicas of a message returned by `dump`."""
        states: dict[Point, dict[str, torch.Tensor]] = {}
        for path, tensor in dumped.tensors.items():
            configuration, step, name = path.split("/", 2)
            point = Point(int(configuration), int(step))
            state = states.setdefault(point, {})
            state[name] = tensor
        for configuration, step, units in dumped["held"]:
            point = Point(configuration, step)
            self.put(point, states.get(point, {}), units)


class RunningStage(Protocol):
    """A stage whose weights other devices may fetch after the end of the stage's configuration."""

    @property
    def point(self) -> Point:
        """The point representing the current weights."""

    @property
    def loaded_units(self) -> list[int]:
        """The units of the stage; none before their weights are loaded."""

    async def snapshot(self) -> State:
        """Return a copy of the newest weights and the optimizer's state."""


class ReplicaStore:
    """The replicas of a device, which other devices fetch from and add to.

    The store outlives configurations, since each configuration begins with replicas of earlier ones.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self.replicas = Replicas()
        self.running_stage: RunningStage | None = None
        """The stage that was committed last, if other devices may fetch its current weights after a loss."""
        self.sending_task: asyncio.Task[None] | None = None
        """Sends the newest replicas."""
        self._copying = asyncio.Lock()
        self._mailbox = mailbox
        mailbox.on(Fetch, self._answer_fetch)
        mailbox.on(Replica, self._store_replica)
        mailbox.on(Keep, self._free_replicas)

    def inventory(self) -> ReplicaList:
        """Return (configuration, step, units) for each point with replicas, and for the running stage."""
        inventory = list(self.replicas.inventory())
        stage = self.running_stage
        if stage is not None and stage.loaded_units:
            point = stage.point
            inventory.append((point.configuration, point.step, stage.loaded_units))
        return inventory

    async def copy_running_stage(self) -> None:
        """Store the current weights of the running stage as replicas; later calls do nothing."""
        # Several devices may fetch at the same time: the lock makes all of them wait for one copy.
        async with self._copying:
            stage = self.running_stage
            if stage is not None:
                state = await stage.snapshot()
                self.replicas.put(stage.point, state, stage.loaded_units)
                self.running_stage = None

    async def finish_sending(self) -> None:
        """Wait until no replica is being sent."""
        if self.sending_task is not None:
            # The end of its configuration cancels the task. `wait` does not raise then, unlike `await` of the task.
            await asyncio.wait({self.sending_task})

    def _free_replicas(self, keep: Keep) -> None:
        points = [Point(made, step) for made, step in keep.keep]
        self.replicas.free_except(points)

    def _store_replica(self, replica: Replica) -> None:
        point = Point(replica.configuration, replica.step)
        self.replicas.put(point, replica.state, [replica.unit])

    def _answer_fetch(self, fetch: Fetch) -> None:
        self._mailbox.open(fetch.configuration)
        if fetch.step == RUNNING_STEP:
            self._mailbox.start_in_configuration(self._send_running_units(fetch))
        else:
            self._send_units(fetch)

    async def _send_running_units(self, fetch: Fetch) -> None:
        await self.copy_running_stage()
        self._send_units(fetch)

    def _send_units(self, fetch: Fetch) -> None:
        point = Point(fetch.made, fetch.step)
        if not self.replicas.units(point) >= set(fetch.units):
            # This device has restarted since it reported its inventory. The coordinator will notice the restart.
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
