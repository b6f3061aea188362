"""The program of a device with data, which trains a round on its own samples whenever the server requests one.

`Client` receives the requests and sends the results, `LocalTraining` trains a round, and hooks of a method define how:
`TrainLocal` does the training of a `LocalRound`, and `Sent` computes the message to the server. Methods without a
server use `LocalTraining` alone.
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
    """One round of a device: the argument of the hook `TrainLocal`, which may also fill ``own`` and ``sends``."""

    number: int
    """Number of the round, from 0."""
    steps: range
    """Iterations of the round, counted through all rounds."""
    layers: Layers
    """The device's layers; before the training their weights are those of ``start``."""
    share: LocalDataset
    """The device's samples."""
    start: State
    """Weights and running statistics at the beginning of the round, by name."""
    device: str
    """The device's name."""
    devices: int
    """Number of all devices with data, whether or not they participate in this round."""
    rate: float
    """Learning rate of the round's first iteration."""
    extra: State = field(default_factory=dict)
    """Tensors sent by the server beside the weights; see `Hooks.extra`."""
    own: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that the device keeps between rounds, by any names; saved to the disk before the update is sent."""
    sends: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors to send with the update, by any names; the server's hook `Merge` finds them in `Trained.extra`."""

    async def gradients(self, step: int) -> float:
        """Do forward and backward with all samples of an iteration; return the mean loss of the samples."""
        mini_batches = self.share.iteration(
            step, needs_values=self.layers.computes_values
        )
        # A device that trains the whole model has a single mini-batch in each iteration.
        ((images, labels),) = mini_batches
        micro = 0
        samples = len(labels)
        total_weight = self.layers.training.weight(labels)
        loss = await self.layers.forward_loss(
            step, micro, images, labels, samples, total_weight
        )
        await self.layers.backward(step, micro, samples)
        return loss


TrainLocal = Callable[[LocalRound], Awaitable[float | None]]
"""Hook: trains the layers of a device for a round; returns the mean loss, or None if the server computes the loss."""
Sent = Callable[[State, State], State]
"""Hook: takes initial and trained weights of a round; returns the tensors to send to the server."""


async def train_whole(local: LocalRound, change: Adjust | None = None) -> float:
    """Take an optimizer step in every iteration on the whole model, and return the mean loss of the iterations.

    ``change`` modifies the gradients before each step.
    """
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
    """A hook `Sent` for messages with a lossy codec: sends changes of weights, with error feedback.

    The codec rounds or drops a part of each change. This error is added to the change of the next round, so that it
    reaches the server later. Integers, such as the number of batches seen, are sent unchanged.
    """

    def __init__(self, sent: Sent, codec: Codec) -> None:
        """``sent`` is the method's own hook; `send_weights` is replaced by the difference of weights."""
        self._compute_changes = sent
        if sent is send_weights:
            self._compute_changes = send_difference
        self._codec = codec
        self._errors: dict[str, torch.Tensor] = {}
        """The part of each tensor's changes that the server has not received yet."""

    def __call__(self, start: State, trained: State) -> State:
        """Return the changes as the server will decode them."""
        changes = dict(self._compute_changes(start, trained))
        for name, change in changes.items():
            # Timing-only runs have no values that could be lost.
            if change.is_floating_point() and not change.is_meta:
                corrected = change + self._errors.get(name, 0)
                packed = self._codec.pack(corrected)
                changes[name] = self._codec.unpack(packed)
                self._errors[name] = corrected - changes[name]
        return changes


def with_server(mailbox: Mailbox, server: str) -> TrainLocal:
    """Return the hook for a device training the first layers while the server trains the remaining layers.

    Algorithm 1 of PipeLearn, lines 4 to 13: forward all mini-batches of an iteration, then do each backward once the
    gradient of the mini-batch has arrived, then update. The server computes the loss.
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
    total_weight: float = 0
    for _, labels in mini_batches:
        samples += len(labels)
        total_weight += layers.training.weight(labels)
    begin = 0
    for micro, (images, labels) in enumerate(mini_batches):
        outputs = await layers.forward(step, micro, images, samples, begin=begin)
        begin += len(labels)
        activation = DeviceActivation(
            configuration=mailbox.configuration,
            iteration=step,
            micro=micro,
            samples=samples,
            tensor=outputs,
            labels=labels,
            # Usually each sample counts as one, and the message is shorter without the field.
            whole=None if total_weight == samples else total_weight,
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
    """The training of a device's layers on the device's samples, one round at a time, by the hooks of a method."""

    share: LocalDataset
    length: RoundLength
    layers: Layers
    train_local: TrainLocal = train_whole
    sent: Sent = send_weights
    devices: int = 1
    """Number of devices with data."""
    stack: Stack | None = None
    """Computes this training together with the trainings of other devices; ``layers`` then compute no values."""

    def steps(self, number: int) -> range:
        """Return the iterations of a round, counted through all rounds."""
        return self.length.iterations(number, self.share.per_epoch)

    def samples(self, number: int) -> int:
        """Return the number of samples a round trains on."""
        counts = [self.share.count(step) for step in self.steps(number)]
        return sum(counts)

    async def train(self, number: int, start: State) -> tuple[float | None, State]:
        """Train a round from the weights ``start``; return the mean loss and the tensors to send.

        For methods without a server, which exchange no tensors beside the weights.
        """
        loss, sent, _ = await self.train_round(number, start, extra={}, own={})
        return loss, sent

    async def train_round(
        self, number: int, start: State, extra: State, own: State
    ) -> tuple[float | None, State, LocalRound]:
        """Train a round from the weights ``start``; ``extra`` and ``own`` are fields of `LocalRound`.

        Returns the mean loss, the tensors to send, and the `LocalRound` after the training, whose ``own`` and ``sends``
        the hook may have changed.
        """
        steps = self.steps(number)
        layers = self.layers
        stacked_training = None
        if self.stack is not None:
            # Registered before any computation, so that trainings of other devices can be computed with this one.
            stacked_training = self.stack.begin(self.share, steps, start)
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
        if stacked_training is not None:
            loss, trained = stacked_training.finish()
        return loss, self.sent(start, trained), local


OWN = "own"
"""Key of `LocalRound.own` on a device's disk."""


class Client:
    """The program of a device: receives the server's requests, trains, and sends the results.

    A restarted device runs a new client. Of earlier rounds only `LocalRound.own` remains, which is on the disk.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        server: str,
        training: LocalTraining,
        *,
        is_alone: bool = True,
    ) -> None:
        """Register the handlers of messages.

        ``is_alone`` is whether a device trains without the server between the beginning and the end of a round.
        """
        self._mailbox = mailbox
        self._server = server
        self._training = training
        self._is_alone = is_alone
        self._incarnation = mailbox.device.now()
        """Start of this program, in seconds."""
        self._round: asyncio.Task[None] | None = None
        """The training of the newest round."""
        mailbox.on(Begin, self._begin_round)
        mailbox.on(Ping, self._answer_ping)

    async def serve(self) -> None:
        """Greet the server, and train at each request for a round, until the program is cancelled."""
        self._mailbox.post(self._server, Hello(self._incarnation))
        # The handlers of messages work in the background, so this future never gets a result.
        await asyncio.get_running_loop().create_future()

    def _begin_round(self, begin: Begin) -> None:
        """Start a round, and cancel the previous one if still running."""
        self._mailbox.open(begin.configuration)
        # The server has ended the earlier round, or attempt at this round, and would ignore its update.
        if self._round is not None:
            self._round.cancel()
        self._round = self._mailbox.start(self._train_and_send(begin))

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
        # The disk has nothing in the first round, and for methods without state on devices.
        saved = device.saved(OWN)
        own: State = {} if saved is None else saved.tensors
        start, extra = split_extra(begin.state)
        loss, weights, local = await training.train_round(
            begin.round, start, extra, own
        )
        if local.own:
            # Saved before the update is sent: after the update the server relies on this state, even after a crash.
            await device.save(OWN, Message(OWN, {}, local.own))
        update = Update(
            configuration=begin.configuration,
            samples=training.samples(begin.round),
            loss=loss,
            state=with_extra(weights, local.sends),
        )
        self._mailbox.post(self._server, update)

    def _answer_ping(self, ping: Ping) -> None:
        self._mailbox.start(self._report_idle(ping.sender))

    async def _report_idle(self, server: str) -> None:
        """Answer a ping once the device is idle, since a busy device would miss the next round as well."""
        unfinished = self._round
        if unfinished is not None and not unfinished.done():
            if self._is_alone:
                await asyncio.wait([unfinished])
            else:
                # The server has ended the round, and the device would wait forever for gradients. The current
                # computation cannot be cancelled; an empty computation queues behind it, and ends when it has ended.
                unfinished.cancel()
                no_cost = Cost()
                await self._mailbox.device.compute(lambda: None, no_cost, Span("idle"))
        self._mailbox.post(server, Here())
