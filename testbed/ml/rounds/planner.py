"""Plans of training in rounds: layers of each device, their demands, and the expected time of a round."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Self

from pydantic import BaseModel, ConfigDict

from testbed.common.errors import InputError, Key
from testbed.hardware import DeviceSpec
from testbed.ml.layers import costs
from testbed.ml.method import PlannedMessage, PlanningProblem
from testbed.ml.partition.memory import inference_bytes, training_bytes
from testbed.ml.rounds.estimate import (
    Choice,
    LayerTimes,
    PairProfile,
    aggregation_time,
    iterations,
    layer_times,
    make_profile,
    mini_batch,
    shortest_epoch,
)
from testbed.ml.rounds.options import Length, RoundOptions, SplitPoints, transfer_of
from testbed.ml.transfer import encoded_share
from testbed.network.link import Link
from testbed.plan import Assignment, Plan, PlanDetails


class ClientPlan(BaseModel):
    """The work of one device with data in a round. P, N and T(b_N) are PipeLearn's symbols."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    split_point: int
    """P: the device trains the first P layers."""
    parallel_batches: int
    """N: mini-batches of an iteration."""
    iteration_time: float
    """Predicted seconds of an iteration: T(b_N) and the update."""
    exchange_time: float
    """Predicted seconds in which the device's layers travel to the server and back."""
    round_iterations: int
    """Iterations of a round."""
    epoch_iterations: float
    """Iterations of an epoch; a smaller last one counts as its share of one."""

    @property
    def round_time(self) -> float:
        """Predicted seconds of a round."""
        return self.round_iterations * self.iteration_time + self.exchange_time


class RoundDetails(PlanDetails):
    """Plan details of training in rounds."""

    clients: dict[str, ClientPlan]
    """Device with data -> its work, in the order of the scenario's devices."""

    def part_of(self, device: str) -> Self:
        """Return the plan with the device's own work alone."""
        own = {}
        if device in self.clients:
            own[device] = self.clients[device]
        return self.model_copy(update={"clients": own})


@dataclass(frozen=True)
class Participants:
    """The server, if any, the devices with data, and their profiles."""

    problem: PlanningProblem[RoundOptions]
    serverless: bool = False
    """Whether all devices have data, and none is a server."""

    @property
    def server(self) -> DeviceSpec:
        """The first device of the scenario; without a server, the evaluating device."""
        return self.problem.devices[0]

    @property
    def devices(self) -> tuple[DeviceSpec, ...]:
        """Devices with data."""
        return self.problem.devices if self.serverless else self.problem.devices[1:]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the devices with data."""
        return tuple(device.name for device in self.devices)

    @cached_property
    def length(self) -> Length:
        """Length of a device's rounds and of the workload."""
        workload = self.problem.workload
        options = self.problem.options
        if workload.epochs is not None:
            local_epochs = options.local_epochs or 1
            return Length(epochs=True, each=local_epochs, total=workload.epochs)
        assert workload.steps is not None
        local_steps = options.local_steps or 1
        return Length(epochs=False, each=local_steps, total=workload.steps)

    def check(self) -> None:
        """Raise `InputError` for unsuitable devices, links or options."""
        options = self.problem.options
        workload = self.problem.workload
        if not self.devices:
            raise InputError(
                "needs a server, which is the first device, and other devices with data",
                ("devices",),
            )
        if self.serverless:
            self._check_serverless()
        else:
            self._check_links()
        if workload.epochs is not None and options.local_steps is not None:
            raise InputError(
                "goes with a workload in `steps`, not in `epochs`",
                ("method", "local_steps"),
            )
        if workload.epochs is None and options.local_epochs is not None:
            raise InputError(
                "goes with a workload in `epochs`, not in `steps`",
                ("method", "local_epochs"),
            )

    def _check_links(self) -> None:
        server = self.server.name
        for device in self.names:
            for source, target in ((device, server), (server, device)):
                if (source, target) not in self.problem.links:
                    raise InputError(
                        f"no link leads from {source} to {target}: each device needs one to the server and back; use "
                        "the topology star",
                        ("network", "topology"),
                    )

    def _check_serverless(self) -> None:
        if isinstance(self.problem.options.evaluate_every, float):
            raise InputError(
                "devices report after the same rounds: give an integer",
                ("method", "evaluate_every"),
            )
        if self.problem.workload.training.ema:
            raise InputError(
                "no device has the weights of all devices: remove the key",
                ("training", "ema"),
            )

    def batch(self, device: DeviceSpec) -> int:
        """Return the approximate samples of an iteration: a device with fewer than a batch uses all of its samples."""
        return min(self.problem.workload.batch_size, self.problem.samples[device.name])

    def profile(self, device: DeviceSpec, concurrent_clients: int) -> PairProfile:
        """Return the profile of a device and the server, with ``concurrent_clients`` devices keeping the
        server busy.
        """
        problem = self.problem
        server = self.server
        # A processor serves one device at a time; further devices share the processors equally.
        clients_per_processor = max(1.0, concurrent_clients / server.processors)
        if self.serverless:
            # Models travel to any device while training continues, which takes none of a round's time.
            up = Link()
            down = Link()
        else:
            up = problem.links[device.name, server.name]
            down = problem.links[server.name, device.name]
        return make_profile(
            problem.model,
            self._layer_times(device),
            self._layer_times(server, clients_per_processor),
            up,
            down,
            transfer_of(problem.options),
            frozen_travels=problem.training.frozen_travels,
        )

    def _layer_times(
        self, device: DeviceSpec, concurrent_clients: float = 1.0
    ) -> tuple[LayerTimes, ...]:
        key = (device.rates, concurrent_clients)
        if key not in self._known_times:
            self._known_times[key] = layer_times(
                self.problem.model, self.problem.training, device, concurrent_clients
            )
        return self._known_times[key]

    @cached_property
    def _known_times(self) -> dict[Hashable, tuple[LayerTimes, ...]]:
        """Cached layer times by device rates: most of thousands of devices are alike."""
        return {}

    def given_numbers(
        self, key: Key, value: SplitPoints, lowest: int, highest: int
    ) -> dict[str, int]:
        """Return a number given by device, empty if it is to be optimised; raises `InputError` outside the bounds."""
        names = self.names
        if value == "best":
            return {}
        if isinstance(value, dict):
            if sorted(value) != sorted(names):
                raise InputError(
                    f"name each of the devices {', '.join(names)}, and no other", key
                )
            numbers = value
        else:
            assert isinstance(value, int)
            numbers = dict.fromkeys(names, value)
        for number in numbers.values():
            if not lowest <= number <= highest:
                raise InputError(
                    f"{number} is out of range: use {lowest} to {highest}", key
                )
        return numbers


def _plan_client(
    team: Participants,
    device: DeviceSpec,
    profile: PairProfile,
    choice: Choice,
    iteration_time: float,
) -> ClientPlan:
    samples = team.problem.samples[device.name]
    drop_last = team.problem.workload.drop_last
    batch = team.batch(device)
    per_epoch = iterations(samples, batch, choice.parallel_batches, drop_last=drop_last)
    # floor(B/N) * N: an iteration may have fewer samples than a batch.
    size = mini_batch(batch, choice.parallel_batches) * choice.parallel_batches
    return ClientPlan(
        split_point=choice.split_point,
        parallel_batches=choice.parallel_batches,
        iteration_time=iteration_time,
        exchange_time=profile.exchange_time(choice.split_point),
        round_iterations=len(team.length.iterations(0, per_epoch)),
        epoch_iterations=per_epoch if drop_last else samples / size,
    )


def whole_plan(method: str, team: Participants) -> Plan[RoundDetails]:
    """Return the plan with the whole model on each device and the server; raises `InputError` if impossible."""
    team.check()
    clients = {}
    for device in team.devices:
        profile = team.profile(device, concurrent_clients=0)
        batch = team.batch(device)
        # An epoch of one batch is one iteration.
        iteration_time = profile.local_training_time(batch, batch)
        everything = Choice(profile.depth)
        clients[device.name] = _plan_client(
            team, device, profile, everything, iteration_time
        )
    return plan(method, team, clients, {})


Choices = Callable[[PairProfile, int], Sequence[Choice]]
"""Takes the profile of a device and its batch size; returns the split points and mini-batches that it may have."""


def every_split(profile: PairProfile, batch_size: int) -> Sequence[Choice]:
    """Return each split point, with whole batches."""
    return [Choice(split) for split in range(1, profile.depth + 1)]


@lru_cache(maxsize=256)
def _best_choice(
    choices: Choices,
    profile: PairProfile,
    samples: int,
    batch: int,
    allowed: tuple[int, ...],
    parallel_batches: int | None,
) -> Choice:
    """Return one device's choice, cached because many devices are alike."""
    candidates = []
    if parallel_batches is not None:
        for split in allowed:
            candidates.append(Choice(split, parallel_batches))
    else:
        for choice in choices(profile, batch):
            if choice.split_point in allowed:
                candidates.append(choice)
    return shortest_epoch(profile, samples, batch, candidates)


def split_plan(
    method: str,
    team: Participants,
    split_points: SplitPoints,
    concurrent_clients: int,
    parallel_batches: SplitPoints = 1,
    choices: Choices = every_split,
) -> Plan[RoundDetails]:
    """Return the plan splitting the model between each device and the server.

    ``concurrent_clients`` devices train together. ``choices`` lists the candidates for a device whose split point or
    number of mini-batches is to be optimised. Raises `InputError` for a number out of range, or a device with
    insufficient memory.
    """
    team.check()
    depth = len(team.problem.model.units)
    smallest = min(team.batch(device) for device in team.devices)
    splits = team.given_numbers(("method", "split_point"), split_points, 1, depth)
    counts = team.given_numbers(
        ("method", "parallel_batches"), parallel_batches, 1, smallest
    )
    clients = {}
    for device in team.devices:
        name = device.name
        batch = team.batch(device)
        profile = team.profile(device, concurrent_clients)
        allowed = (splits[name],) if splits else tuple(range(1, depth + 1))
        choice = _best_choice(
            choices,
            profile,
            team.problem.samples[name],
            batch,
            allowed,
            counts.get(name),
        )
        iteration_time = profile.iteration_time(choice, batch)
        clients[name] = _plan_client(team, device, profile, choice, iteration_time)
    copies = {name: client.split_point for name, client in clients.items()}
    return plan(method, team, clients, copies, in_turn=concurrent_clients == 1)


def plan(
    method: str,
    team: Participants,
    clients: Mapping[str, ClientPlan],
    copies: Mapping[str, int],
    *,
    in_turn: bool = False,
) -> Plan[RoundDetails]:
    """Return the plan for these clients; raises `InputError` for a device with insufficient memory.

    ``copies``: devices for which the server trains layers of its own, and the first of them; if devices train
    ``in_turn``, one copy serves all with the same split point.
    """
    problem = team.problem
    server = team.server
    depth = len(problem.model.units)
    # The server evaluates the whole model, whatever it trains.
    memory = inference_bytes(
        problem.model, range(depth), problem.workload.batch_size, server.precision
    )
    assignments = [Assignment(device=server.name, start=0, stop=depth, memory=memory)]
    for device in team.devices:
        split = clients[device.name].split_point
        batch = team.batch(device)
        memory = _training_memory(problem, device, range(split), batch)
        assignments.append(
            Assignment(device=device.name, start=0, stop=split, memory=memory)
        )
    for names, first in _server_copies(copies, in_turn=in_turn):
        mini_batches = []
        for name in names:
            batch = team.batch(problem.device(name))
            mini_batches.append(batch // clients[name].parallel_batches)
        units = range(first, depth)
        assignments.append(
            Assignment(
                device=server.name,
                start=first,
                stop=depth,
                memory=_training_memory(problem, server, units, max(mini_batches)),
                copy_for=None if in_turn else names[0],
            )
        )
    times = [client.round_time for client in clients.values()]
    if in_turn:
        # The server adopts the model of one device after the other.
        averaging = aggregation_time(problem.model, server, 1)
        step_time = sum(time + averaging for time in times)
    else:
        averaging = aggregation_time(problem.model, server, len(times))
        step_time = max(times) + averaging
    result: Plan[RoundDetails] = Plan(
        method=method,
        coordinator=server.name,
        assignments=tuple(assignments),
        step_time=step_time,
        details=RoundDetails(clients=dict(clients)),
    )
    for device in problem.devices:
        costs.check_memory(device, result.memory(device.name))
    return result


def _training_memory(
    problem: PlanningProblem[RoundOptions],
    device: DeviceSpec,
    units: range,
    samples: int,
) -> float:
    """Return the bytes for training some units with this many samples at once."""
    return training_bytes(
        problem.model,
        units,
        samples,
        problem.training.state_values,
        precision=device.precision,
    )


def _server_copies(
    copies: Mapping[str, int], *, in_turn: bool
) -> list[tuple[list[str], int]]:
    """Return the devices using each copy of the server's layers, and the first unit of the copy."""
    if not in_turn:
        return [([name], first) for name, first in copies.items()]
    users: dict[int, list[str]] = {}
    for name, first in copies.items():
        users.setdefault(first, []).append(name)
    return [(names, first) for first, names in users.items()]


def round_messages(
    problem: PlanningProblem[RoundOptions], plan: Plan[RoundDetails]
) -> Iterator[PlannedMessage]:
    """Yield the largest messages between the server and each device with data."""
    model = problem.model
    encoding = transfer_of(problem.options)
    server = plan.coordinator
    for name, client in plan.details.clients.items():
        units = model.units[: client.split_point]
        state = costs.weight_bytes(units, problem.training)
        yield server, name, state * encoded_share(encoding.weights)
        yield name, server, state * encoded_share(encoding.updates)
        if client.split_point < len(model.units):
            samples = mini_batch(problem.workload.batch_size, client.parallel_batches)
            activations = samples * model.cut_bytes(client.split_point)
            yield name, server, activations * encoded_share(encoding.activations)
