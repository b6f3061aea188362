"""The server's program: hold rounds, average what the devices and the server's own layers have become, evaluate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from testbed.device import Cost, Device, Span
from testbed.kits.layers.feed import Requests
from testbed.kits.layers.score import Score, loss_fields
from testbed.kits.layers.shard import State, restrict
from testbed.kits.messaging.mailbox import Mailbox
from testbed.kits.rounds.averaging import average
from testbed.kits.rounds.estimate import AGGREGATION_FLOPS, Choice
from testbed.kits.rounds.layers import Layers
from testbed.kits.rounds.messages import ActivationGradient, Begin, Begun, DeviceActivation, Update
from testbed.kits.rounds.rounds import Rounds
from testbed.wire.message import Message

if TYPE_CHECKING:
    import torch

GLOBAL = "global"
"""What the server's disk keeps the global model under."""


class GlobalModel:
    """The whole model, after each round; outlives a restart of the server."""

    def __init__(self, device: Device, layers: Layers, weights: State | None) -> None:
        """``weights`` to begin with; None: those of ``layers``, which are all of the model's."""
        kept = device.saved(GLOBAL)
        self.rounds = 0 if kept is None else int(kept["rounds"])
        """That are in it."""
        self.state: dict[str, torch.Tensor] = layers.weights()
        self.state |= kept.tensors if kept is not None else weights or {}
        self._device = device
        self._layers = layers

    @property
    def numbers(self) -> bool:
        """Whether there are any: a workload without has shapes alone."""
        return not any(tensor.is_meta for tensor in self.state.values())

    async def average(self, models: Sequence[tuple[int, State]]) -> None:
        """Become the mean of several models, each (samples, state); stay what it is where there are none."""
        if models:
            samples, states = zip(*models, strict=True)
            work = partial(average, states, samples)
            cost = Cost(AGGREGATION_FLOPS * self._layers.parameters * len(models))
            self.state = await self._device.compute(work, cost, Span("average", self.rounds))

    async def keep(self) -> None:
        """Count a round, and save to the disk."""
        self.rounds += 1
        await self._device.save(GLOBAL, Message(GLOBAL, {"rounds": self.rounds}, self.state))

    async def evaluate(self, tests: Requests) -> None:
        """Score the model on data that no device trains on."""
        await self._layers.load(self.state, self.rounds)
        score = Score()
        for index in range(len(tests)):
            score.add(await self._layers.infer(index, tests.images(index)), tests.labels(index))
        self._device.record("evaluate", step=self.rounds, **score.fields())


class ServerSide:
    """The server's layers: those behind each device's split point, a copy for each device or one for all.

    Algorithm 2 of PipeLearn, lines 4 to 17.
    """

    def __init__(self, mailbox: Mailbox, choices: Mapping[str, Choice], copies: Mapping[str, Layers]) -> None:
        self.losses: dict[str, float] = {}
        """Mean of the iterations of the device's last round."""
        self._mailbox = mailbox
        self._choices = choices
        self._copies = copies

    async def serve(self, state: State, number: int, begun: Begun) -> None:
        """Train a device's copy along with it, from the global model's state on."""
        layers, choice = self._copies[begun.sender], self._choices[begun.sender]
        await layers.load(restrict(state, layers.first, layers.last), number)
        steps, loss = range(begun.first, begun.last), 0.0
        for step in steps:
            for micro in range(choice.parallel):
                given = await self._mailbox.take(DeviceActivation, (begun.sender, step, micro))
                loss += await layers.forward_loss(step, micro, given.tensor, given.labels, given.samples)
                gradient = await layers.backward(step, micro, len(given.labels))
                assert gradient is not None
                self._mailbox.post(begun.sender, ActivationGradient(begun.configuration, step, micro, gradient))
            await layers.update(step)
        self.losses[begun.sender] = loss / len(steps)

    def join(self, update: Update) -> tuple[State, float]:
        """Return a device's whole model, M^k of equation (1), and its loss."""
        return {**update.state, **self._copies[update.sender].weights()}, self.losses[update.sender]


@dataclass(frozen=True)
class Trained:
    """What a device has made of the global model in a round."""

    device: str
    samples: int
    """That it has seen."""
    state: State
    """Of the whole model, the server's layers included."""
    loss: float
    """Mean of its iterations."""


class Server:
    """Rounds from the first that is not in the global model to the last."""

    def __init__(
        self,
        mailbox: Mailbox,
        rounds: Rounds,
        model: GlobalModel,
        splits: Mapping[str, int],
        side: ServerSide | None,
        in_turn: bool = False,
    ) -> None:
        """``splits``: the first layer that is not a device's; ``side``: who trains the rest, None: there is none.

        ``in_turn``: one device after the other goes on from what the one before it has made.
        """
        self._mailbox = mailbox
        self._device = mailbox.device
        self._rounds = rounds
        self._model = model
        self._splits = splits
        self._side = side
        self._in_turn = in_turn

    async def run(self, rounds: int, tests: Requests, evaluate_every: int) -> None:
        """Hold the rounds that are left; evaluate after some of them and after the last."""
        if self._model.numbers:
            self._device.expose(lambda: self._model.state)
        devices = list(self._splits)
        turns = [[name] for name in devices] if self._in_turn else [devices]
        for number in range(self._model.rounds, rounds):
            start = self._device.now()
            trained: list[Trained] = []
            while not trained:  # in turn, all devices may have been missed
                await self._rounds.present(devices, 1)
                for turn in turns:
                    trained += await self._train(number, turn)
            await self._model.keep()
            self._report(number, start, trained)
            if (number + 1) % evaluate_every == 0 or number + 1 == rounds:
                await self._model.evaluate(tests)

    async def _train(self, number: int, devices: Sequence[str]) -> list[Trained]:
        """Have devices train from the global model on, which becomes the mean of what they send."""
        state = self._model.state

        def invite(name: str, configuration: int) -> Begin:
            return Begin(configuration, number, restrict(state, 0, self._splits[name]))

        serve = None if self._side is None else partial(self._side.serve, state, number)
        updates = await self._rounds.hold(number, devices, invite, serve)
        trained = [Trained(update.sender, update.samples, *self._whole(update)) for update in updates]
        await self._model.average([(each.samples, each.state) for each in trained])
        return trained

    def _whole(self, update: Update) -> tuple[State, float]:
        if self._side is not None:
            return self._side.join(update)
        assert update.loss is not None
        return update.state, update.loss

    def _report(self, number: int, start: float, trained: Sequence[Trained]) -> None:
        """Record who took part in a round, and the mean of their losses, by samples."""
        samples = {each.device: each.samples for each in trained}
        duration = self._device.now() - start
        self._device.record("round", round=number, start=start, duration=duration, samples=samples)
        loss = sum(each.loss * each.samples for each in trained) / sum(samples.values())
        self._device.record("step", step=number, samples=sum(samples.values()), **loss_fields(loss))
