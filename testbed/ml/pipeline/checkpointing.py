"""Recovery from a checkpoint: all devices stop, and the remaining ones resume from the last complete state.

The coordinator holds the checkpoint: the weights and optimizer state of the whole model after a step. A configuration
is a numbered period with the same stages on the same devices. After the loss of devices the coordinator opens the next
configuration, waits up to ``rejoin_timeout`` for the lost devices to answer, and assigns the same stages again, or
other stages to the remaining devices. A device that returns later joins at the next checkpoint.

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

PlanStages = Callable[[Collection[str]], Sequence[Assignment]]
"""Names of the present devices -> the stages; raises `InputError` if no partition fits."""
MakeConfigure = Callable[[Assignment, State | None], TypedMessage]
"""(stage, state of the checkpoint) -> the message that makes the stage's device begin its work.

The state is None if the weights are drawn from the seed.
"""


@dataclass(frozen=True)
class Checkpoint:
    """A state from which training can resume."""

    step: int
    """The number of steps done, and thus the step to resume with."""
    state: State | None
    """Weights and optimizer state of the whole model; None to draw weights from the seed."""


class Collector:
    """Collects the checkpoint of each step unit by unit; the units of several steps may arrive interleaved."""

    def __init__(self, units: int) -> None:
        """``units`` is the number of units of the model."""
        self._units = units
        self._unit_states: dict[int, dict[int, Mapping[str, torch.Tensor]]] = {}
        """Step -> unit -> state of the unit."""

    def add(self, step: int, unit: int, state: State) -> Checkpoint | None:
        """Add the state of one unit after ``step`` steps; return the checkpoint once it has all units."""
        unit_states = self._unit_states.setdefault(step, {})
        unit_states[unit] = state
        if len(unit_states) < self._units:
            return None
        # Earlier checkpoints are outdated, complete or not.
        for collected_step in list(self._unit_states):
            if collected_step <= step:
                del self._unit_states[collected_step]
        whole_state: dict[str, torch.Tensor] = {}
        # In the order of the model, whatever the order of arrival.
        for index in sorted(unit_states):
            whole_state.update(unit_states[index])
        return Checkpoint(step, whole_state)

    def clear(self) -> None:
        """Drop incomplete checkpoints, whose missing units will never arrive."""
        self._unit_states.clear()


class CheckpointRecovery:
    """Recovery from the last checkpoint, on the coordinator; a `testbed.messaging.supervision.RecoveryPolicy`.

    The device exposes the weights of the last checkpoint.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        configure: MakeConfigure,
        plan_stages: PlanStages,
        units: int,
        weights: State | None,
    ) -> None:
        """``units`` is the number of the model's units, ``weights`` the initial weights; None for weights of the seed.

        Each device with a stage receives the message that ``configure`` makes.
        """
        self.checkpoint = Checkpoint(0, weights)
        self._mailbox = supervisor.mailbox
        self._device = supervisor.mailbox.device
        self._supervisor = supervisor
        self._members = supervisor.membership
        self._configure = configure
        self._plan_stages = plan_stages
        self._collector = Collector(units)
        self._device.expose(self.weights)
        self._mailbox.on(UnitState, self._collect_unit)
        self._mailbox.on_open(self._collector.clear)

    def weights(self) -> State:
        """Return the weights of the last checkpoint; empty before the first one."""
        return result_of(self.checkpoint.state or {})

    def _collect_unit(self, message: UnitState) -> None:
        checkpoint = self._collector.add(message.step, message.unit, message.state)
        if checkpoint is not None:
            self.checkpoint = checkpoint

    async def establish(self) -> None:
        """Configure every stage from the last checkpoint, and wait until all are ready."""
        self._supervisor.begin()
        for stage in self._supervisor.layout:
            configure = self._configure(stage, self.checkpoint.state)
            self._mailbox.post(stage.device, configure)
        await self._supervisor.ready()

    async def recover(self, lost: Lost, start: int) -> None:
        """Wait for lost devices to return; assign stages to the present ones."""
        self._device.record(
            "recovery", phase="detected", step=start, missing=lost.missing
        )
        # Copied: the answers to the new configuration change them.
        incarnations = dict(self._members.assigned_incarnations)
        seconds = self._supervisor.timeouts.rejoin_timeout
        await self._gather_devices(self._members.assigned, seconds)
        self._supervisor.learn_stall_timeout(lost, incarnations)
        self._assign_stages()

    async def admit_joiners(self) -> None:
        """Admit new or returned devices at a checkpoint if more stages become possible. Raises `Lost`."""
        joiners = self._members.joiners
        if not joiners:
            return
        wanted = joiners | self._members.assigned
        try:
            possible_stages = self._plan_stages(wanted)
        except InputError:
            possible_stages = ()
        if len(possible_stages) <= len(self._supervisor.layout):
            # Forgotten, since the same devices would make no further stages at the next checkpoint either.
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
            self._supervisor.watch(self._plan_stages(present))
        except InputError as error:
            raise TestbedError(f"not enough devices: {error.text}") from error
        # Devices beyond the last stage stand by.
        members.joiners = present - members.assigned
