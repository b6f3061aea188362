"""The program of a device with data: train a round on its own samples whenever the server requests one.

`LocalTraining` trains a round; `Client` receives the requests and sends the results. Methods without a server use
`LocalTraining` alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from testbed.device import Cost, Span
from testbed.messaging.mailbox import Mailbox
from testbed.messaging.membership import Hello
from testbed.ml.layers.shard import Adjust, State
from testbed.ml.lazy import torch
from testbed.ml.rounds.layers import Layers, LocalDataset
from testbed.ml.rounds.messages import (
    ActivationGradient,
    Begin,
    Begun,
    DeviceActivation,
    Here,
    Norms,
    Ping,
    Update,
    split_extra,
    with_extra,
)
from testbed.ml.rounds.options import RoundLength
from testbed.ml.rounds.stacked import Stack
from testbed.ml.transfer import Codec
from testbed.wire.message import Message


@dataclass(frozen=True)
class LocalRound:
    """The arguments of a device's training in a round."""

    number: int
    """Number of the round, from 0."""
    steps: range
    """Iterations of the round, counted through all rounds."""
    layers: Layers
    """The device's layers, with the weights of ``start``."""
    share: LocalDataset
    """The device's samples."""
    start: State
    """Weights and running statistics at the beginning of the round, by name."""
    device: str
    """The device's name."""
    devices: int
    """Number of devices with data, in this round or not."""
    rate: float
    """Learning rate of the round's first iteration."""
    extra: State = field(default_factory=dict)
    """Tensors sent by the server beside the weights; see `Hooks.extra`."""
    own: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors the device keeps between rounds, by any names; saved to the disk before the update is sent."""
    sends: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors sent beside the update, by any names, available to the server's `merge` as `Trained.extra`."""

    async def gradients(self, step: int) -> float:
        """Do forward and backward with all samples of an iteration; return the mean loss of the samples."""
        mini_batches = self.share.iteration(
            step, needs_values=self.layers.computes_values
        )
        # A device that trains the whole model has one mini-batch of an iteration, number 0.
        ((images, labels),) = mini_batches
        samples = len(labels)
        whole = self.layers.training.weight(labels)
        loss = await self.layers.forward_loss(step, 0, images, labels, samples, whole)
        await self.layers.backward(step, 0, samples)
        return loss


TrainLocal = Callable[[LocalRound], Awaitable[float | None]]
"""Hook: trains the layers of a device for a round; returns the mean loss, None where the server computes it."""
Sent = Callable[[State, State], State]
"""Hook: takes initial and trained weights of a round; returns the tensors to send to the server."""


async def train_whole(local: LocalRound, change: Adjust | None = None) -> float:
    """Take a step in every iteration on the whole model; ``change`` alters the gradients before each step."""
    losses = []
    for step in local.steps:
        losses.append(await local.gradients(step))
        if change is not None:
            await local.layers.adjust(step, change)
        await local.layers.update(step)
    return sum(losses) / len(losses)


def send_weights(start: State, trained: State) -> State:
    """Send the trained weights unchanged."""
    return trained


def send_difference(start: State, trained: State) -> State:
    """Send the difference between trained and initial weights.

    >>> send_difference({"0.weight": torch.ones(2)}, {"0.weight": torch.tensor([1.5, 1.0])})
    {'0.weight': tensor([0.5000, 0.0000])}
    """
    differences = {}
    for name, tensor in trained.items():
        differences[name] = tensor - start[name]
    return differences


class Changes:
    """A hook around another hook `Sent`: sends weight changes as a codec transmits them.

    A codec that compresses drops a part of each change. The dropped part is added to the change of the next round
    (error feedback), so that it reaches the server later. If the other hook sends changes itself, these are used.
    Integers, such as the number of batches seen, are sent unchanged.
    """

    def __init__(self, sent: Sent, by: Codec) -> None:
        """``sent`` is the other hook, and ``by`` the codec of the messages."""
        self._send_changes = sent
        if sent is send_weights:
            self._send_changes = send_difference
        self._codec = by
        self._dropped: dict[str, torch.Tensor] = {}
        """The part of each change that the codec has dropped so far."""

    def __call__(self, start: State, trained: State) -> State:
        """Return the changes the server will add."""
        changes = dict(self._send_changes(start, trained))
        for name, change in changes.items():
            # Timing-only runs have no values to drop.
            if change.is_floating_point() and not change.is_meta:
                wanted = change + self._dropped.get(name, 0)
                packed = self._codec.pack(wanted)
                changes[name] = self._codec.unpack(packed)
                self._dropped[name] = wanted - changes[name]
        return changes


def with_server(mailbox: Mailbox, server: str) -> TrainLocal:
    """Return the training of a device that has the first layers, while the server has the rest.

    Algorithm 1 of PipeLearn, lines 4 to 13: forward all mini-batches of an iteration, then do each backward once the
    gradient of the mini-batch has arrived, then update.
    """

    async def train(local: LocalRound) -> None:
        for step in local.steps:
            await _train_iteration(local, step, mailbox, server)

    return train


async def _train_iteration(
    local: LocalRound, step: int, mailbox: Mailbox, server: str
) -> None:
    """Train an iteration together with the server."""
    layers = local.layers
    mini_batches = local.share.iteration(step, needs_values=layers.computes_values)
    samples = 0
    weight: float = 0
    for _, labels in mini_batches:
        samples += len(labels)
        weight += layers.training.weight(labels)
    # The message has no field for the usual case, in which each sample counts as one.
    whole = None if weight == samples else weight
    begin = 0
    for micro, (images, labels) in enumerate(mini_batches):
        outputs = await layers.forward(step, micro, images, samples, begin=begin)
        begin += len(labels)
        activation = DeviceActivation(
            mailbox.configuration, step, micro, samples, outputs, labels, whole
        )
        mailbox.post(server, activation)
    for micro, (_, labels) in enumerate(mini_batches):
        gradient = await mailbox.take(ActivationGradient, (step, micro))
        await layers.backward(step, micro, len(labels), gradient.tensor)
    norms = None
    if layers.clips_by_norm:
        own_norms = Norms(mailbox.configuration, step, layers.norms())
        mailbox.post(server, own_norms)
        all_norms = await mailbox.take(Norms, (server, step))
        norms = all_norms.tensor
    await layers.update(step, norms)


@dataclass(frozen=True)
class LocalTraining:
    """Trains a device's layers on its samples, one round at a time, from given weights."""

    share: LocalDataset
    length: RoundLength
    layers: Layers
    train_local: TrainLocal = train_whole
    sent: Sent = send_weights
    devices: int = 1
    """Number of devices with data."""
    stack: Stack | None = None
    """Computes this training together with those of other devices, while ``layers`` have no numbers."""

    def steps(self, number: int) -> range:
        """Return the iterations of a round, counted through all rounds."""
        return self.length.iterations(number, self.share.per_epoch)

    def samples(self, number: int) -> int:
        """Return the number of samples a round trains on."""
        counts = [self.share.count(step) for step in self.steps(number)]
        return sum(counts)

    async def train(self, number: int, start: State) -> tuple[float | None, State]:
        """Train a round from given weights; return the mean loss and the tensors to send for the new weights."""
        no_extra: State = {}
        no_own: State = {}
        loss, sent, _ = await self.train_round(number, start, no_extra, no_own)
        return loss, sent

    async def train_round(
        self, number: int, start: State, extra: State, own: State
    ) -> tuple[float | None, State, LocalRound]:
        """Train a round with the server's additional tensors and the device's own state, as in `LocalRound`.

        Returns the mean loss, the tensors to send, and the round with the state that its training has left.
        """
        steps = self.steps(number)
        layers = self.layers
        stacked = None
        if self.stack is not None:
            # Registered before any computation, so that trainings of other devices can be computed with this one.
            stacked = self.stack.begin(self.share, steps, start)
        await layers.load(start, number)
        local = LocalRound(
            number=number,
            steps=steps,
            layers=layers,
            share=self.share,
            start=start,
            device=layers.device_name,
            devices=self.devices,
            rate=layers.rate(steps.start),
            extra=extra,
            own=dict(own),
        )
        loss = await self.train_local(local)
        trained: State = layers.weights()
        if stacked is not None:
            loss, trained = stacked.finish()
        return loss, self.sent(start, trained), local


OWN = "own"
"""Name under which a device's disk keeps `LocalRound.own`."""


class Client:
    """Receives the server's requests, trains, and sends the results, on one device.

    A device that restarts runs a new client, which knows nothing of the rounds before.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        server: str,
        training: LocalTraining,
        *,
        is_alone: bool = True,
    ) -> None:
        """``is_alone``: a round needs the server at its beginning and end only, not in each iteration."""
        self._mailbox = mailbox
        self._server = server
        self._training = training
        self._alone = is_alone
        self._incarnation = mailbox.device.now()
        self._running: asyncio.Task[None] | None = None
        mailbox.on(Begin, self._begin_round)
        mailbox.on(Ping, self._answer_ping)

    async def serve(self) -> None:
        """Train whenever the server requests a round, until cancelled."""
        self._mailbox.post(self._server, Hello(self._incarnation))
        # Messages are handled in the background until the program is cancelled.
        await asyncio.get_running_loop().create_future()

    def _answer_ping(self, ping: Ping) -> None:
        self._mailbox.start(self._report_idle(ping.sender))

    async def _report_idle(self, server: str) -> None:
        """Answer once the device is idle: a device invited earlier would be late again."""
        running = self._running
        if running is not None and not running.done():
            if self._alone:
                await asyncio.wait([running])
            else:
                # The server has left the round, which therefore never ends. The computation of a layer cannot be
                # cancelled: an empty one behind it ends when the device is idle.
                running.cancel()
                nothing = Cost()
                await self._mailbox.device.compute(lambda: None, nothing, Span("idle"))
        self._mailbox.post(server, Here())

    def _begin_round(self, begin: Begin) -> None:
        """Start a round, cancelling a previous one still running."""
        self._mailbox.open(begin.configuration)
        # The server has left an earlier round, or attempt at this one, and would ignore its update.
        if self._running is not None:
            self._running.cancel()
        self._running = self._mailbox.start(self._train_and_send(begin))

    async def _train_and_send(self, begin: Begin) -> None:
        """Train the round of an invitation, and send the update."""
        device = self._mailbox.device
        training = self._training
        steps = training.steps(begin.round)
        begun = Begun(
            configuration=begin.configuration,
            incarnation=self._incarnation,
            first=steps.start,
            last=steps.stop,
        )
        self._mailbox.post(self._server, begun)
        # None in the first round, and for methods that keep nothing.
        saved = device.saved(OWN)
        own: State = {} if saved is None else saved.tensors
        start, extra = split_extra(begin.state)
        loss, weights, local = await training.train_round(
            begin.round, start, extra, own
        )
        if local.own:
            # Before the update is sent: a crash in between must not lose state that the server counts on.
            kept = Message(OWN, {}, local.own)
            await device.save(OWN, kept)
        update = Update(
            configuration=begin.configuration,
            samples=training.samples(begin.round),
            loss=loss,
            state=with_extra(weights, local.sends),
        )
        self._mailbox.post(self._server, update)
