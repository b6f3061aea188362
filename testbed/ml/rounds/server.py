"""The server's program: run rounds, average the models of devices and server, evaluate.

`Server` runs the rounds, `GlobalModel` merges and evaluates the model, and `ServerSide` trains the layers that a split
method gives to the server.
"""

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
from testbed.ml.method import ProgramContext
from testbed.ml.rounds.estimate import AGGREGATION_FLOPS
from testbed.ml.rounds.layers import Layers
from testbed.ml.rounds.messages import (
    ActivationGradient,
    Begin,
    Begun,
    DeviceActivation,
    Norms,
    Update,
    split_extra,
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
    """Return the mean of several models' states, weighted by samples: FedAvg (McMahan et al., 2017), Algorithm 1.

    ``states`` have equal names and shapes.

    Running statistics of batch normalisation are averaged like weights. Integers (the number of batches seen) take the
    maximum. Momentum is not part of a state: it stays on its device. Raises ValueError for states of different names
    and for zero samples.

    >>> average([{"w": torch.zeros(2)}, {"w": torch.ones(2)}], [1, 3])
    {'w': tensor([0.7500, 0.7500])}
    """
    if states and all(tensor.is_meta for tensor in states[0].values()):
        # Timing-only runs have shapes without values.
        return dict(states[0])
    if sum(samples) <= 0 or len(samples) != len(states):
        raise ValueError(
            f"no weights in {list(samples)} samples for {len(states)} states"
        )
    names = list(states[0])
    if any(list(state) != names for state in states):
        raise ValueError("states of different layers have no mean")
    total = sum(samples)
    shares = [count / total for count in samples]
    means = {}
    for name in names:
        tensors = [state[name] for state in states]
        means[name] = _weighted_mean(tensors, shares)
    return means


def _weighted_mean(
    tensors: Sequence[torch.Tensor], shares: Sequence[float]
) -> torch.Tensor:
    """Return the mean of tensors of one shape, each counting by its share; the maximum of integers."""
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
    """Number of samples in the round's training."""
    state: State
    """State of the whole model including the server's layers, or another message of the device."""
    loss: float
    """Mean loss of the round's iterations."""
    extra: State = field(default_factory=dict)
    """Additional tensors from `LocalRound.sends`."""


Memory = dict[str, "torch.Tensor"]
"""State of a merge between rounds, such as the server's momentum; saved with the model."""
Merge = Callable[[State, Sequence[Trained], Memory], State]
"""Hook: takes the global model's weights, what the devices have sent (at least one), and the memory, which it may
change; returns the new weights."""


def mean(state: State, trained: Sequence[Trained], memory: Memory) -> State:
    """Merge by federated averaging: each model counts by the samples that it was trained on."""
    states = [result.state for result in trained]
    samples = [result.samples for result in trained]
    return average(states, samples)


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
        context: ProgramContext[RoundOptions, RoundDetails],
        merge: Merge = mean,
        extra: Extra = no_extra,
    ) -> None:
        """Load the model from the server's disk; otherwise use the context's initial weights, or the seed's."""
        problem = context.problem
        saved = device.saved(GLOBAL)
        assert context.dataset is not None
        self._device = device
        self._merge = merge
        self._extra = extra
        self._layers = Layers(device, problem, 0, len(problem.model.units))
        self._tests = Requests(context.dataset, problem.workload.batch_size)
        self._due = IntervalTrigger(problem.options.evaluate_every, device.now())
        self._last = Participants(problem).length.rounds
        """Number of rounds of the workload; the last one is always evaluated."""
        self._ema = problem.workload.training.ema
        """The share of a moving average that is kept in each round; None evaluates the weights themselves."""
        self.rounds = 0
        """Number of rounds merged into the global model."""
        self._report: dict[str, Any] = {}
        """Fields of the event of the last merged round, which `report` records."""
        self.state: State = self._layers.weights()
        """Weights and running statistics of the whole model."""
        self._memory: Memory = {}
        self._averages: Memory = {}
        """Moving averages of the weights; empty if the weights themselves are evaluated."""
        self._diverged = False
        # After a restart the disk has the rounds that are done.
        if saved is not None:
            self._restore(saved)
        elif context.weights is not None:
            self.state = {**self.state, **context.weights}
        self.stopping = Stopping(self._layers.training)
        if self.numbers:
            device.expose(self._final_weights)

    def _final_weights(self) -> State:
        """Return the weights that are the result of the run so far."""
        return self.stopping.result(self.result())

    def _restore(self, saved: Message) -> None:
        """Continue from a model that `keep` has written to the disk."""
        self.rounds = int(saved["rounds"])
        self._report = saved["report"]
        state = {}
        for name in self.state:
            state[name] = saved.tensors[name]
        self.state = state
        for name, tensor in saved.tensors.items():
            if name.startswith(_MEMORY):
                self._memory[name.removeprefix(_MEMORY)] = tensor
            elif name.startswith(AVERAGE):
                self._averages[name.removeprefix(AVERAGE)] = tensor

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
        """Replace the model by the merged models of the devices; without any, the model is unchanged."""
        if not trained:
            return
        merge = self._merge
        if not self.numbers and self._extra is no_extra:
            # A mean has the right shapes. Extra tensors, whose size counts, need the method's own merge and memory.
            merge = mean
        work = partial(merge, self.state, trained, self._memory)
        cost = Cost(AGGREGATION_FLOPS * self._layers.parameters * len(trained))
        span = Span("average", self.rounds)
        self.state = await self._device.compute(work, cost, span)
        self._update_averages()

    def _update_averages(self) -> None:
        if not self._ema:
            return
        for name, tensor in self.state.items():
            before = self._averages.get(name)
            # The first round has no average before it, and counters (integers) have none at all.
            if before is not None and tensor.is_floating_point():
                tensor = torch.lerp(tensor, before, self._ema)
            self._averages[name] = tensor

    def result(self) -> State:
        """Return the weights that are evaluated and exposed: the model, or its moving average if configured."""
        return {**self.state, **self._averages}

    async def keep(self, start: float, trained: Sequence[Trained]) -> None:
        """Count a round that began at ``start``, in seconds, and save the model with the results of the round.

        The results are saved because `report` records them later: the server may restart in between.
        """
        self._record_divergence(trained)
        # A device may occur twice: asynchronous methods merge its updates whenever they arrive.
        samples: dict[str, int] = {}
        for result in trained:
            before = samples.get(result.device, 0)
            samples[result.device] = before + result.samples
        total = sum(result.loss * result.samples for result in trained)
        loss = total / sum(samples.values())
        self._report = {
            "round": self.rounds,
            "start": start,
            "duration": self._device.now() - start,
            "samples": samples,
            **loss_fields(loss, computed=self.numbers),
        }
        self.rounds += 1
        fields = {"rounds": self.rounds, "report": self._report}
        # Prefixes tell memory and averages from the weights of the same names.
        tensors = dict(self.state)
        for name, tensor in self._memory.items():
            tensors[_MEMORY + name] = tensor
        for name, tensor in self._averages.items():
            tensors[AVERAGE + name] = tensor
        # Saved before the events are recorded: a restarted server records them again, and trains no round twice.
        await self._device.save(GLOBAL, Message(GLOBAL, fields, tensors))

    def _record_divergence(self, trained: Sequence[Trained]) -> None:
        """Record the devices that sent non-finite numbers, in the first round with such numbers."""
        if self._diverged or not self.numbers:
            return
        losses_are_finite = all(math.isfinite(result.loss) for result in trained)
        self._diverged = not (_is_finite(self.state) and losses_are_finite)
        if not self._diverged:
            return
        for result in trained:
            is_finite = math.isfinite(result.loss) and _is_finite(result.state)
            if not is_finite:
                self._device.record("diverged", step=self.rounds, target=result.device)

    def is_reported(self) -> bool:
        """Return whether the last round was recorded completely, which a restart may have prevented."""
        saved = self._device.saved(REPORTED)
        reported = 0 if saved is None else saved["rounds"]
        return bool(self.rounds == reported)

    async def report(self) -> None:
        """Record the last round, and evaluate the model if due."""
        fields = dict(self._report)
        samples = sum(fields["samples"].values())
        # A round is a step of the global model.
        step = {"step": fields["round"], "samples": samples}
        # Timing-only runs have no loss.
        if "loss" in fields:
            step["loss"] = fields.pop("loss")
        self._device.record("round", **fields)
        self._device.record("step", **step)
        is_last = self.rounds == self._last
        if is_last or self._due(self.rounds, self._device.now()):
            score = await evaluation(
                self._layers, self.result(), self._tests, self.rounds
            )
            fields = score.fields()
            self._device.record("evaluate", step=self.rounds, **fields)
            self._due.made(self._device.now())
            self.stopping.judge(self.rounds, fields, self.result)
        # Saved last: a server that restarts before this line has not recorded the round completely.
        reported = Message(REPORTED, {"rounds": self.rounds})
        await self._device.save(REPORTED, reported)


async def evaluation(
    layers: Layers, state: State, tests: Requests, number: int
) -> Score:
    """Score weights of the whole model on the test samples, which takes the device's time.

    ``number`` is the round after which the weights are scored.
    """
    await layers.load(state, number)
    score = Score(layers.training)
    for index in range(len(tests)):
        outputs = await layers.infer(index, tests.images(index))
        score.add(outputs, tests.labels(index))
    return score


@dataclass(frozen=True)
class ServerSide:
    """Trains the server's layers, which follow the split point of each device.

    Devices have copies of these layers, or one copy for all if they train in turn. Algorithm 2 of PipeLearn, lines 4 to
    17.
    """

    mailbox: Mailbox
    copies: Mapping[str, Layers]
    """Device -> the layers that serve the device."""
    losses: dict[str, float] = field(default_factory=dict)
    """Device -> mean loss of the iterations of the device's last round."""

    async def serve(self, state: State, number: int, begun: Begun) -> None:
        """Train the copy of a device together with the device in round ``number``, from the global model's state."""
        device = begun.sender
        layers = self.copies[device]
        own_state = restrict(state, layers.first, layers.last)
        await layers.load(own_state, number)
        steps = range(begun.first, begun.last)
        loss = 0.0
        for step in steps:
            # One after the other: the order decides how sums are rounded.
            for part in await self._train_mini_batches(layers, begun, step):
                loss += part
            norms = None
            if layers.clips_by_norm:
                # Gradients are clipped by the norm of the whole model, whose first layers are the device's.
                first = await self.mailbox.take(Norms, (device, step))
                norms = torch.cat([first.tensor, layers.norms()])
                self.mailbox.post(device, Norms(begun.configuration, step, norms))
            await layers.update(step, norms)
        self.losses[device] = loss / len(steps)

    async def _train_mini_batches(
        self, layers: Layers, begun: Begun, step: int
    ) -> list[float]:
        """Do forward and backward of an iteration's mini-batches in their order; return the parts of the mean loss."""
        device = begun.sender
        losses: list[float] = []
        done = 0
        # The iteration's number of samples is known from its first activation.
        samples = 1
        while done < samples:
            micro = len(losses)
            activation = await self.mailbox.take(
                DeviceActivation, (device, step, micro)
            )
            labels = activation.labels
            samples = activation.samples
            # Unset where each sample counts as one.
            whole = samples if activation.whole is None else activation.whole
            loss = await layers.forward_loss(
                step, micro, activation.tensor, labels, samples, whole, begin=done
            )
            losses.append(loss)
            gradient = await layers.backward(step, micro, len(labels))
            assert gradient is not None
            answer = ActivationGradient(begun.configuration, step, micro, gradient)
            self.mailbox.post(device, answer)
            done += len(labels)
        return losses

    def join(self, update: Update) -> tuple[State, float]:
        """Return the whole model of a device, M^k of equation (1), and the mean loss of the device's last round."""
        device = update.sender
        server_layers = self.copies[device].weights()
        whole = {**update.state, **server_layers}
        return whole, self.losses[device]


@dataclass(frozen=True)
class Server:
    """Runs all rounds that the global model does not contain yet.

    After a restart of the server these are the rounds after the last saved one.
    """

    device: Device
    rounds: Rounds
    model: GlobalModel
    splits: Mapping[str, int]
    """Device -> number of its layers, P: the first layers of the model."""
    side: ServerSide | None
    """Trains the server's layers; None if the server trains nothing."""
    in_turn: bool = False
    """Whether the devices train one after the other, each from the model of the one before."""
    changes: bool = False
    """Whether devices send changes to be added to their initial weights."""

    async def run(self) -> None:
        """Run the remaining rounds."""
        devices = list(self.splits)
        turns = [devices]
        if self.in_turn:
            turns = [[name] for name in devices]
        # The server restarted between saving a round and recording it.
        if not self.model.is_reported():
            await self.model.report()
        while not self.model.finished:
            start = self.device.now()
            trained: list[Trained] = []
            # In turn, a round without an update is possible: all devices may have been late.
            while not trained:
                await self.rounds.present(devices, 1)
                for turn in turns:
                    trained += await self._train_round(self.model.rounds, turn)
            await self.model.keep(start, trained)
            await self.model.report()

    async def _train_round(self, number: int, devices: Sequence[str]) -> list[Trained]:
        """Train some devices from the global model in round ``number``, and merge their updates."""
        state = self.model.state
        server_extra = self.model.extra()

        def invite(name: str, configuration: int) -> Begin:
            own = restrict(state, 0, self.splits[name])
            return Begin(configuration, number, with_extra(own, server_extra))

        serve = None
        if self.side is not None:
            serve = partial(self.side.serve, state, number)
        updates = await self.rounds.run_round(number, devices, invite, serve)
        trained = []
        for update in updates:
            weights, extra = split_extra(update.state)
            # Merges of all other methods expect weights.
            if self.changes:
                weights = _add_changes(state, weights)
            whole, loss = self._whole_model(replace(update, state=weights))
            result = Trained(update.sender, update.samples, whole, loss, extra)
            trained.append(result)
        await self.model.merge(trained)
        return trained

    def _whole_model(self, update: Update) -> tuple[State, float]:
        """Return the whole model of a device and the mean loss, which the server has computed for a split model."""
        if self.side is not None:
            return self.side.join(update)
        assert update.loss is not None
        return update.state, update.loss


def _is_finite(state: State) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in state.values())


def _add_changes(start: State, changes: State) -> dict[str, torch.Tensor]:
    """Return the weights of a device that has sent changes; a device may have some layers only."""
    weights = {}
    for name, change in changes.items():
        weights[name] = start[name] + change
    return weights
