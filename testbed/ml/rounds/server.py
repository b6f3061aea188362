"""The server's program: run rounds, average the models of devices and server, evaluate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from testbed.device import Cost, Device, Span
from testbed.messaging.mailbox import Mailbox
from testbed.ml.data.batches import IntervalTrigger
from testbed.ml.layers.feed import Requests, Score, loss_fields
from testbed.ml.layers.shard import State, restrict
from testbed.ml.lazy import torch
from testbed.ml.method import Job
from testbed.ml.rounds.estimate import AGGREGATION_FLOPS
from testbed.ml.rounds.layers import Layers
from testbed.ml.rounds.messages import (
    ActivationGradient,
    Begin,
    Begun,
    DeviceActivation,
    Norms,
    Update,
    parted,
    with_extra,
)
from testbed.ml.rounds.options import RoundOptions
from testbed.ml.rounds.planner import Participants, RoundDetails
from testbed.ml.rounds.rounds import Rounds
from testbed.ml.training.optimizers import AVERAGE
from testbed.ml.training.stopping import Stopping
from testbed.wire.message import Message


def average(
    states: Sequence[Mapping[str, torch.Tensor]], samples: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Return the mean of several models' states, weighted by samples, in the order given.

    Running statistics of batch normalisation are averaged like weights. Integers (the number of batches seen) take the
    maximum. Momentum is not part of a state: it stays on its device. Raises ValueError for states of different names
    and for zero samples.

    >>> average([{"w": torch.zeros(2)}, {"w": torch.ones(2)}], [1, 3])
    {'w': tensor([0.7500, 0.7500])}
    """
    if states and all(tensor.is_meta for tensor in states[0].values()):
        return dict(states[0])  # no numbers, no mean
    if sum(samples) <= 0 or len(samples) != len(states):
        raise ValueError(
            f"no weights in {list(samples)} samples for {len(states)} states"
        )
    names = list(states[0])
    if any(list(state) != names for state in states):
        raise ValueError("states of different layers have no mean")
    shares = [count / sum(samples) for count in samples]
    return {
        name: _weighted_mean([state[name] for state in states], shares)
        for name in names
    }


def _weighted_mean(
    tensors: Sequence[torch.Tensor], shares: Sequence[float]
) -> torch.Tensor:
    if not tensors[0].is_floating_point():
        return torch.stack(list(tensors)).amax(0)
    mean = tensors[0] * shares[0]
    # One after the other: the order decides how sums are rounded.
    for tensor, share in zip(tensors[1:], shares[1:], strict=True):
        mean = mean.add(tensor, alpha=share)
    return mean


GLOBAL = "global"
"""Key of the global model on the server's disk."""
REPORTED = "reported"
"""Key of the number of recorded rounds on the server's disk."""


@dataclass(frozen=True)
class Trained:
    """A device's result of a round."""

    device: str
    samples: int
    """Samples that it has trained on."""
    state: State
    """State of the whole model including the server's layers, or another message of the device."""
    loss: float
    """Mean of its iterations."""
    extra: State = field(default_factory=dict)
    """Additional tensors from `LocalRound.sends`."""


Memory = dict[str, "torch.Tensor"]
"""State of a merge between rounds, such as the server's momentum; saved with the model."""
Merge = Callable[[State, Sequence[Trained], Memory], State]
"""Hook: takes the global model's weights, what the devices have sent (at least one), and the memory, which it may
change; returns the new weights."""


def mean(state: State, trained: Sequence[Trained], memory: Memory) -> State:
    """Merge by federated averaging: each model by its share of the samples."""
    return average([each.state for each in trained], [each.samples for each in trained])


Extra = Callable[[Memory], State]
"""Hook: takes the memory; returns tensors, by any names, that devices find in `LocalRound.extra`."""


def no_extra(memory: Memory) -> State:
    """Send weights alone."""
    return {}


_MEMORY = "memory:"
"""Prefix of the memory's names on the disk."""


class GlobalModel:
    """The whole model on the server after each round; survives a restart of the server."""

    def __init__(
        self,
        device: Device,
        job: Job[RoundOptions, RoundDetails],
        merge: Merge = mean,
        extra: Extra = no_extra,
    ) -> None:
        """Load the model from the server's disk; otherwise use the job's initial weights, or those of the seed."""
        problem, kept, weights = job.problem, device.saved(GLOBAL), job.weights
        assert job.dataset is not None
        self._device = device
        self._merge = merge
        self._extra = extra
        self._layers = layers = Layers(device, problem, 0, len(problem.model.units))
        self._tests = Requests(job.dataset, problem.workload.batch_size)
        self._due = IntervalTrigger(problem.options.evaluate_every, device.now())
        self._last = Participants(problem).length.rounds
        """Rounds of the whole workload; after the last there is always an evaluation."""
        self._ema = problem.workload.training.ema
        """The share that a moving average of the weights keeps in each round, where that is evaluated."""
        self.rounds = 0 if kept is None else int(kept["rounds"])
        """Rounds that are in the global model."""
        self._report: dict[str, Any] = {} if kept is None else kept["report"]
        """What there is to record of the last of them."""
        self.state: State = layers.weights()
        self._memory: Memory = {}
        self._averages: Memory = {}
        """Moving averages of the weights, where those are evaluated."""
        self._diverged = False
        if kept is not None:
            self.state = {name: kept.tensors[name] for name in self.state}
            for name, tensor in kept.tensors.items():
                if name.startswith(_MEMORY):
                    self._memory[name.removeprefix(_MEMORY)] = tensor
                elif name.startswith(AVERAGE):
                    self._averages[name.removeprefix(AVERAGE)] = tensor
        elif weights is not None:
            self.state = {**self.state, **weights}
        self.stopping = Stopping(layers.training)
        if self.numbers:
            device.expose(lambda: self.stopping.result(self.result()))

    @property
    def finished(self) -> bool:
        """Whether all rounds of the workload are done, or training was stopped."""
        return bool(self.stopping.reason) or self.rounds >= self._last

    @property
    def numbers(self) -> bool:
        """Whether weights have values: timing-only runs have shapes alone."""
        return not any(tensor.is_meta for tensor in self.state.values())

    def extra(self) -> State:
        """Return the additional tensors sent to devices beside the weights."""
        return self._extra(self._memory)

    async def merge(self, trained: Sequence[Trained]) -> None:
        """Replace the model by the merged models of the devices; keep the model if there are none."""
        if trained:
            # Without numbers a mean has the right shapes, but the size of what is sent may follow from the memory.
            merge = self._merge if self.numbers or self._extra is not no_extra else mean
            work = partial(merge, self.state, trained, self._memory)
            cost = Cost(AGGREGATION_FLOPS * self._layers.parameters * len(trained))
            self.state = await self._device.compute(
                work, cost, Span("average", self.rounds)
            )
            for name, tensor in self.state.items() if self._ema else ():
                kept = self._averages.get(name)
                if kept is not None and self._ema and tensor.is_floating_point():
                    tensor = torch.lerp(tensor, kept, self._ema)
                self._averages[name] = tensor

    def result(self) -> State:
        """Return the evaluated and final weights: the model, or its moving average."""
        return {
            name: self._averages.get(name, tensor)
            for name, tensor in self.state.items()
        }

    async def keep(self, start: float, trained: Sequence[Trained]) -> None:
        """Count a round started at ``start``, and save the model to the disk with the unrecorded results."""
        self._report_divergence(trained)
        samples: dict[str, int] = {}
        for each in trained:
            samples[each.device] = samples.get(each.device, 0) + each.samples
        loss = sum(each.loss * each.samples for each in trained) / sum(samples.values())
        duration = self._device.now() - start
        made = {
            "round": self.rounds,
            "start": start,
            "duration": duration,
            "samples": samples,
        }
        self._report = {**made, **loss_fields(loss, self.numbers)}
        self.rounds += 1
        fields = {"rounds": self.rounds, "report": self._report}
        memory = {_MEMORY + name: tensor for name, tensor in self._memory.items()}
        averages = {AVERAGE + name: tensor for name, tensor in self._averages.items()}
        await self._device.save(
            GLOBAL, Message(GLOBAL, fields, {**self.state, **memory, **averages})
        )

    def _report_divergence(self, trained: Sequence[Trained]) -> None:
        """Record once the devices that sent non-finite numbers."""
        if self._diverged or not self.numbers:
            return
        self._diverged = not (
            _is_finite(self.state) and all(math.isfinite(each.loss) for each in trained)
        )
        if not self._diverged:
            return
        for each in trained:
            if not (math.isfinite(each.loss) and _is_finite(each.state)):
                self._device.record("diverged", step=self.rounds, target=each.device)

    def is_reported(self) -> bool:
        """Return whether the last round was recorded completely, which a restart may have prevented."""
        reported = self._device.saved(REPORTED)
        return self.rounds == (0 if reported is None else reported["rounds"])

    async def report(self) -> None:
        """Record the last round, and evaluate the model if due."""
        made = dict(self._report)
        loss = {name: made.pop(name) for name in ("loss",) if name in made}
        self._device.record("round", **made)
        self._device.record(
            "step", step=made["round"], samples=sum(made["samples"].values()), **loss
        )
        if self.rounds == self._last or self._due(self.rounds, self._device.now()):
            score = await evaluation(
                self._layers, self.result(), self._tests, self.rounds
            )
            fields = score.fields()
            self._device.record("evaluate", step=self.rounds, **fields)
            self._due.made(self._device.now())
            self.stopping.judge(self.rounds, fields, self.result)
        await self._device.save(REPORTED, Message(REPORTED, {"rounds": self.rounds}))


async def evaluation(
    layers: Layers, state: State, tests: Requests, number: int
) -> Score:
    """Score weights of the whole model on the test samples; takes the device's time."""
    await layers.load(state, number)
    score = Score(layers.training)
    for index in range(len(tests)):
        score.add(await layers.infer(index, tests.images(index)), tests.labels(index))
    return score


@dataclass(frozen=True)
class ServerSide:
    """The server's layers: those after each device's split point, in a copy for each device or one for all.

    Algorithm 2 of PipeLearn, lines 4 to 17.
    """

    mailbox: Mailbox
    copies: Mapping[str, Layers]
    """The layers that serve each device."""
    losses: dict[str, float] = field(default_factory=dict)
    """Mean of the iterations of each device's last round."""

    async def serve(self, state: State, number: int, begun: Begun) -> None:
        """Train a device's copy together with the device, starting from the global model's state."""
        layers = self.copies[begun.sender]
        await layers.load(restrict(state, layers.first, layers.last), number)
        steps, loss = range(begun.first, begun.last), 0.0
        for step in steps:
            micro, done, samples = 0, 0, 1
            while done < samples:
                given = await self.mailbox.take(
                    DeviceActivation, (begun.sender, step, micro)
                )
                whole = given.samples if given.whole is None else given.whole
                loss += await layers.forward_loss(
                    step, micro, given.tensor, given.labels, given.samples, whole
                )
                gradient = await layers.backward(step, micro, len(given.labels))
                assert gradient is not None
                self.mailbox.post(
                    begun.sender,
                    ActivationGradient(begun.configuration, step, micro, gradient),
                )
                samples = given.samples
                done += len(given.labels)
                micro += 1
            norms = None
            if layers.clips_by_norm:
                first = await self.mailbox.take(Norms, (begun.sender, step))
                norms = torch.cat([first.tensor, layers.norms()])
                self.mailbox.post(begun.sender, Norms(begun.configuration, step, norms))
            await layers.update(step, norms)
        self.losses[begun.sender] = loss / len(steps)

    def join(self, update: Update) -> tuple[State, float]:
        """Return a device's whole model, M^k of equation (1), and its loss."""
        return {**update.state, **self.copies[update.sender].weights()}, self.losses[
            update.sender
        ]


@dataclass(frozen=True)
class Server:
    """All rounds missing in the global model."""

    device: Device
    rounds: Rounds
    model: GlobalModel
    splits: Mapping[str, int]
    """By device, the first layer that is not its own."""
    side: ServerSide | None
    """Trains the server's layers; None without such layers."""
    in_turn: bool = False
    """Whether one device after the other goes on from what the one before it has made."""
    changes: bool = False
    """Whether devices send changes to be added to their initial weights."""

    async def run(self) -> None:
        """Run the remaining rounds."""
        devices = list(self.splits)
        turns = [[name] for name in devices] if self.in_turn else [devices]
        if not self.model.is_reported():
            await self.model.report()
        while not self.model.finished:
            start = self.device.now()
            trained: list[Trained] = []
            while not trained:  # in turn, all devices may have been missed
                await self.rounds.present(devices, 1)
                for turn in turns:
                    trained += await self._train_round(self.model.rounds, turn)
            await self.model.keep(start, trained)
            await self.model.report()

    async def _train_round(self, number: int, devices: Sequence[str]) -> list[Trained]:
        """Train devices from the global model, and merge their updates."""
        state, beside = self.model.state, self.model.extra()

        def invite(name: str, configuration: int) -> Begin:
            return Begin(
                configuration,
                number,
                with_extra(restrict(state, 0, self.splits[name]), beside),
            )

        serve = None if self.side is None else partial(self.side.serve, state, number)
        trained = []
        for arrived in await self.rounds.hold(number, devices, invite, serve):
            weights, extra = parted(arrived.state)
            update = replace(
                arrived, state=_add_changes(state, weights) if self.changes else weights
            )
            trained.append(
                Trained(
                    update.sender, update.samples, *self._whole_model(update), extra
                )
            )
        await self.model.merge(trained)
        return trained

    def _whole_model(self, update: Update) -> tuple[State, float]:
        if self.side is not None:
            return self.side.join(update)
        assert update.loss is not None
        return update.state, update.loss


def _is_finite(state: State) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in state.values())


def _add_changes(start: State, changes: State) -> State:
    return {name: start[name] + change for name, change in changes.items()}
