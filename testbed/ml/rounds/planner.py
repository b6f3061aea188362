"""Plans of training in rounds: layers of each device, their memory, and the predicted time of a round.

`whole_plan` gives every device the whole model (federated learning). `split_plan` gives a device the first layers and
the server the remaining layers (split learning and PipeLearn). If the scenario does not set a split point, the planner
chooses the one with the shortest epoch, by the stage graph of `testbed.ml.rounds.estimate`.
"""

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
from testbed.ml.rounds.options import (
    RoundLength,
    RoundOptions,
    SplitPoints,
    transfer_of,
)
from testbed.ml.transfer import encoded_share
from testbed.network.link import Link
from testbed.plan import Assignment, Plan, PlanDetails


class ClientPlan(BaseModel):
    """The work of one device with data in a round.

    P, N and T(b_N) are PipeLearn's symbols: number of layers on the device, mini-batches of an iteration, and the time
    from the beginning of an iteration to the end of its last stage.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    split_point: int
    """P: the device trains the first P layers."""
    parallel_batches: int
    """N: number of mini-batches of an iteration."""
    iteration_time: float
    """Predicted seconds of an iteration: T(b_N) and the device's update."""
    exchange_time: float
    """Predicted seconds in which the device's layers travel to the server and back."""
    round_iterations: int
    """Number of iterations of a round."""
    epoch_iterations: float
    """Number of iterations of an epoch; a last iteration with fewer samples counts by its share of the samples."""

    @property
    def round_time(self) -> float:
        """Predicted seconds of a round."""
        return self.round_iterations * self.iteration_time + self.exchange_time


class RoundDetails(PlanDetails):
    """Plan details of training in rounds."""

    clients: dict[str, ClientPlan]
    """Device with data -> the device's work, in the order of the scenario's devices."""

    def part_of(self, device: str) -> Self:
        """Return the details with the work of one device alone, since a device needs no other's."""
        own = {}
        if device in self.clients:
            own[device] = self.clients[device]
        return self.model_copy(update={"clients": own})


@dataclass(frozen=True)
class Participants:
    """The roles of a scenario's devices: the server, if any, and the devices with data, with their profiles."""

    problem: PlanningProblem[RoundOptions]
    serverless: bool = False
    """Whether all devices have data and none is a server, as in gossip learning."""

    @property
    def server(self) -> DeviceSpec:
        """The first device of the scenario; in a serverless method, the device evaluating the weights."""
        return self.problem.devices[0]

    @property
    def devices(self) -> tuple[DeviceSpec, ...]:
        """Devices with data."""
        if self.serverless:
            return self.problem.devices
        return self.problem.devices[1:]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the devices with data."""
        return tuple(device.name for device in self.devices)

    @cached_property
    def length(self) -> RoundLength:
        """Length of a device's rounds and of the workload, in the workload's unit: epochs or iterations (steps)."""
        workload = self.problem.workload
        options = self.problem.options
        if workload.epochs is not None:
            local_epochs = options.local_epochs or 1
            return RoundLength(
                counts_epochs=True, per_round=local_epochs, total=workload.epochs
            )
        assert workload.steps is not None
        local_steps = options.local_steps or 1
        return RoundLength(
            counts_epochs=False, per_round=local_steps, total=workload.steps
        )

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
                "requires a workload with `steps`, not `epochs`",
                ("method", "local_steps"),
            )
        if workload.epochs is None and options.local_epochs is not None:
            raise InputError(
                "requires a workload with `epochs`, not `steps`",
                ("method", "local_epochs"),
            )

    def _check_links(self) -> None:
        """Raise `InputError` unless each device has a link to the server and back."""
        server = self.server.name
        for device in self.names:
            both_directions = ((device, server), (server, device))
            for sender, receiver in both_directions:
                if (sender, receiver) not in self.problem.links:
                    raise InputError(
                        f"no link leads from {sender} to {receiver}: each device needs one to the server and back; use "
                        "the topology star",
                        ("network", "topology"),
                    )

    def _check_serverless(self) -> None:
        """Raise `InputError` for options requiring a server."""
        # A float is an interval in seconds, which devices reach in different rounds.
        if isinstance(self.problem.options.evaluate_every, float):
            raise InputError(
                "devices report after the same rounds: give an integer",
                ("method", "evaluate_every"),
            )
        if self.problem.workload.training.ema:
            raise InputError(
                "a moving average needs a server with the weights of all devices: remove the key",
                ("training", "ema"),
            )

    def batch(self, device: DeviceSpec) -> int:
        """Return B, the number of samples in a device's batch; a device with fewer samples uses all samples at once."""
        own_samples = self.problem.samples[device.name]
        return min(self.problem.workload.batch_size, own_samples)

    def profile(self, device: DeviceSpec, concurrent_clients: int) -> PairProfile:
        """Return the profile of a device and the server while the server serves ``concurrent_clients`` devices."""
        problem = self.problem
        server = self.server
        # A processor serves one device at a time; further devices share the processors equally.
        clients_per_processor = max(1.0, concurrent_clients / server.processors)
        if self.serverless:
            # Devices exchange models while they train, which adds nothing to the time of a round. A link without a rate
            # takes no time.
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
        self, device: DeviceSpec, clients_per_processor: float = 1.0
    ) -> tuple[LayerTimes, ...]:
        """Return `layer_times` of a device, computed once for all devices with the same rates."""
        key = (device.rates, clients_per_processor)
        if key not in self._cached_times:
            self._cached_times[key] = layer_times(
                self.problem.model, self.problem.training, device, clients_per_processor
            )
        return self._cached_times[key]

    @cached_property
    def _cached_times(self) -> dict[Hashable, tuple[LayerTimes, ...]]:
        """Layer times by the arguments of `_layer_times`: of thousands of devices, most have the same rates."""
        return {}

    def numbers_of_option(
        self, key: Key, value: SplitPoints, lowest: int, highest: int
    ) -> dict[str, int]:
        """Return the number of each device by an option; empty for ``best``, if the planner chooses the numbers.

        ``key`` is the key of the option and ``value`` its value. Raises `InputError` for a number outside ``lowest`` to
        ``highest``, and for missing or unknown devices.
        """
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
    participants: Participants,
    device: DeviceSpec,
    profile: PairProfile,
    choice: Choice,
    iteration_time: float,
) -> ClientPlan:
    """Return the plan of a device for the ``choice`` of a split point and a number of mini-batches."""
    samples = participants.problem.samples[device.name]
    drop_last = participants.problem.workload.drop_last
    batch_size = participants.batch(device)
    mini_batches = choice.parallel_batches
    iterations_per_epoch = iterations(
        samples, batch_size, mini_batches, drop_last=drop_last
    )
    first_round = participants.length.iterations(0, iterations_per_epoch)
    epoch_iterations: float = iterations_per_epoch
    if not drop_last:
        # An iteration has floor(B/N) * N samples, which may be fewer than a batch.
        iteration_samples = mini_batch(batch_size, mini_batches) * mini_batches
        epoch_iterations = samples / iteration_samples
    return ClientPlan(
        split_point=choice.split_point,
        parallel_batches=mini_batches,
        iteration_time=iteration_time,
        exchange_time=profile.exchange_time(choice.split_point),
        round_iterations=len(first_round),
        epoch_iterations=epoch_iterations,
    )


def whole_plan(method: str, participants: Participants) -> Plan[RoundDetails]:
    """Return the plan with the whole model on each device and the server; raises `InputError` if impossible."""
    participants.check()
    clients = {}
    for device in participants.devices:
        # The server trains no layers, so no device keeps it busy during a round.
        profile = participants.profile(device, concurrent_clients=0)
        batch_size = participants.batch(device)
        # An epoch with the samples of one batch is one iteration.
        iteration_time = profile.local_training_time(
            samples=batch_size, batch_size=batch_size
        )
        all_layers = Choice(split_point=profile.depth)
        clients[device.name] = _plan_client(
            participants, device, profile, all_layers, iteration_time
        )
    return plan(method, participants, clients, copies={})


Choices = Callable[[PairProfile, int], Sequence[Choice]]
"""Function of a device's profile and batch size that returns the candidates for split point and mini-batches."""


def every_split(profile: PairProfile, batch_size: int) -> Sequence[Choice]:
    """Return every split point as a candidate, each with one mini-batch (N = 1)."""
    choices = []
    for split_point in range(1, profile.depth + 1):
        choices.append(Choice(split_point))
    return choices


@lru_cache(maxsize=256)
def _best_choice(
    choices: Choices,
    profile: PairProfile,
    samples: int,
    batch_size: int,
    split_points: tuple[int, ...],
    parallel_batches: int | None,
) -> Choice:
    """Return the choice of one device with the shortest epoch; cached because many devices have equal arguments.

    ``split_points`` are the allowed split points. ``parallel_batches`` is N; None if N is a part of the choice.
    """
    candidates = []
    if parallel_batches is not None:
        for split_point in split_points:
            candidates.append(Choice(split_point, parallel_batches))
    else:
        for choice in choices(profile, batch_size):
            if choice.split_point in split_points:
                candidates.append(choice)
    return shortest_epoch(profile, samples, batch_size, candidates)


def split_plan(
    method: str,
    participants: Participants,
    split_points: SplitPoints,
    concurrent_clients: int,
    parallel_batches: SplitPoints = 1,
    choices: Choices = every_split,
) -> Plan[RoundDetails]:
    """Return the plan in which each device trains the first layers, and the server the remaining layers.

    ``split_points`` and ``parallel_batches`` are the values of these options. ``concurrent_clients`` devices train
    together; one means that the devices train in turn. ``choices`` returns the candidates for a device if one of the
    options is ``best``. Raises `InputError` for a number out of range, or a device with insufficient memory.
    """
    participants.check()
    samples = participants.problem.samples
    depth = len(participants.problem.model.units)
    batch_sizes = [participants.batch(device) for device in participants.devices]
    fixed_split_points = participants.numbers_of_option(
        ("method", "split_point"), split_points, lowest=1, highest=depth
    )
    # Each mini-batch needs a sample, also on the device with the smallest batch.
    fixed_parallel_batches = participants.numbers_of_option(
        ("method", "parallel_batches"),
        parallel_batches,
        lowest=1,
        highest=min(batch_sizes),
    )
    clients = {}
    for device, batch_size in zip(participants.devices, batch_sizes, strict=True):
        name = device.name
        profile = participants.profile(device, concurrent_clients)
        allowed_split_points = tuple(range(1, depth + 1))
        if fixed_split_points:
            allowed_split_points = (fixed_split_points[name],)
        choice = _best_choice(
            choices,
            profile,
            samples[name],
            batch_size,
            allowed_split_points,
            fixed_parallel_batches.get(name),
        )
        iteration_time = profile.iteration_time(choice, batch_size)
        clients[name] = _plan_client(
            participants, device, profile, choice, iteration_time
        )
    copies = {name: client.split_point for name, client in clients.items()}
    in_turn = concurrent_clients == 1
    return plan(method, participants, clients, copies, in_turn=in_turn)


def plan(
    method: str,
    participants: Participants,
    clients: Mapping[str, ClientPlan],
    copies: Mapping[str, int],
    *,
    in_turn: bool = False,
) -> Plan[RoundDetails]:
    """Return the plan for these clients; raises `InputError` for a device with insufficient memory.

    ``copies`` has, for each device, the first unit that the server trains for the device; it is empty if the server
    trains no layers. If devices train ``in_turn``, all devices with the same split point use one copy of these layers.
    """
    problem = participants.problem
    server = participants.server
    assignments = [
        _evaluation_assignment(problem, server),
        *_device_assignments(participants, clients),
        *_server_assignments(participants, clients, copies, in_turn=in_turn),
    ]
    # A step of the global model is a round.
    round_times = [client.round_time for client in clients.values()]
    if in_turn:
        # The server merges the model of each device before the next device begins.
        averaging = aggregation_time(problem.model, server, 1)
        step_time = sum(time + averaging for time in round_times)
    else:
        averaging = aggregation_time(problem.model, server, len(round_times))
        step_time = max(round_times) + averaging
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


def _evaluation_assignment(
    problem: PlanningProblem[RoundOptions], server: DeviceSpec
) -> Assignment:
    """Return the assignment of the whole model to the server for evaluation."""
    depth = len(problem.model.units)
    memory = inference_bytes(
        problem.model,
        range(depth),
        problem.workload.batch_size,
        server.precision,
    )
    return Assignment(device=server.name, start=0, stop=depth, memory=memory)


def _device_assignments(
    participants: Participants, clients: Mapping[str, ClientPlan]
) -> list[Assignment]:
    """Return the assignments of each device's layers, up to the device's split point."""
    assignments = []
    for device in participants.devices:
        split_point = clients[device.name].split_point
        # A device keeps the activations of all mini-batches, since it does all forwards before its backwards.
        samples = participants.batch(device)
        memory = _training_memory(
            participants.problem, device, range(split_point), samples
        )
        assignments.append(
            Assignment(device=device.name, start=0, stop=split_point, memory=memory)
        )
    return assignments


def _server_assignments(
    participants: Participants,
    clients: Mapping[str, ClientPlan],
    copies: Mapping[str, int],
    *,
    in_turn: bool,
) -> list[Assignment]:
    """Return the assignments of the server's layers: one for each copy."""
    problem = participants.problem
    server = participants.server
    depth = len(problem.model.units)
    assignments = []
    for names, start in _server_copies(copies, in_turn=in_turn):
        # The server does the backward of each mini-batch right after the forward, so it keeps the activations of one
        # mini-batch at a time.
        sizes = []
        for name in names:
            batch_size = participants.batch(problem.device(name))
            sizes.append(batch_size // clients[name].parallel_batches)
        units = range(start, depth)
        memory = _training_memory(problem, server, units, max(sizes))
        assignments.append(
            Assignment(
                device=server.name,
                start=start,
                stop=depth,
                memory=memory,
                copy_for=None if in_turn else names[0],
            )
        )
    return assignments


def _training_memory(
    problem: PlanningProblem[RoundOptions],
    device: DeviceSpec,
    units: range,
    samples: int,
) -> float:
    """Return the bytes needed by a device to train some units with ``samples`` samples in flight."""
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
    """Return, for each copy of the server's layers, the devices using the copy, and the copy's first unit."""
    if not in_turn:
        return [([name], start) for name, start in copies.items()]
    names_by_start: dict[int, list[str]] = {}
    for name, start in copies.items():
        names_by_start.setdefault(start, []).append(name)
    return [(names, start) for start, names in names_by_start.items()]


def round_messages(
    problem: PlanningProblem[RoundOptions], plan: Plan[RoundDetails]
) -> Iterator[PlannedMessage]:
    """Yield sender, receiver and bytes of the largest messages between the server and each device with data."""
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
