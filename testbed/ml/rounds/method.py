"""Common parts and hooks of methods training one model in rounds on the data of several devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Generic

from typing_extensions import TypeVar

from testbed.device import Device
from testbed.messaging.mailbox import Mailbox
from testbed.ml.data.batches import left_out
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
    """The differences between methods training in rounds; the defaults are federated averaging.

    Example, Adam on the server instead of an average (scenarios/examples/fedadam.py)::

        Hooks(choose=options.choose, merge=adam, min_updates=options.min_devices)
    """

    choose: Choose = choose_all
    """Chooses the participants of a round."""
    train_local: TrainLocal = train_whole
    """Trains a device in a round."""
    sent: Sent = send_weights
    """Computes a device's message to the server."""
    merge: Merge = mean
    """Merges the devices' messages on the server."""
    extra: Extra = no_extra
    """Returns the tensors the server sends beside the weights."""
    min_updates: int = 1
    """Minimum number of updates in a round: a round waits for them beyond its deadline."""


O = TypeVar("O", bound=RoundOptions, default=GroupOptions)  # noqa: E741


class RoundMethod(Method[O, RoundDetails], ABC, Generic[O]):
    """A method in which a server, the first device, and devices with data train the whole model in rounds.

    Subclasses override `hooks`. Absent devices are left out of a round at its deadline, and participate again after
    their return. Momentum stays on the device.
    """

    Options: type[O] = GroupOptions  # type: ignore[assignment]  # the default of its type
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
        """Give each device the whole model. Raises `InputError` for insufficient memory or unsupported stacking."""
        if problem.workload.numerics == "stacked":
            hooks = self.hooks(problem.options)
            is_plain = hooks.train_local is train_whole
            stacked.check_support(problem, trains_plainly=is_plain)
        return planner.whole_plan(self.name, Participants(problem))

    def simulation_state(self, problem: PlanningProblem[O]) -> stacked.Stack | None:
        """Return the trainings the devices compute together."""
        if problem.workload.numerics != "stacked":
            return None
        return stacked.Stack(problem)

    def largest_messages(
        self, problem: PlanningProblem[O], plan: Plan[RoundDetails]
    ) -> Iterator[PlannedMessage]:
        """Return weights, updates and split activations as messages."""
        return planner.round_messages(problem, plan)

    async def program(
        self, device: Device, context: ProgramContext[O, RoundDetails]
    ) -> None:
        """Run the server on the first device, a client on the others."""
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
        """Run all rounds in the server's program."""
        await run_rounds(mailbox, context, self.hooks(context.problem.options))


class SplitMethod(RoundMethod[O], ABC, Generic[O]):
    """A `RoundMethod` with a split model: the first layers on the devices, the rest on the server.

    Updates on both sides equal those of the whole model, so the only hook is the choice of participants.
    """

    supports = RoundMethod.supports - {"stacked"}
    in_turn = False
    """Whether one device trains after the other, with one copy of the server's layers for all."""

    async def program(
        self, device: Device, context: ProgramContext[O, RoundDetails]
    ) -> None:
        """Run rounds on the first device, train the first layers on the others."""
        hooks = self.hooks(context.problem.options)
        server = context.plan.coordinator
        async with _open_mailbox(device, context) as mailbox:
            if device.name == server:
                await run_rounds(
                    mailbox, context, hooks, split=True, in_turn=self.in_turn
                )
            else:
                # The device has the first layers only, so it trains them together with the server.
                hooks = replace(hooks, train_local=with_server(mailbox, server))
                training = local_training(device, context, hooks)
                await Client(mailbox, server, training, is_alone=False).serve()


def _open_mailbox(device: Device, context: ProgramContext[O, RoundDetails]) -> Mailbox:
    """Return the mailbox of a device, whose messages are encoded as the options ask for."""
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
    """Return the local training that the plan gives a device with data."""
    problem = context.problem
    workload = problem.workload
    client = context.plan.details.clients[device.name]
    assert context.dataset is not None
    # Without a seed the samples keep their order.
    seed = problem.seed if workload.data.shuffle else None
    share = LocalDataset(
        context.dataset,
        workload.batch_size,
        client.parallel_batches,
        seed,
        drop_last=workload.drop_last,
    )
    # A stack computes the numbers of all devices; the device's own layers then take time alone.
    has_numbers = context.shared is None
    layers = Layers(device, problem, 0, client.split_point, computes_values=has_numbers)
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
    """Run the remaining rounds on the server.

    With ``split`` the server trains the layers behind each device's split point. ``in_turn``: one device trains after
    the other, with one copy of the server's layers for all.
    """
    problem = context.problem
    options = problem.options
    clients = context.plan.details.clients
    assert context.dataset is not None
    device = mailbox.device
    model = GlobalModel(device, context, hooks.merge, hooks.extra)
    splits = {}
    planned_seconds = {}
    for name, client in clients.items():
        splits[name] = client.split_point
        planned_seconds[name] = client.round_time
    side = None
    if split:
        copies = _server_layers(device, problem, splits, shared=in_turn)
        side = ServerSide(mailbox, copies)
    policy = RoundPolicy(
        # In turn, a late device is left out instead of waited for.
        min_updates=0 if in_turn else hooks.min_updates,
        deadline=options.round_deadline,
        choose=hooks.choose,
        planned=planned_seconds,
    )
    # Devices send changes when updates are encoded; a method that sends changes itself adds them in its merge.
    is_encoded = transfer_of(options).updates != "f32"
    server = Server(
        device,
        Rounds(mailbox, policy, problem.seed),
        model,
        splits,
        side,
        in_turn=in_turn,
        changes=is_encoded and hooks.sent is send_weights,
    )
    _record_unused_samples(device, context)
    await server.run()


def _server_layers(
    device: Device,
    problem: PlanningProblem,
    splits: Mapping[str, int],
    *,
    shared: bool,
) -> dict[str, Layers]:
    """Return the server's layers for each device; ``shared``: one copy for all devices with the same split point."""
    depth = len(problem.model.units)
    copies: dict[str, Layers] = {}
    newest_by_split: dict[int, Layers] = {}
    """The last copy made for a split point."""
    for name, first in splits.items():
        if not shared or first not in newest_by_split:
            newest_by_split[first] = Layers(device, problem, first, depth)
        copies[name] = newest_by_split[first]
    return copies


def _record_unused_samples(
    device: Device, context: ProgramContext[O, RoundDetails]
) -> None:
    """Record the devices with less than a batch, and the number of samples never used for training."""
    samples = context.problem.samples
    workload = context.problem.workload
    size = workload.batch_size
    small = []
    for name, count in samples.items():
        if count < size:
            small.append(name)
    if small:
        text = f"{', '.join(small)}: fewer samples than a batch of {size}, so a batch has all samples of the device"
        device.record("log", text=text)
    unused = 0
    for name, count in samples.items():
        parallel_batches = context.plan.details.clients[name].parallel_batches
        mini_batch = min(size, count) // parallel_batches
        iteration = mini_batch * parallel_batches
        unused += left_out(count, iteration, drop_last=workload.drop_last)
    record_left_out(device, unused, sum(samples.values()))
