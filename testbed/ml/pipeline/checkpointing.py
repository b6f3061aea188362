"""Recovery from a checkpoint: all devices stop, and the remaining ones resume from the last complete state.

The coordinator holds the checkpoint. After the loss of devices it opens a configuration with a higher number, waits up
to ``rejoin_timeout`` for the lost ones to answer, and assigns the same stages again, or other stages over the remaining
devices. A device returning later joins at the next checkpoint.

The coordinator itself is a single point of failure. After a restart it begins the workload again, in configurations
with higher numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from testbed.common.errors import InputError, TestbedError
from testbed.messaging.supervision import Lost, Supervisor
from testbed.messaging.typed_messages import TypedMessage
from testbed.ml.layers.shard import State, result_of
from testbed.ml.lazy import torch
from testbed.ml.pipeline.messages import UnitState
from testbed.plan import Assignment

Partitioner = Callable[[Collection[str]], Sequence[Assignment]]
"""Available devices -> their parts; raises `InputError` if no partition fits."""
MakeConfigure = Callable[[Assignment, State | None], TypedMessage]
"""(part, state of the checkpoint or None for the seed's) -> the configuration message of the part's device."""


@dataclass(frozen=True)
class Checkpoint:
    """A state training can resume from."""

    step: int
    """The next step to be done."""
    state: State | None
    """Weights and optimizer state of the whole model; None for the seed's."""


class Collector:
    """Collects a state unit by unit; the states of several steps may arrive interleaved."""

    def __init__(self, units: int) -> None:
        self._units = units
        self._pieces: dict[int, dict[int, Mapping[str, torch.Tensor]]] = {}
        """Step -> unit -> state of the unit."""

    def add(self, step: int, unit: int, state: State) -> Checkpoint | None:
        """Add the state of one unit before ``step``; return the checkpoint if all units are there."""
        states = self._pieces.setdefault(step, {})
        states[unit] = state
        if len(states) < self._units:
            return None
        # Earlier checkpoints are outdated, complete or not.
        for other in list(self._pieces):
            if other <= step:
                del self._pieces[other]
        whole: dict[str, torch.Tensor] = {}
        # In the order of the model, whatever the order of arrival.
        for index in sorted(states):
            whole.update(states[index])
        return Checkpoint(step, whole)

    def clear(self) -> None:
        """Drop incomplete states: the missing units will never arrive."""
        self._pieces.clear()


class CheckpointRecovery:
    """Recovery from the last checkpoint, on the coordinator; a `testbed.messaging.supervision.RecoveryPolicy`.

    The device exposes the weights of the last checkpoint.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        configure: MakeConfigure,
        partitioner: Partitioner,
        units: int,
        weights: State | None,
    ) -> None:
        """``units`` is the number of the model's units, ``weights`` the initial weights; None: those of the seed."""
        self.checkpoint = Checkpoint(0, weights)
        self._mailbox = supervisor.mailbox
        self._device = supervisor.mailbox.device
        self._supervisor = supervisor
        self._members = supervisor.membership
        self._configure = configure
        self._partitioner = partitioner
        self._collector = Collector(units)
        self._device.expose(self.weights)
        self._mailbox.on(UnitState, self._collect_unit)
        self._mailbox.on_open(self._collector.clear)

    def weights(self) -> State:
        """Return the weights of the last checkpoint; empty before the first one."""
        return result_of(self.checkpoint.state or {})

    def _collect_unit(self, part: UnitState) -> None:
        complete = self._collector.add(part.step, part.unit, part.state)
        if complete is not None:
            self.checkpoint = complete

    async def establish(self) -> None:
        """Configure every device from the last checkpoint, and wait until all are ready."""
        self._supervisor.begin()
        for part in self._supervisor.layout:
            configure = self._configure(part, self.checkpoint.state)
            self._mailbox.post(part.device, configure)
        await self._supervisor.ready()

    async def recover(self, lost: Lost, start: int) -> None:
        """Wait for lost devices to return; assign stages to the present ones."""
        self._device.record(
            "recovery", phase="detected", step=start, missing=lost.missing
        )
        known = dict(self._members.assigned_incarnations)
        window = self._supervisor.timeouts.rejoin_timeout
        await self._gather_devices(self._members.assigned, window)
        self._supervisor.learn_stall_timeout(lost, known)
        self._assign_stages()

    async def admit_joiners(self) -> None:
        """Admit new or returned devices at a checkpoint if more stages become possible. Raises `Lost`."""
        joiners = self._members.joiners
        if not joiners:
            return
        wanted = joiners | self._members.assigned
        try:
            possible = self._partitioner(wanted)
        except InputError:
            possible = ()
        if len(possible) <= len(self._supervisor.layout):
            # Not asked again at every checkpoint: the same devices would not help then either.
            joiners.clear()
            return
        text = f"{', '.join(sorted(joiners))} join at step {self.checkpoint.step}"
        self._device.record("log", text=text)
        await self._gather_devices(wanted, self._supervisor.stall_timeout)
        self._assign_stages()
        await self.establish()

    async def _gather_devices(self, names: Collection[str], seconds: float) -> None:
        """Open a configuration, and wait for the answers of the devices ``names``, at most ``seconds``."""
        self._mailbox.open(self._mailbox.configuration + 1)
        deadline = self._device.now() + seconds
        deadlines = dict.fromkeys(names, deadline)
        await self._members.gather(deadlines, greeted=True)

    def _assign_stages(self) -> None:
        """Keep the stages if exactly their devices are present, otherwise plan for the present devices."""
        members = self._members
        present = {self._device.name, *members.present} - members.excluded
        if members.assigned == present:
            return
        try:
            self._supervisor.watch(self._partitioner(present))
        except InputError as error:
            raise TestbedError(f"not enough devices: {error.text}") from error
        # Devices beyond the last stage stand by.
        members.joiners = present - members.assigned
