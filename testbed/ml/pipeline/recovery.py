"""Recovery from replicas: one procedure for every change of the partition, with or without a failure.

The coordinator opens a new configuration, and all devices report of which states they hold units. The coordinator
chooses the state to resume from: the current one after a drain of the pipeline; after a failure, depending on the
option ``resume``, the newest complete state or the newest weights of each unit (`testbed.ml.pipeline.placement`). Each
stage receives the list of its missing units and their holders, fetches the units and reports. Once all have reported,
the coordinator commits the configuration, and training continues with the first batch not included in the state. Until
then all devices keep their units, so a failure in between only leads to another attempt.
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
    restore_complete,
    restore_newest,
)
from testbed.ml.pipeline.planning import AsynchronousOptions, Partitioner
from testbed.wire.message import Message


class ReplicaIndex:
    """The coordinator's knowledge of the points with replicas, and of which points the devices still need.

    A point is valid until one of its batches is undone. A valid point is safe if every unit survives the loss of any
    one device: then all devices free their older replicas.
    """

    def __init__(self, supervisor: Supervisor, store: ReplicaStore, units: int) -> None:
        self.lineage = Lineage()
        self.safe_point = BEGINNING
        """The newest point with every unit on two devices, or on this one."""
        self.complete_point = BEGINNING
        """The newest point with every unit on this device."""
        self._supervisor = supervisor
        self._mailbox = supervisor.mailbox
        self._device = supervisor.device
        self._replicas = store.replicas
        self._units = units
        self._replicated: dict[int, set[str]] = {}
        """Devices that have replicated their units in this configuration, by step."""
        self._mailbox.on(Replicated, self._note_replication)

    def branch(self, step: int) -> None:
        """Record ``step``, from which the current configuration continues; later points become void."""
        self.lineage = self.lineage.branch(step, self._mailbox.configuration)
        if self.safe_point not in self.lineage:
            self.safe_point = BEGINNING
        if self.complete_point not in self.lineage:
            self.complete_point = BEGINNING
        self._replicated.clear()

    def points_to_keep(
        self, device: str, points: Collection[Point]
    ) -> list[tuple[int, int]]:
        """Return (configuration, step) of the points whose replicas a device must keep.

        Every device keeps ``points``. The coordinator also keeps the newest complete point, the result of the run so
        far.
        """
        kept_points = set(points)
        if device == self._device.name:
            kept_points.add(self.complete_point)
        encoded = []
        for point in sorted(kept_points):
            encoded.append((point.configuration, point.step))
        return encoded

    def has_all_units(self, step: int) -> bool:
        """Return whether every unit of the valid state after ``step`` is on this device."""
        return self._is_complete(self.lineage.point(step))

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the newest complete weights on the device; empty without a complete state."""
        point = self._newest_complete()
        if point is None:
            return {}
        state = self._replicas.state(point, range(self._units))
        return result_of(state)

    async def save(self, partition: StagePartition) -> None:
        """Write the training progress to the disk, beside the replicas."""
        fields = {
            "begun": self.lineage.branches,
            "devices": partition.devices,
            "cuts": partition.cuts,
        }
        await self._device.save("training", Message("training", fields))

    def read_saved(self) -> StagePartition | None:
        """Read the progress and replicas left on the disk by a crashed program of the device.

        Returns the partition of the training at that time; None if the disk has no progress.
        """
        training = self._device.saved("training")
        replicas = self._device.saved("replicas")
        if training is None:
            return None
        # Messages contain lists instead of tuples.
        branches = tuple((made, step) for made, step in training["begun"])
        self.lineage = Lineage(branches)
        if replicas is not None:
            self._replicas.load(replicas)
            self.complete_point = self._newest_complete() or BEGINNING
        return StagePartition(tuple(training["devices"]), tuple(training["cuts"]))

    def _note_replication(self, replicated: Replicated) -> None:
        """Make all devices free older points once all stages have replicated their units."""
        point = Point(self._mailbox.configuration, replicated.step)
        senders = self._replicated.setdefault(replicated.step, set())
        senders.add(replicated.sender)
        is_incomplete = senders < self._supervisor.membership.assigned
        # Reports of two replications may overlap: the older replication must not free the newer one.
        if is_incomplete or point < self.safe_point:
            return
        self.safe_point = point
        if self._is_complete(point):
            self.complete_point = point
        for part in self._supervisor.layout:
            kept_points = self.points_to_keep(part.device, {point})
            keep = Keep(self._mailbox.configuration, kept_points)
            self._mailbox.post(part.device, keep)
        saving = self._device.save("replicas", self._replicas.dump())
        self._mailbox.start(saving)

    def _is_complete(self, point: Point) -> bool:
        return len(self._replicas.units(point)) == self._units

    def _newest_complete(self) -> Point | None:
        """Return the newest valid point with every unit on the device."""
        newest: Point | None = None
        for point in self._replicas.points():
            if not self._is_complete(point) or point not in self.lineage:
                continue
            if newest is None or point.step > newest.step:
                newest = point
        return newest


FROM_BEGINNING = RestorePlan(BEGINNING, {})
"""The plan of a first configuration whose units all come from the seed."""


@dataclass(frozen=True)
class Configuration:
    """The stages of a configuration, and the initial state of the stages."""

    partition: StagePartition
    restore: RestorePlan = FROM_BEGINNING
    incarnations: Mapping[str, float] = field(default_factory=dict)
    """Incarnations (start times of the programs) of the devices whose stages were set up last: of the previous
    configuration until this one is set up."""


class Standby:
    """Devices that may become stages again after they were lost in silence.

    A device that did not answer and is present again with the same incarnation (the start time of its program) did not
    crash: it was slow or cut off. The device may become a stage again once its neighbours have reached it by
    measurements of their links.
    """

    def __init__(self, members: Membership, *, admits_devices: bool) -> None:
        self._members = members
        self._admits_devices = admits_devices
        self._silenced: dict[str, float] = {}
        """Devices that were lost in silence, with their incarnations."""
        self._reachable: set[str] = set()
        """Silenced devices that their neighbours have reached by measurements since."""

    def record_loss(
        self, names: Collection[str], incarnations: Mapping[str, float]
    ) -> None:
        """Record devices lost in silence; ``incarnations`` are those of the devices with stages."""
        for name in names:
            if name in incarnations:
                self._silenced[name] = incarnations[name]
        self._reachable.difference_update(names)

    def mark_reachable(self, device: str) -> None:
        """Make a device available again once all neighbours have reached the device."""
        self._reachable.add(device)
        if device in self._members.excluded:
            self._members.excluded.discard(device)
            self._members.joiners.add(device)

    def mark_all_reachable(self) -> None:
        """Make all devices available again."""
        self._reachable |= self._silenced.keys()

    def unreached(self, names: Collection[str]) -> set[str]:
        """Return the devices among ``names`` lost in silence and not reached by their neighbours since."""
        return self._survivors(names) - self._reachable

    def devices_to_measure(self) -> set[str]:
        """Return the devices whose links must be measured before they become stages: they were cut off, or too slow."""
        if not self._admits_devices:
            return set()
        return self._members.excluded | self._survivors(self._members.joiners)

    def eligible_joiners(self) -> set[str]:
        """Return the devices without a stage that may become stages."""
        if not self._admits_devices:
            return set()
        return self._members.joiners - self.unreached(self._members.joiners)

    def _survivors(self, names: Collection[str]) -> set[str]:
        """Return the devices among ``names`` lost in silence with their memory intact."""
        survivors = set()
        for name in names:
            incarnation = self._silenced.get(name)
            if incarnation is None:
                continue
            if self._members.present.get(name) == incarnation:
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
        """``steps`` is the length of the training. The device exposes its newest complete weights."""
        problem = context.problem
        assignments = context.plan.assignments
        units = len(problem.model.units)
        devices = tuple(assignment.device for assignment in assignments)
        ends = [assignment.stop for assignment in assignments]
        planned = StagePartition(devices, (0, *ends))
        self._configuration = Configuration(planned)
        self.replica_index = ReplicaIndex(supervisor, store, units)
        supervisor.device.expose(self.replica_index.weights)
        self.recovering = False
        """Whether the next batch that is done is the first one after a recovery."""
        self.batches_done = 0
        """Number of batches done on all stages, without batches that were undone."""
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
        self._awaited_loss: Lost | None = None
        """The newest loss after which `await_return` has waited for the devices; the loss is recorded already."""
        self._members.refusal = None
        if not partitioner.admits_devices:
            self._members.refusal = "another device has taken over its units"
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
        """Open the first configuration; after a crash of the device, continue from the state on disk."""
        saved_partition = self.replica_index.read_saved()
        if saved_partition is not None:
            self._configuration = Configuration(saved_partition)
        layout = self._partitioner.assignments(self.partition)
        # The first start of the program, or a restart on a device without a disk.
        if saved_partition is None:
            self._supervisor.start(layout)
            self.adopt(await self._select_devices())
            return
        missing = [self._device.name]
        self._device.record(
            "recovery",
            phase="detected",
            step=self.replica_index.complete_point.step,
            missing=missing,
        )
        self._supervisor.start(layout)
        timeouts = self._supervisor.timeouts
        seconds = max(timeouts.stall_timeout, timeouts.rejoin_timeout)
        await self._gather_inventories(self.partition.devices, seconds)
        self._resume_training()

    async def establish(self) -> None:
        """Make every stage fetch the missing units; commit once all are complete."""
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
        await self.replica_index.save(self.partition)
        await supervisor.ready()
        incarnations = self._present_incarnations(self.partition.devices)
        self._configuration = replace(self._configuration, incarnations=incarnations)
        if self.recovering:
            self._device.record("recovery", phase="redistributed", step=self.start)
        self._committed = number
        index = self.replica_index
        for part in supervisor.layout:
            kept_points = index.points_to_keep(part.device, {point, index.safe_point})
            self._mailbox.post(part.device, Commit(number, kept_points))

    async def recover(self, lost: Lost, start: int) -> None:
        """Collect the inventories, and choose the state and stages to resume with."""
        supervisor = self._supervisor
        self._record_detection(lost)
        # Copied: the answers to the new configuration change them.
        incarnations = dict(self._members.assigned_incarnations)
        absent = set(lost.missing) - lost.restarted
        # `await_return` has waited for the devices of its loss already.
        awaited = set() if lost is self._awaited_loss else absent
        self._mailbox.open(self._mailbox.configuration + 1)
        remaining = set(self.partition.devices) - absent
        await self._gather_inventories(remaining, supervisor.stall_timeout, awaited)
        supervisor.learn_stall_timeout(lost, incarnations)
        silent = absent - self._members.answers.keys()
        self.standby.record_loss(silent, incarnations)
        self._resume_training()

    async def await_return(self, lost: Lost) -> bool:
        """Wait for silent devices; return whether all are present again with their memory.

        If all are present, no batch is undone and no unit is moved: training continues with the batch that lacks
        gradients, the first case of FTPipeHD's fault handler (Section III-F).
        """
        supervisor = self._supervisor
        members = self._members
        window = supervisor.timeouts.rejoin_timeout
        # A device that is cut off from others, or has restarted, makes a new configuration necessary.
        if lost.unreachable or lost.restarted or not lost.missing or not window:
            return False
        self._record_detection(lost)
        self._awaited_loss = lost
        incarnations = dict(members.assigned_incarnations)
        configuration = self._mailbox.configuration

        def has_restarted() -> bool:
            return bool(members.restarted & members.assigned)

        await members.ping_all(dict.fromkeys(lost.missing, window), has_restarted)
        for name in lost.missing:
            answer = members.answers.get(name)
            if answer is None or answer.incarnation != incarnations[name]:
                return False
            # A device without a stage of this configuration has dropped the configuration's activations and gradients.
            if answer.holds != configuration:
                return False
        supervisor.learn_stall_timeout(lost, incarnations)
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
        if lost is self._awaited_loss:
            return
        progress = self._supervisor.progress
        self._device.record(
            "recovery", phase="detected", step=progress, missing=lost.missing
        )

    async def _select_devices(self) -> StagePartition:
        """Invite all devices, and return a partition over the devices answering in time."""
        members = self._members
        seconds = self._problem.options.join_timeout
        deadlines = dict.fromkeys(members.others, self._device.now() + seconds)
        await members.gather(deadlines, greeted=True)
        present = {self._device.name, *members.present}
        silent = [name for name in self.partition.devices if name not in present]
        if not silent:
            return self.partition
        names = ", ".join(silent)
        self._device.record(
            "log",
            text=f"{names} did not answer in {seconds:g} s: training begins without",
        )
        choose = self._partitioner.partition_for
        return self._fitting_partition(choose, self.ordered(present))

    async def regroup(self, names: Collection[str]) -> list[str]:
        """Open a configuration without a failure; return the devices that may become stages, in the scenario's order.

        Waits for the answers of the devices ``names``. Raises `Lost` if a device with a stage is absent or has
        restarted.
        """
        self._mailbox.open(self._mailbox.configuration + 1)
        await self._gather_inventories(names, self._supervisor.stall_timeout)
        eligible = self._eligible_devices()
        # A device with a stage may have crashed meanwhile: after this failure training resumes from another point.
        present = self._present_incarnations(eligible)
        failure = classify_failure(self._configuration.incarnations, present)
        if failure.lost:
            raise Lost(failure.lost, restarted=failure.restarted)
        return eligible

    def adopt(self, partition: StagePartition) -> None:
        """Choose the initial state of a partition's stages; `establish` then sets up the stages."""
        members = self._members
        before = self.partition
        inventory = self._collect_inventory()
        restore = self._restore_plan(inventory, partition)
        self._configuration = replace(
            self._configuration, partition=partition, restore=restore
        )
        self.replica_index.branch(restore.branch_step)
        self.batches_done = self.start
        joining = set(partition.devices).difference(before.devices)
        if joining:
            text = f"{', '.join(sorted(joining))} joins at step {self.start}"
            self._device.record("log", text=text)
        self._supervisor.watch(self._partitioner.assignments(partition))
        # Only devices that answer become joiners: the next change would wait for silent ones in vain.
        if self._partitioner.admits_devices:
            standby = members.answers.keys() - set(partition.devices)
            members.joiners = standby - members.excluded

    def _collect_inventory(self) -> dict[str, ReplicaList]:
        """Return the replicas of each device by its newest answer; none for a device unable to serve replicas."""
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
        lineage = self.replica_index.lineage
        options = self._problem.options
        local_first = options.redistribution == "local-first"
        restore = restore_complete(
            lineage,
            inventory,
            old=self.partition,
            new=partition,
            seeded=self._seeded,
            steps=self._steps,
            local_first=local_first,
        )
        if options.resume == "last-replica":
            return restore
        # After a drain, or right after a replication, the newest complete state has the newest weights of all units.
        if restore.point.step >= self.batches_done:
            return restore
        newest = restore_newest(
            lineage,
            inventory,
            old=self.partition,
            new=partition,
            resumed=Point(self._mailbox.configuration, self.batches_done),
            running=self._committed,
            steps=self._steps,
            local_first=local_first,
        )
        return restore if newest is None else newest

    def _resume_training(self) -> None:
        """Choose the state and the stages to resume with, among the answering devices."""
        partition, eligible = self._after_loss()
        present = self._present_incarnations(eligible)
        # A device whose stage was never set up had nothing to lose, so its present incarnation is compared with itself.
        incarnations = present | dict(self._configuration.incarnations)
        # The value for an absent device does not matter, since there is no answer to compare with.
        configured = {}
        for name in self.partition.devices:
            configured[name] = incarnations.get(name, 0.0)
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
        returning: Collection[str] = (),
    ) -> None:
        """Request the inventories of all devices, and wait for some of the answers.

        Waits at most ``seconds`` for the devices ``names``, and at most the option `rejoin_timeout` for the devices
        ``returning``, which are lost.
        """
        now = self._device.now()
        rejoin_deadline = now + self._supervisor.timeouts.rejoin_timeout
        deadlines = dict.fromkeys(names, now + seconds)
        deadlines |= dict.fromkeys(returning, rejoin_deadline)
        await self._members.gather(deadlines)

    def _eligible_devices(self) -> list[str]:
        """Return the devices eligible as stages, in the scenario's order."""
        eligible = {self._device.name, *self._members.answers}
        eligible -= self._members.excluded
        eligible -= self.standby.unreached(eligible)
        if not self._partitioner.admits_devices:
            eligible &= set(self.partition.devices)
        return self.ordered(eligible)

    def ordered(self, names: Collection[str]) -> list[str]:
        """Return the devices ``names`` in the scenario's order."""
        return [spec.name for spec in self._problem.devices if spec.name in names]

    def _present_incarnations(self, names: Collection[str]) -> dict[str, float]:
        """Return the incarnations of the present devices ``names``, which may contain the coordinator."""
        # The coordinator's own device is not among the members that answer.
        own = self._supervisor.presence.incarnation
        incarnations = {}
        for name in names:
            incarnations[name] = self._members.present.get(name, own)
        return incarnations

    def _after_loss(self) -> tuple[StagePartition, list[str]]:
        """Return the partition to resume with, and the eligible devices.

        The partition is unchanged if all its devices are eligible; otherwise the method chooses another one.
        """
        eligible = self._eligible_devices()
        if set(self.partition.devices) <= set(eligible):
            return self.partition, eligible
        choose = partial(self._partitioner.after_loss, self.partition)
        try:
            return self._fitting_partition(choose, eligible), eligible
        except TestbedError:
            if not self.standby.unreached(self._members.answers):
                raise
            # Without slow devices no partition fits, so they are used in spite of their earlier silence.
            self.standby.mark_all_reachable()
            eligible = self._eligible_devices()
            return self._fitting_partition(choose, eligible), eligible

    def _fitting_partition(
        self,
        choose: Callable[[Sequence[str]], StagePartition],
        present: Sequence[str],
    ) -> StagePartition:
        """Return the partition that ``choose`` returns for the present devices; raises `TestbedError` if none fits."""
        try:
            return choose(present)
        except InputError as error:
            raise TestbedError(f"not enough devices: {error.text}") from error
