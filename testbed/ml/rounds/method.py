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
from testbed.ml.method import Job, Method, PlannedMessage, Problem
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
from testbed.ml.rounds.figures import DECLARED
from testbed.ml.rounds.layers import Layers, LocalDataset
from testbed.ml.rounds.messages import KINDS
from testbed.ml.rounds.options import GroupOptions, RoundOptions, transfer_of
from testbed.ml.rounds.planner import Participants, RoundDetails
from testbed.ml.rounds.rounds import Choose, RoundPolicy, Rounds, everyone
from testbed.ml.rounds.server import (
    Extra,
    GlobalModel,
    Merge,
    Server,
    ServerSide,
    mean,
    no_extra,
)
from testbed.ml.transfer import TensorCodec, codec, codecs
from testbed.plan import Plan


@dataclass(frozen=True)
class Hooks:
    """The differences between methods training in rounds; the defaults are federated averaging."""

    choose: Choose = everyone
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
    """Minimum number of updates in a round."""


O = TypeVar("O", bound=RoundOptions, default=GroupOptions)  # noqa: E741


class RoundMethod(Method[O, RoundDetails], ABC, Generic[O]):
    """A server, which is the first device, and devices with data that train the whole model in rounds.

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
        """Return the hooks of this method."""

    def data_owners(self, problem: Problem[O]) -> tuple[str, ...]:
        """Return all devices except the first, the server."""
        return Participants(problem).names

    def plan(self, problem: Problem[O]) -> Plan[RoundDetails]:
        """Give each device the whole model. Raises `InputError` for insufficient memory or unsupported stacking."""
        if problem.workload.numerics == "stacked":
            stacked.check(
                problem, self.hooks(problem.options).train_local is train_whole
            )
        return planner.whole_plan(self.name, Participants(problem))

    def simulation_state(self, problem: Problem[O]) -> stacked.Stack | None:
        """Return the trainings the devices compute together."""
        return (
            stacked.Stack(problem) if problem.workload.numerics == "stacked" else None
        )

    def largest_messages(
        self, problem: Problem[O], plan: Plan[RoundDetails]
    ) -> Iterator[PlannedMessage]:
        """Return weights, updates and split activations as messages."""
        return planner.round_messages(problem, plan)

    async def program(self, device: Device, job: Job[O, RoundDetails]) -> None:
        """Run the server on the first device, a client on the others."""
        async with Mailbox(
            device, job.problem.links, KINDS, codecs=_message_codecs(job)
        ) as mailbox:
            if device.name == job.plan.lead:
                await self.serve(mailbox, job)
            else:
                training = local_training(device, job, self.hooks(job.problem.options))
                await Client(mailbox, job.plan.lead, training).serve()

    async def serve(self, mailbox: Mailbox, job: Job[O, RoundDetails]) -> None:
        """Run all rounds in the server's program."""
        await hold_rounds(mailbox, job, self.hooks(job.problem.options))


class SplitMethod(RoundMethod[O], ABC, Generic[O]):
    """A `RoundMethod` with a split model: the first layers on the devices, the rest on the server.

    Updates on both sides equal those of the whole model, so the only hook is the choice of participants.
    """

    supports = RoundMethod.supports - {"stacked"}
    in_turn = False
    """Whether one device trains after the other, with one copy of the server's layers for all."""

    async def program(self, device: Device, job: Job[O, RoundDetails]) -> None:
        """Run rounds on the first device, train the first layers on the others."""
        hooks, server = self.hooks(job.problem.options), job.plan.lead
        async with Mailbox(
            device, job.problem.links, KINDS, codecs=_message_codecs(job)
        ) as mailbox:
            if device.name == server:
                await hold_rounds(mailbox, job, hooks, split=True, in_turn=self.in_turn)
            else:
                training = local_training(
                    device,
                    job,
                    replace(hooks, train_local=with_server(mailbox, server)),
                )
                await Client(mailbox, server, training, alone=False).serve()


def _message_codecs(job: Job[O, RoundDetails]) -> dict[str, TensorCodec]:
    """Return the codecs of messages between devices and server."""
    how, codes = transfer_of(job.problem.options), job.problem.codes
    return codecs(
        codes,
        activation=how.activations,
        gradient=how.gradients,
        begin=how.weights,
        update=how.updates,
    )


def local_training(
    device: Device, job: Job[O, RoundDetails], hooks: Hooks = Hooks()
) -> LocalTraining:
    """Return the local training of a device with data, by its plan."""
    problem, mine = job.problem, job.plan.details.portions[device.name]
    assert job.dataset is not None
    seed = problem.seed if problem.workload.data.shuffle else None
    workload = problem.workload
    share = LocalDataset(
        job.dataset, workload.batch_size, mine.parallel, seed, workload.drop_last
    )
    layers = Layers(device, problem, 0, mine.split, numbers=job.shared is None)
    sent = hooks.sent
    if by := codec(transfer_of(problem.options).updates, problem.codes):
        sent = Changes(sent, by)
    length, devices = Participants(problem).length, len(problem.samples)
    return LocalTraining(
        share, length, layers, hooks.train_local, sent, devices, job.shared
    )


async def hold_rounds(
    mailbox: Mailbox,
    job: Job[O, RoundDetails],
    hooks: Hooks,
    split: bool = False,
    in_turn: bool = False,
) -> None:
    """Run the remaining rounds on the server; with ``split`` the server trains layers of its own.

    ``in_turn``: one device trains after the other, with one copy of the server's layers for all.
    """
    problem, clients = job.problem, job.plan.details.portions
    assert job.dataset is not None
    device, options = mailbox.device, problem.options
    model = GlobalModel(device, job, hooks.merge, hooks.extra)
    splits = {name: client.split for name, client in clients.items()}
    side = None
    if split:
        copies = _server_layers(device, problem, splits, shared=in_turn)
        side = ServerSide(mailbox, copies)
    planned = {name: client.round_time for name, client in clients.items()}
    policy = RoundPolicy(
        0 if in_turn else hooks.min_updates,
        options.round_deadline,
        hooks.choose,
        planned,
    )
    changes = hooks.sent is send_weights and transfer_of(options).updates != "f32"
    server = Server(
        device,
        Rounds(mailbox, policy, problem.seed),
        model,
        splits,
        side,
        in_turn,
        changes,
    )
    _record_unused_samples(device, job)
    await server.run()


def _server_layers(
    device: Device, problem: Problem, splits: Mapping[str, int], shared: bool
) -> dict[str, Layers]:
    """Return the server's layers for each device; ``shared``: one copy for all devices with the same split point."""
    depth = len(problem.model.units)
    if not shared:
        return {
            name: Layers(device, problem, first, depth)
            for name, first in splits.items()
        }
    made = {first: Layers(device, problem, first, depth) for first in splits.values()}
    return {name: made[first] for name, first in splits.items()}


def _record_unused_samples(device: Device, job: Job[O, RoundDetails]) -> None:
    """Record the devices with less than a batch, and the number of samples never used for training."""
    problem = job.problem
    size = problem.workload.batch_size
    small = [name for name, count in problem.samples.items() if count < size]
    if small:
        text = f"{', '.join(small)}: fewer samples than a batch of {size}, which is all of them there"
        device.record("log", text=text)
    rest = 0
    for name, count in problem.samples.items():
        parallel = job.plan.details.portions[name].parallel
        whole = min(size, count) // parallel * parallel
        rest += left_out(count, whole, problem.workload.drop_last)
    record_left_out(device, rest, sum(problem.samples.values()))
