"""A device's program: train a round whenever the server says so, on its own samples."""

from __future__ import annotations

import asyncio
from typing import Protocol

from testbed.kits.messaging.mailbox import Mailbox
from testbed.kits.messaging.membership import Hello
from testbed.kits.rounds.layers import Layers
from testbed.kits.rounds.messages import (
    ActivationGradient,
    Begin,
    Begun,
    DeviceActivation,
    Here,
    Ping,
    Update,
)
from testbed.kits.rounds.share import Length, Share


class LocalTraining(Protocol):
    """What a device does in an iteration."""

    async def iteration(self, step: int, share: Share) -> float | None:
        """Train on the mini-batches of an iteration; return the loss, None where the server computes it."""


class Alone:
    """The whole model: federated learning."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers

    async def iteration(self, step: int, share: Share) -> float | None:
        """Do forward, backward and update."""
        ((images, labels),) = share.iteration(step)
        loss = await self._layers.forward_loss(step, 0, images, labels, len(labels))
        await self._layers.backward(step, 0, len(labels))
        await self._layers.update(step)
        return loss


class WithServer:
    """The first layers, while the server has the rest: Algorithm 1 of PipeLearn, lines 4 to 13."""

    def __init__(self, layers: Layers, mailbox: Mailbox, server: str) -> None:
        self._layers = layers
        self._mailbox = mailbox
        self._server = server

    async def iteration(self, step: int, share: Share) -> float | None:
        """Forward all mini-batches, then go back through each as soon as its gradient is there; update."""
        layers, mailbox = self._layers, self._mailbox
        mini_batches = share.iteration(step)
        samples = sum(len(labels) for _, labels in mini_batches)
        for micro, (images, labels) in enumerate(mini_batches):
            activation = await layers.forward(step, micro, images)
            mailbox.post(
                self._server, DeviceActivation(mailbox.configuration, step, micro, samples, activation, labels)
            )
        for micro, (_, labels) in enumerate(mini_batches):
            gradient = await mailbox.take(ActivationGradient, (step, micro))
            await layers.backward(step, micro, len(labels), gradient.tensor)
        await layers.update(step)
        return None


class Participant:
    """One device from the start of its program on; knows nothing from before."""

    def __init__(
        self, mailbox: Mailbox, server: str, share: Share, length: Length, layers: Layers, training: LocalTraining
    ) -> None:
        self._mailbox = mailbox
        self._server = server
        self._share = share
        self._length = length
        self._layers = layers
        self._training = training
        self._incarnation = mailbox.device.now()
        self._running: asyncio.Task[None] | None = None
        mailbox.on(Begin, self._begin)
        mailbox.on(Ping, self._answer)

    async def serve(self) -> None:
        """Train whenever the server says so, until cancelled."""
        self._mailbox.post(self._server, Hello(self._incarnation))
        await asyncio.get_running_loop().create_future()

    def _answer(self, ping: Ping) -> None:
        self._mailbox.post(ping.sender, Here())

    def _begin(self, begin: Begin) -> None:
        """Give up the round before, if it goes on, for this one."""
        self._mailbox.open(begin.configuration)
        if self._running is not None:
            self._running.cancel()
        self._running = self._mailbox.start(self._train(begin))

    async def _train(self, begin: Begin) -> None:
        steps = self._length.iterations(begin.round, self._share.per_epoch)
        begun = Begun(begin.configuration, self._incarnation, steps.start, steps.stop)
        self._mailbox.post(self._server, begun)
        await self._layers.load(begin.state, begin.round)
        losses = [await self._training.iteration(step, self._share) for step in steps]
        known = [loss for loss in losses if loss is not None]
        mean = sum(known) / len(known) if known else None
        samples = len(steps) * self._share.mini_batch * self._share.parallel
        weights = self._layers.weights()
        self._mailbox.post(self._server, Update(begin.configuration, samples, mean, weights))
