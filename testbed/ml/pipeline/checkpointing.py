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
"""(part, state of the checkpoint; None: the seed's) -> the configuration message of a device."""


@dataclass(frozen=True)
class Checkpoint:
    """A state training can resume from."""

    step: int
    """The next step to be done."""
    state: State | None
    """The state; None for the seed's."""


class Collector:
    """Collects a state unit by unit; the states of several steps may arrive interleaved."""

    def __init__(self, units: int) -> None:
        self._units = units
        self._pieces: dict[int, dict[int, Mapping[str, torch.Tensor]]] = {}

    def add(self, step: int, unit: int, state: State) -> Checkpoint | None:
        """Add one unit; return the checkpoint if complete."""
        states = self._pieces.setdefault(step, {})
        states[unit] = state
        if len(states) < self._units:
            return None
        # Earlier checkpoints are outdated, complete or not.
        for other in list(self._pieces):
            if other <= step:
                del self._pieces[other]
        whole: dict[str, torch.Tensor] = {}
        for index in sorted(states):
            whole.update(states[index])
        return Checkpoint(step, whole)

    def clear(self) -> None:
        """Drop incomplete states: the missing units will never arrive."""
        self._pieces.clear()


class CheckpointRecovery:
    """A `testbed.messaging.supervision.RecoveryPolicy`; the device exposes the last checkpoint."""

    def __init__(
        self,
        supervisor: Supervisor,
        configure: MakeConfigure,
        partitioner: Partitioner,
        units: int,
        weights: State | None,
    ) -> None:
        """``units`` are the model's units, ``weights`` the initial ones; None draws them from the seed."""
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
        known = dict(self._members.known)
        await self._gather_devices(
            self._members.assigned, self._supervisor.timeouts.rejoin_timeout
        )
        self._supervisor.learn_stall_timeout(lost, known)
        self._assign_stages()

    async def admit_joiners(self) -> None:
        """Admit new or returned devices at a checkpoint if they allow more stages. Raises `Lost`."""
        joiners = self._members.joiners
        if not joiners:
            return
        try:
            possible = self._partitioner(joiners | self._members.assigned)
        except InputError:
            possible = ()
        if len(possible) <= len(self._supervisor.layout):
            joiners.clear()
            return
        text = f"{', '.join(sorted(joiners))} join at step {self.checkpoint.step}"
        self._device.record("log", text=text)
        wanted = joiners | self._members.assigned
        await self._gather_devices(wanted, self._supervisor.stall_timeout)
        self._assign_stages()
        await self.establish()

    async def _gather_devices(self, names: Collection[str], seconds: float) -> None:
        """Open a configuration; wait for the answers of these devices up to a time limit."""
        self._mailbox.open(self._mailbox.configuration + 1)
        deadlines = dict.fromkeys(names, self._device.now() + seconds)
        await self._members.gather(deadlines, greeted=True)

    def _assign_stages(self) -> None:
        """Keep the stages if exactly their devices are present, otherwise plan for the present devices."""
        there = {self._device.name, *self._members.present} - self._members.excluded
        if self._members.assigned == there:
            return
        try:
            self._supervisor.watch(self._partitioner(there))
        except InputError as error:
            raise TestbedError(f"not enough devices: {error.text}") from error
        self._members.joiners = there - self._members.assigned
