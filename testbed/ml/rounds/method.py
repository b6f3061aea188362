"""Base classes of methods that train one model in rounds on the data of several devices.

`RoundMethod` is for devices that train the whole model, `SplitMethod` for devices that train its first layers while the
server trains the rest. Methods differ by their `Hooks`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Generic

from typing_extensions import TypeVar

from testbed.device import Device
from testbed.messaging.mailbox import Mailbox
from testbed.ml.data.batches import leftover_samples
from testbed.ml.layers.feed import record_left_out
from testbed.ml.method import Method, PlannedMessage, PlanningProblem, ProgramContext
from testbed.ml.rounds import planner, stacked
from testbed.ml.rounds.client import (
    Changes,
    Client,
    LocalTraining,
    Sent,
    TrainLocal,
    send_weights,
    train_whole,
    with_server,
)
from testbed.ml.rounds.layers import Layers, LocalDataset
from testbed.ml.rounds.messages import KINDS
from testbed.ml.rounds.metrics import DECLARED
from testbed.ml.rounds.options import GroupOptions, RoundOptions, transfer_of
from testbed.ml.rounds.planner import Participants, RoundDetails
from testbed.ml.rounds.rounds import Choose, RoundPolicy, Rounds, choose_all
from testbed.ml.rounds.server import (
    Extra,
    GlobalModel,
    Merge,
    Server,
    ServerSide,
    mean,
    no_extra,
)
from testbed.ml.transfer import make_codec, make_codecs
from testbed.plan import Plan


@dataclass(frozen=True)
class Hooks:
    """The functions by which methods training in rounds differ; the defaults are federated averaging.

    Example, Adam on the server instead of an average (scenarios/examples/fedadam.py)::

        Hooks(choose=options.choose, merge=adam, min_updates=options.min_devices)
    """

    choose: Choose = choose_all
    """Chooses the participants of a round."""
    train_local: TrainLocal = train_whole
    """Trains a device in a round."""
    sent: Sent = send_weights
    """Computes the tensors that a device sends to the server."""
    merge: Merge = mean
    """Merges the devices' results on the server."""
    extra: Extra = no_extra
    """Returns the tensors that the server sends beside the weights."""
    min_updates: int = 1
    """Minimum number of updates in a round; a round waits for them beyond its deadline."""


O = TypeVar("O", bound=RoundOptions, default=GroupOptions)  # noqa: E741


class RoundMethod(Method[O, RoundDetails], ABC, Generic[O]):
    """A method with rounds: devices with data train the whole model, and a server, the first device, merges the models.

    Subclasses override `hooks`. A round ends at its deadline without late devices, which participate again after their
    return. Momentum stays on the device.
    """

    Options: type[O] = GroupOptions  # type: ignore[assignment]  # the default of O
    Details = RoundDetails
    declared = DECLARED
    supports = frozenset(
        {
            "early_stopping",
            "fixed_units",
            "initial_weights",
            "precisions",
            "smaller_batches",
            "stacked",
            "timing_only",
        }
    )

    @abstractmethod
    def hooks(self, options: O) -> Hooks:
        """Return the method's hooks for the scenario's options."""

    def data_owners(self, problem: PlanningProblem[O]) -> tuple[str, ...]:
        """Return all devices except the first, the server."""
        return Participants(problem).names

    def plan(self, problem: PlanningProblem[O]) -> Plan[RoundDetails]:
        """Return the plan with the whole model on each device.

        Raises `InputError` for insufficient memory, or for ``numerics: stacked`` if the workload does not allow it.
        """
        if problem.workload.numerics == "stacked":
            hooks = self.hooks(problem.options)
            has_default_training = hooks.train_local is train_whole
            stacked.check_support(problem, has_default_training=has_default_training)
        return planner.whole_plan(self.name, Participants(problem))

    def simulation_state(self, problem: PlanningProblem[O]) -> stacked.Stack | None:
        """Return the object in which all devices of a simulation compute together, with ``numerics: stacked``."""
        if problem.workload.numerics != "stacked":
            return None
        return stacked.Stack(problem)

    def largest_messages(
        self, problem: PlanningProblem[O], plan: Plan[RoundDetails]
    ) -> Iterator[PlannedMessage]:
        """Return the messages with weights and updates, and with activations if the model is split."""
        return planner.round_messages(problem, plan)

    async def program(
        self, device: Device, context: ProgramContext[O, RoundDetails]
    ) -> None:
        """Run the server on the first device, and a client on all others."""
        server = context.plan.coordinator
        async with _open_mailbox(device, context) as mailbox:
            if device.name == server:
                await self.serve(mailbox, context)
            else:
                hooks = self.hooks(context.problem.options)
                training = local_training(device, context, hooks)
                await Client(mailbox, server, training).serve()

    async def serve(
        self, mailbox: Mailbox, context: ProgramContext[O, RoundDetails]
    ) -> None:
        """Run all rounds on the server."""
        await run_rounds(mailbox, context, self.hooks(context.problem.options))


class SplitMethod(RoundMethod[O], ABC, Generic[O]):
    """A `RoundMethod` with a split model: the first layers on the devices, the remaining layers on the server.

    The training equals that of the whole model on a device, so methods differ by their choice of participants only.
    """

    supports = RoundMethod.supports - {"stacked"}
    in_turn = False
    """Whether one device trains after the other, and all use one copy of the server's layers."""

    async def program(
        self, device: Device, context: ProgramContext[O, RoundDetails]
    ) -> None:
        """Run rounds and train the last layers on the first device, and train the first layers on all others."""
        hooks = self.hooks(context.problem.options)
        server = context.plan.coordinator
        async with _open_mailbox(device, context) as mailbox:
            if device.name == server:
                await run_rounds(
                    mailbox, context, hooks, split=True, in_turn=self.in_turn
                )
            else:
                # A device with the first layers only needs the server in each iteration.
                hooks = replace(hooks, train_local=with_server(mailbox, server))
                training = local_training(device, context, hooks)
                await Client(mailbox, server, training, is_alone=False).serve()


def _open_mailbox(device: Device, context: ProgramContext[O, RoundDetails]) -> Mailbox:
    """Return the mailbox of a device, with the encoding of each kind of message by the option ``transfer``."""
    encoding = transfer_of(context.problem.options)
    codecs = make_codecs(
        context.problem.codes,
        activation=encoding.activations,
        gradient=encoding.gradients,
        begin=encoding.weights,
        update=encoding.updates,
    )
    return Mailbox(device, context.problem.links, KINDS, codecs=codecs)


def local_training(
    device: Device,
    context: ProgramContext[O, RoundDetails],
    hooks: Hooks = Hooks(),
) -> LocalTraining:
    """Return the training of a device with data: samples, layers by the plan, and the method's hooks."""
    problem = context.problem
    workload = problem.workload
    client = context.plan.details.clients[device.name]
    assert context.dataset is not None
    # Without a seed the samples keep the order of the data set.
    seed = problem.seed if workload.data.shuffle else None
    share = LocalDataset(
        context.dataset,
        workload.batch_size,
        client.parallel_batches,
        seed,
        drop_last=workload.drop_last,
    )
    # A stack computes the values for all devices; the device's own layers then only take the device's time.
    computes_values = context.shared is None
    layers = Layers(
        device, problem, 0, client.split_point, computes_values=computes_values
    )
    sent = hooks.sent
    update_codec = make_codec(transfer_of(problem.options).updates, problem.codes)
    if update_codec is not None:
        sent = Changes(sent, update_codec)
    return LocalTraining(
        share,
        Participants(problem).length,
        layers,
        hooks.train_local,
        sent,
        devices=len(problem.samples),
        stack=context.shared,
    )


async def run_rounds(
    mailbox: Mailbox,
    context: ProgramContext[O, RoundDetails],
    hooks: Hooks,
    *,
    split: bool = False,
    in_turn: bool = False,
) -> None:
    """Run the rounds of the workload on the server, after a restart the remaining ones.

    With ``split`` the server trains the layers behind each device's split point. With ``in_turn`` one device trains
    after the other, and all use one copy of the server's layers.
    """
    problem = context.problem
    options = problem.options
    clients = context.plan.details.clients
    assert context.dataset is not None
    device = mailbox.device
    model = GlobalModel(device, context, hooks.merge, hooks.extra)
    split_points = {}
    planned_seconds = {}
    for name, client in clients.items():
        split_points[name] = client.split_point
        planned_seconds[name] = client.round_time
    server_side = None
    if split:
        copies = _server_layers(device, problem, split_points, is_shared=in_turn)
        server_side = ServerSide(mailbox, copies)
    policy = RoundPolicy(
        # A round in turn has one device at a time, which is skipped if it is late.
        min_updates=0 if in_turn else hooks.min_updates,
        deadline=options.round_deadline,
        choose=hooks.choose,
        planned=planned_seconds,
    )
    # With encoded updates devices send changes instead of weights (`Changes`). A method whose own hook sends changes
    # adds them in its hook `Merge`.
    is_encoded = transfer_of(options).updates != "f32"
    server = Server(
        device,
        Rounds(mailbox, policy, problem.seed),
        model,
        split_points,
        server_side,
        in_turn=in_turn,
        receives_changes=is_encoded and hooks.sent is send_weights,
    )
    _record_unused_samples(device, context)
    await server.run()


def _server_layers(
    device: Device,
    problem: PlanningProblem,
    split_points: Mapping[str, int],
    *,
    is_shared: bool,
) -> dict[str, Layers]:
    """Return the server's layers for each device.

    With ``is_shared`` all devices with the same split point have one copy.
    """
    depth = len(problem.model.units)
    copies: dict[str, Layers] = {}
    shared_copies: dict[int, Layers] = {}
    """A copy for each split point."""
    for name, split_point in split_points.items():
        if is_shared and split_point in shared_copies:
            copies[name] = shared_copies[split_point]
            continue
        copies[name] = Layers(device, problem, split_point, depth)
        shared_copies[split_point] = copies[name]
    return copies


def _record_unused_samples(
    device: Device, context: ProgramContext[O, RoundDetails]
) -> None:
    """Record the devices with fewer samples than a batch, and the number of samples left out by each epoch."""
    samples = context.problem.samples
    workload = context.problem.workload
    batch_size = workload.batch_size
    small_devices = []
    for name, count in samples.items():
        if count < batch_size:
            small_devices.append(name)
    if small_devices:
        names = ", ".join(small_devices)
        text = f"{names}: fewer samples than a batch of {batch_size}, so a batch has all samples of the device"
        device.record("log", text=text)
    unused = 0
    for name, count in samples.items():
        parallel_batches = context.plan.details.clients[name].parallel_batches
        # As in `LocalDataset`: an iteration has mini-batches of equal size.
        mini_batch = min(batch_size, count) // parallel_batches
        iteration_samples = mini_batch * parallel_batches
        unused += leftover_samples(
            count, iteration_samples, drop_last=workload.drop_last
        )
    record_left_out(device, unused, of=sum(samples.values()))
