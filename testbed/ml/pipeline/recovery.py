"""Recovery from replicas: one procedure for every change of the partition, with or without a failure.

The coordinator opens a new configuration, and all devices report their units by state. Training resumes from the newest
state for which every unit exists: the current one after a drain, that of the last replication after a failure. Each
stage receives the list of its missing units and their holders, fetches them and reports; once all have reported, the
coordinator commits, and training continues with the first batch not included in the state. Until then all devices keep
their units, so a failure in between only leads to another attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from testbed.common.errors import InputError, TestbedError
from testbed.messaging.membership import Membership, ReplicaList
from testbed.messaging.supervision import Lost, Supervisor
from testbed.ml.layers.shard import result_of
from testbed.ml.lazy import torch
from testbed.ml.method import ProgramContext
from testbed.ml.partition.redistribution import StagePartition
from testbed.ml.pipeline.messages import Commit, Keep, Prepare, Replicated
from testbed.ml.pipeline.placement import (
    BEGINNING,
    Lineage,
    Point,
    ReplicaStore,
    RestorePlan,
    classify_failure,
    place,
    place_newest,
)
from testbed.ml.pipeline.planning import AsynchronousOptions, Partitioner
from testbed.wire.message import Message


class ReplicaIndex:
    """The coordinator's knowledge of replicated points: valid, safe, or complete here; all other points are freed.

    A point is valid while its batches are not undone, and safe if the loss of any one device leaves every unit.
    """

    def __init__(self, supervisor: Supervisor, store: ReplicaStore, units: int) -> None:
        self.lineage = Lineage()
        self.safe = BEGINNING
        """The newest point with every unit on two devices, or on this one."""
        self.whole = BEGINNING
        """The newest point with every unit on this device."""
        self._supervisor = supervisor
        self._mailbox = supervisor.mailbox
        self._device = supervisor.device
        self._replicas = store.replicas
        self._units = units
        self._replicated: dict[int, set[str]] = {}
        """Devices that have replicated their units, by step."""
        self._mailbox.on(Replicated, self._note_replication)

    def branch(self, step: int) -> None:
        """Continue from a step in the current configuration; later points become void."""
        self.lineage = self.lineage.branch(step, self._mailbox.configuration)
        # Points with batches that were undone are of no use, complete or not.
        if self.safe not in self.lineage:
            self.safe = BEGINNING
        if self.whole not in self.lineage:
            self.whole = BEGINNING
        self._replicated.clear()

    def needed(self, device: str, points: Collection[Point]) -> list[tuple[int, int]]:
        """Return the points a device must keep, in message form.

        These are ``points``, and on the coordinator also the newest complete one, the result of the run so far.
        """
        needed = set(points)
        if device == self._device.name:
            needed.add(self.whole)
        in_message = []
        for point in sorted(needed):
            in_message.append((point.configuration, point.step))
        return in_message

    def has_all(self, step: int) -> bool:
        """Return whether every unit after a step is on this device."""
        return self._is_whole(self.lineage.point(step))

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the newest complete weights on this device; empty if none are complete."""
        point = self._newest_whole()
        if point is None:
            return {}
        state = self._replicas.state(point, range(self._units))
        return result_of(state)

    async def save(self, partition: StagePartition) -> None:
        """Write the training progress to the disk, beside the replicas."""
        fields = {
            "begun": self.lineage.begun,
            "devices": partition.devices,
            "cuts": partition.cuts,
        }
        await self._device.save("training", Message("training", fields))

    def read_saved(self) -> StagePartition | None:
        """Read the progress a previous program of this device left on the disk; return the partition, if any."""
        training = self._device.saved("training")
        replicas = self._device.saved("replicas")
        if training is None:
            return None
        # JSON has lists for tuples.
        begun = tuple((made, begin) for made, begin in training["begun"])
        self.lineage = Lineage(begun)
        if replicas is not None:
            self._replicas.load(replicas)
            self.whole = self._newest_whole() or BEGINNING
        return StagePartition(tuple(training["devices"]), tuple(training["cuts"]))

    def _note_replication(self, replicated: Replicated) -> None:
        """Release older points once all stages have replicated their units."""
        point = Point(self._mailbox.configuration, replicated.step)
        senders = self._replicated.setdefault(replicated.step, set())
        senders.add(replicated.sender)
        is_incomplete = senders < self._supervisor.membership.assigned
        # Reports of two replications may overlap: the older one must not free the newer one.
        if is_incomplete or point < self.safe:
            return
        self.safe = point
        if self._is_whole(point):
            self.whole = point
        for part in self._supervisor.layout:
            needed = self.needed(part.device, {point})
            keep = Keep(self._mailbox.configuration, needed)
            self._mailbox.post(part.device, keep)
        saving = self._device.save("replicas", self._replicas.dump())
        self._mailbox.start(saving)

    def _is_whole(self, point: Point) -> bool:
        return len(self._replicas.units(point)) == self._units

    def _newest_whole(self) -> Point | None:
        """Return the newest valid point with every unit on this device."""
        newest: Point | None = None
        for point in self._replicas.points():
            if not self._is_whole(point) or point not in self.lineage:
                continue
            if newest is None or point.step > newest.step:
                newest = point
        return newest


FROM_BEGINNING = RestorePlan(BEGINNING, {})
"""The plan of a first configuration whose units all come from the seed."""


@dataclass(frozen=True)
class Configuration:
    """The stages of a configuration, and the state that these begin with."""

    partition: StagePartition
    restore: RestorePlan = FROM_BEGINNING
    incarnations: Mapping[str, float] = field(default_factory=dict)
    """The incarnations of the stages that were set up last, which may be those of the configuration before."""


class Standby:
    """Devices without a stage, and which of them may become one.

    A device that did not answer and is present again with the same incarnation (the start time of its program) did not
    crash: it was slow or cut off. The device becomes usable once the links of all its neighbours reach it.
    """

    def __init__(self, members: Membership, *, admits_devices: bool) -> None:
        self._members = members
        self._admits_devices = admits_devices
        self._silenced: dict[str, float] = {}
        """Devices that were lost in silence, with their incarnations."""
        self._reachable: set[str] = set()
        """Silenced devices that were reached by a measurement since."""

    def lose(self, names: Collection[str], known: Mapping[str, float]) -> None:
        """Record devices lost in silence; ``known`` are the incarnations of devices with stages."""
        for name in names:
            if name in known:
                self._silenced[name] = known[name]
        self._reachable.difference_update(names)

    def reached(self, device: str) -> None:
        """Make a device available again after all its neighbours have reached it."""
        self._reachable.add(device)
        if device in self._members.excluded:
            self._members.excluded.discard(device)
            self._members.joiners.add(device)

    def admit_all(self) -> None:
        """Make all devices available again."""
        self._reachable |= self._silenced.keys()

    def doubted(self, names: Collection[str]) -> set[str]:
        """Return the devices whose availability is unknown."""
        return self._survivors(names) - self._reachable

    def untested(self) -> set[str]:
        """Return the devices with links to be measured: cut off from others, or too slow."""
        if not self._admits_devices:
            return set()
        return self._members.excluded | self._survivors(self._members.joiners)

    def joiners(self) -> set[str]:
        """Return the devices eligible to become stages."""
        if not self._admits_devices:
            return set()
        return self._members.joiners - self.doubted(self._members.joiners)

    def _survivors(self, names: Collection[str]) -> set[str]:
        """Return the devices that were lost in silence and have kept their memory."""
        survivors = set()
        for name in names:
            known = self._silenced.get(name)
            if known is not None and self._members.present.get(name) == known:
                survivors.add(name)
        return survivors


class ReplicaRecovery:
    """Recovery of asynchronous training; a `testbed.messaging.supervision.RecoveryPolicy`."""

    def __init__(
        self,
        supervisor: Supervisor,
        store: ReplicaStore,
        partitioner: Partitioner,
        context: ProgramContext[AsynchronousOptions],
        steps: int,
    ) -> None:
        """``steps`` is the length of the training. The device exposes its newest complete state."""
        problem = context.problem
        assignments = context.plan.assignments
        units = len(problem.model.units)
        devices = tuple(assignment.device for assignment in assignments)
        ends = [assignment.stop for assignment in assignments]
        planned = StagePartition(devices, (0, *ends))
        self._configuration = Configuration(planned)
        self.points = ReplicaIndex(supervisor, store, units)
        supervisor.device.expose(self.points.weights)
        self.recovering = False
        """Whether the next batch done is the first one after a recovery."""
        self.done = 0
        """The batch after the last one done on all stages, as far as it was not undone."""
        self._supervisor = supervisor
        self._mailbox = supervisor.mailbox
        self._device = supervisor.device
        self._members = supervisor.membership
        self._store = store
        self._partitioner = partitioner
        self._problem = problem
        self._steps = steps
        self._seeded = context.weights is None
        """Whether training begins with the seed's weights."""
        if context.weights is not None:
            store.replicas.put(BEGINNING, context.weights, range(units))
        self._committed = 0
        """The configuration whose stages were committed last."""
        self._waited: Lost | None = None
        """The last loss that `await_return` has recorded, and after which it has waited for the devices."""
        self._members.refusal = None
        if not partitioner.admits_devices:
            self._members.refusal = "its units are another's"
        self.standby = Standby(self._members, admits_devices=partitioner.admits_devices)

    @property
    def partition(self) -> StagePartition:
        """The current stages."""
        return self._configuration.partition

    @property
    def start(self) -> int:
        """The first step of the current configuration."""
        return self._configuration.restore.point.step

    async def begin(self) -> None:
        """Open the first configuration; after a crash of this device, continue from the state on its disk."""
        saved = self.points.read_saved()
        if saved is not None:
            self._configuration = Configuration(saved)
        layout = self._partitioner.assignments(self.partition)
        # The first start, or one without a disk.
        if saved is None:
            self._supervisor.start(layout)
            self.adopt(await self._select_devices())
            return
        missing = [self._device.name]
        self._device.record(
            "recovery", phase="detected", step=self.points.whole.step, missing=missing
        )
        self._supervisor.start(layout)
        timeouts = self._supervisor.timeouts
        seconds = max(timeouts.stall_timeout, timeouts.rejoin_timeout)
        await self._gather_inventories(self.partition.devices, seconds)
        self._resume_training()

    async def establish(self) -> None:
        """Make every stage fetch its missing units; commit once all are complete."""
        supervisor = self._supervisor
        number = self._mailbox.configuration
        restore = self._configuration.restore
        point = restore.point
        supervisor.begin()
        for part in supervisor.layout:
            fetch: dict[str, list[int]] = {}
            need = restore.needs.get(part.device)
            if need is not None:
                for owner, units in need.fetch.items():
                    fetch[owner] = list(units)
            # Without needs, all units of a stage come from the seed.
            prepare = Prepare(
                configuration=number,
                stages=supervisor.stages,
                steps=self._steps,
                made=point.configuration,
                step=point.step,
                seeded=need is None,
                fetch=fetch,
                origins=restore.origins_of(part.device),
            )
            self._mailbox.post(part.device, prepare)
        # Saved before the commit: a coordinator that crashes afterwards must know of the configuration.
        await self.points.save(self.partition)
        await supervisor.ready()
        incarnations = self._present_incarnations(self.partition.devices)
        self._configuration = replace(self._configuration, incarnations=incarnations)
        if self.recovering:
            self._device.record("recovery", phase="redistributed", step=self.start)
        self._committed = number
        for part in supervisor.layout:
            needed = self.points.needed(part.device, {point, self.points.safe})
            self._mailbox.post(part.device, Commit(number, needed))

    async def recover(self, lost: Lost, start: int) -> None:
        """Collect the inventories, and choose the state and stages to resume with."""
        supervisor = self._supervisor
        self._record_detection(lost)
        known = dict(self._members.assigned_incarnations)
        gone = set(lost.missing) - lost.restarted
        # A loss that was waited for already is not waited for again.
        awaited = set() if lost is self._waited else gone
        self._mailbox.open(self._mailbox.configuration + 1)
        remaining = set(self.partition.devices) - gone
        await self._gather_inventories(remaining, supervisor.stall_timeout, awaited)
        supervisor.learn_stall_timeout(lost, known)
        self.standby.lose(gone - self._members.answers.keys(), known)
        self._resume_training()

    async def await_return(self, lost: Lost) -> bool:
        """Wait for silent devices; return whether all are present again with their memory.

        If they are, nothing is undone and nothing is moved: training continues with the batch that lacks gradients, the
        first case of FTPipeHD's fault handler (Section III-F).
        """
        supervisor = self._supervisor
        members = self._members
        window = supervisor.timeouts.rejoin_timeout
        # A device that is cut off from others, or back after a restart, makes a new configuration necessary.
        if lost.unreachable or lost.restarted or not lost.missing or not window:
            return False
        self._record_detection(lost)
        self._waited = lost
        known = dict(members.assigned_incarnations)
        configuration = self._mailbox.configuration

        def has_restarted() -> bool:
            return bool(members.restarted & members.assigned)

        await members.ping_all(dict.fromkeys(lost.missing, window), has_restarted)
        for name in lost.missing:
            answer = members.answers.get(name)
            if answer is None or answer.incarnation != known[name]:
                return False
            # A device of another configuration has dropped this one's activations and gradients.
            if answer.holds != configuration:
                return False
        supervisor.learn_stall_timeout(lost, known)
        self.recovering = True
        partition = supervisor.stages
        step = supervisor.progress
        self._device.record(
            "recovery",
            phase="repartitioned",
            step=step,
            case="restart",
            partition=partition,
        )
        self._device.record("recovery", phase="redistributed", step=step)
        self._device.record("recovery", phase="resumed", step=step, partition=partition)
        return True

    def _record_detection(self, lost: Lost) -> None:
        if lost is self._waited:
            return
        progress = self._supervisor.progress
        self._device.record(
            "recovery", phase="detected", step=progress, missing=lost.missing
        )

    async def _select_devices(self) -> StagePartition:
        """Invite all devices, and return a partition over the devices that answer in time."""
        members = self._members
        seconds = self._problem.options.join_timeout
        deadlines = dict.fromkeys(members.others, self._device.now() + seconds)
        await members.gather(deadlines, greeted=True)
        there = {self._device.name, *members.present}
        missing = [name for name in self.partition.devices if name not in there]
        if not missing:
            return self.partition
        silent = ", ".join(missing)
        self._device.record(
            "log",
            text=f"{silent} did not answer in {seconds:g} s: training begins without",
        )
        choose = self._partitioner.partition_for
        return self._fitting_partition(choose, self.ordered(there))

    async def regroup(self, names: Collection[str]) -> list[str]:
        """Open a configuration without a failure; return the devices present for it, in the scenario's order.

        Waits for the answers of ``names``. Raises `Lost` for a missing stage.
        """
        self._mailbox.open(self._mailbox.configuration + 1)
        await self._gather_inventories(names, self._supervisor.stall_timeout)
        there = self._eligible_devices()
        # A stage that has crashed meanwhile is a failure, with another resume point.
        present = self._present_incarnations(there)
        failure = classify_failure(self._configuration.incarnations, present)
        if failure.lost:
            raise Lost(failure.lost, restarted=failure.empty)
        return there

    def adopt(self, partition: StagePartition) -> None:
        """Adopt a partition to be established, from the state that the option ``resume`` asks for."""
        members = self._members
        before = self.partition
        inventory = self._collect_inventory()
        restore = self._restore_plan(inventory, partition)
        self._configuration = replace(
            self._configuration, partition=partition, restore=restore
        )
        self.points.branch(restore.branch_step)
        self.done = self.start
        joining = set(partition.devices).difference(before.devices)
        if joining:
            text = f"{', '.join(sorted(joining))} joins at step {self.start}"
            self._device.record("log", text=text)
        self._supervisor.watch(self._partitioner.assignments(partition))
        # Silent devices are no joiners: the next change would wait for them in vain.
        if self._partitioner.admits_devices:
            standby = members.answers.keys() - set(partition.devices)
            members.joiners = standby - members.excluded

    def _collect_inventory(self) -> dict[str, ReplicaList]:
        """Return the units that each usable device holds, by its answer."""
        members = self._members
        inventory: dict[str, ReplicaList] = {self._device.name: self._store.inventory()}
        # Replicas of a device that has restarted since its answer are gone.
        unusable = members.restarted | members.excluded
        for name, answer in members.answers.items():
            inventory[name] = [] if name in unusable else list(answer.held)
        return inventory

    def _restore_plan(
        self, inventory: Mapping[str, ReplicaList], partition: StagePartition
    ) -> RestorePlan:
        """Return the resume point, and the sources of units for a new partition."""
        lineage = self.points.lineage
        before = self.partition
        options = self._problem.options
        local_first = options.redistribution == "local-first"
        restore = place(
            lineage,
            inventory,
            before,
            partition,
            seeded=self._seeded,
            steps=self._steps,
            local_first=local_first,
        )
        # After a drain, or with all replicas up to date, the newest complete state is the present one.
        if options.resume == "last-replica" or restore.point.step >= self.done:
            return restore
        newest = place_newest(
            lineage,
            inventory,
            before,
            partition,
            resumed=Point(self._mailbox.configuration, self.done),
            running=self._committed,
            steps=self._steps,
            local_first=local_first,
        )
        return restore if newest is None else newest

    def _resume_training(self) -> None:
        """Choose the state and the stages to resume with, among the answering devices."""
        partition, there = self._after_loss()
        present = self._present_incarnations(there)
        # A device that no configuration has reached yet has nothing to lose: it counts as it is.
        known = present | dict(self._configuration.incarnations)
        # The value for an absent device does not matter, since it has no answer to compare with.
        configured = {}
        for name in self.partition.devices:
            configured[name] = known.get(name, 0.0)
        case = classify_failure(configured, present).case
        self.adopt(partition)
        self.recovering = True
        stages = self._supervisor.stages
        self._device.record(
            "recovery",
            phase="repartitioned",
            step=self.start,
            case=case,
            partition=stages,
        )

    async def _gather_inventories(
        self,
        names: Collection[str],
        seconds: float,
        missing: Collection[str] = (),
    ) -> None:
        """Request the inventories of all devices, and wait for some of the answers.

        Waits at most ``seconds`` for the devices ``names``, and for ``missing`` ones at most the option
        `rejoin_timeout`.
        """
        now = self._device.now()
        returning = now + self._supervisor.timeouts.rejoin_timeout
        deadlines = dict.fromkeys(names, now + seconds)
        deadlines |= dict.fromkeys(missing, returning)
        await self._members.gather(deadlines)

    def _eligible_devices(self) -> list[str]:
        """Return the devices eligible as stages, in the scenario's order."""
        there = {self._device.name, *self._members.answers} - self._members.excluded
        there -= self.standby.doubted(there)
        if not self._partitioner.admits_devices:
            there &= set(self.partition.devices)
        return self.ordered(there)

    def ordered(self, names: Collection[str]) -> list[str]:
        """Return devices in the scenario's order."""
        return [spec.name for spec in self._problem.devices if spec.name in names]

    def _present_incarnations(self, names: Collection[str]) -> dict[str, float]:
        """Return the incarnations of present devices."""
        # The coordinator's own device is not among the members that answer.
        own = self._supervisor.presence.incarnation
        incarnations = {}
        for name in names:
            incarnations[name] = self._members.present.get(name, own)
        return incarnations

    def _after_loss(self) -> tuple[StagePartition, list[str]]:
        """Return the stages to resume with, and the present devices.

        The stages are unchanged if all their devices are present; otherwise the method chooses stages among the present
        devices.
        """
        there = self._eligible_devices()
        if set(self.partition.devices) <= set(there):
            return self.partition, there
        choose = partial(self._partitioner.after_loss, self.partition)
        try:
            return self._fitting_partition(choose, there), there
        except TestbedError:
            if not self.standby.doubted(self._members.answers):
                raise
            # A slow device is better than none.
            self.standby.admit_all()
            there = self._eligible_devices()
            return self._fitting_partition(choose, there), there

    def _fitting_partition(
        self,
        choose: Callable[[Sequence[str]], StagePartition],
        present: Sequence[str],
    ) -> StagePartition:
        """Return the partition chosen for the present devices; raises `TestbedError` if none fits."""
        try:
            return choose(present)
        except InputError as error:
            raise TestbedError(f"not enough devices: {error.text}") from error
