"""The server's program: run rounds, merge the models of the devices, evaluate the merged model.

`Server` runs the rounds with the help of `testbed.ml.rounds.rounds.Rounds`, which collects the devices' updates.
`GlobalModel` merges updates and evaluates the result. `ServerSide` trains the layers that a split method gives to the
server; together with a device's layers they are the whole model of this device.
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

    ``states`` have equal names and shapes, and ``samples`` is a number for each of them. Running statistics of batch
    normalisation are averaged like weights; of integers (the number of batches seen) the maximum is taken. Optimizer
    state stays on its device and is no part of ``states``. Raises ValueError if names differ, if the arguments have
    different lengths, and without any samples.

    >>> average([{"w": torch.zeros(2)}, {"w": torch.ones(2)}], [1, 3])
    {'w': tensor([0.7500, 0.7500])}
    """
    if states and all(tensor.is_meta for tensor in states[0].values()):
        # Timing-only runs have shapes without values.
        return dict(states[0])
    if sum(samples) <= 0 or len(samples) != len(states):
        raise ValueError(
            f"{len(states)} states need as many numbers of samples, not all 0: {list(samples)}"
        )
    names = list(states[0])
    if any(list(state) != names for state in states):
        raise ValueError("states to be averaged must have the same names")
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
    """Return the mean of tensors of one shape, weighted by ``shares``, which sum to 1; the maximum of integers."""
    if not tensors[0].is_floating_point():
        return torch.stack(list(tensors)).amax(0)
    weighted_sum = tensors[0] * shares[0]
    # Added in the order of the tensors, which decides how sums are rounded.
    for tensor, share in zip(tensors[1:], shares[1:], strict=True):
        weighted_sum = weighted_sum.add(tensor, alpha=share)
    return weighted_sum


GLOBAL = "global"
"""Key of the global model on the server's disk."""
REPORTED = "reported"
"""Key of the number of recorded rounds on the server's disk."""


@dataclass(frozen=True)
class Trained:
    """A device's result of a round, the input of the hook `Merge`."""

    device: str
    """Name of the device."""
    samples: int
    """Number of samples in the round's training."""
    state: State
    """Weights of the whole model including the server's layers, or the result of the hook `Sent`."""
    loss: float
    """Mean loss of the round's iterations."""
    extra: State = field(default_factory=dict)
    """Additional tensors from `LocalRound.sends`."""


Memory = dict[str, "torch.Tensor"]
"""State of a method on the server between rounds, such as the server's momentum; saved with the model."""
Merge = Callable[[State, Sequence[Trained], Memory], State]
"""Hook: takes the global model's weights, the results of one or more devices, and the memory, which it may change;
returns the new weights."""


def mean(state: State, trained: Sequence[Trained], memory: Memory) -> State:
    """Merge by federated averaging (the default `Merge`): each model counts by the number of training samples."""
    states = [result.state for result in trained]
    samples = [result.samples for result in trained]
    return average(states, samples)


Extra = Callable[[Memory], State]
"""Hook: takes the memory; returns tensors to send to devices, by any names, which they find in `LocalRound.extra`."""


def no_extra(memory: Memory) -> State:
    """Send no tensors beside the weights (the default `Extra`)."""
    return {}


_MEMORY = "memory:"
"""Prefix of the names of the memory's tensors on the disk."""


class GlobalModel:
    """The whole model on the server after each round, restored from the disk after a restart of the server.

    In each round, `merge` computes the new weights, `keep` writes them to the disk, and `report` records the round and
    evaluates the weights.
    """

    def __init__(
        self,
        device: Device,
        context: ProgramContext[RoundOptions, RoundDetails],
        merge: Merge = mean,
        extra: Extra = no_extra,
    ) -> None:
        """Restore the model from the server's disk; a first start uses the initial weights, from a file or the seed."""
        problem = context.problem
        saved = device.saved(GLOBAL)
        assert context.dataset is not None
        self._device = device
        self._merge = merge
        self._extra = extra
        self._layers = Layers(device, problem, 0, len(problem.model.units))
        self._tests = Requests(context.dataset, problem.workload.batch_size)
        self._evaluation_trigger = IntervalTrigger(
            problem.options.evaluate_every, device.now()
        )
        self._total_rounds = Participants(problem).length.rounds
        """Number of rounds of the workload; the last round is always evaluated."""
        self._decay = problem.workload.training.ema
        """Decay of the moving averages in each round; None if the weights themselves are evaluated."""
        self.rounds = 0
        """Number of rounds merged into the global model."""
        self._report: dict[str, Any] = {}
        """Fields of the event of the newest round, which `report` records."""
        self.state: State = self._layers.weights()
        """Weights and running statistics of the whole model."""
        self._memory: Memory = {}
        self._averages: Memory = {}
        """Moving averages of the weights; empty if the weights themselves are evaluated."""
        self._has_diverged = False
        # After a restart the disk has the model of the rounds that are done.
        if saved is not None:
            self._restore(saved)
        elif context.weights is not None:
            self.state = {**self.state, **context.weights}
        self.stopping = Stopping(self._layers.training)
        if self.has_values:
            device.expose(self._final_weights)

    def _final_weights(self) -> State:
        """Return the weights that would be the result of the run if it ended now."""
        return self.stopping.result(self.result())

    def _restore(self, saved: Message) -> None:
        """Continue from a model written to the disk by `keep`."""
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
        return bool(self.stopping.reason) or self.rounds >= self._total_rounds

    @property
    def has_values(self) -> bool:
        """Whether weights have values, and not only shapes as in timing-only runs."""
        return not any(tensor.is_meta for tensor in self.state.values())

    def extra(self) -> State:
        """Return the method's additional tensors, sent to devices beside the weights."""
        return self._extra(self._memory)

    async def merge(self, trained: Sequence[Trained]) -> None:
        """Replace the model by the merged models of the devices; an empty ``trained`` leaves the model unchanged."""
        if not trained:
            return
        merge = self._merge
        if not self.has_values and self._extra is no_extra:
            # A mean returns the right shapes. Only a method that sends further tensors needs its own hook here: their
            # sizes depend on the memory, which the hook fills.
            merge = mean
        work = partial(merge, self.state, trained, self._memory)
        cost = Cost(AGGREGATION_FLOPS * self._layers.parameters * len(trained))
        span = Span("average", self.rounds)
        self.state = await self._device.compute(work, cost, span)
        self._update_averages()

    def _update_averages(self) -> None:
        if not self._decay:
            return
        for name, tensor in self.state.items():
            former_average = self._averages.get(name)
            # The average begins with the weights of the first round. Counters (integers) are not averaged.
            if former_average is not None and tensor.is_floating_point():
                tensor = torch.lerp(tensor, former_average, self._decay)
            self._averages[name] = tensor

    def result(self) -> State:
        """Return the weights to evaluate: the model's weights, or moving averages if configured."""
        return {**self.state, **self._averages}

    async def keep(self, start: float, trained: Sequence[Trained]) -> None:
        """Count a round begun at ``start``, in seconds, and save the model and the fields of the round's event.

        The fields are saved because the server may restart before `report` records the event.
        """
        self._record_divergence(trained)
        # A device may occur twice: asynchronous methods merge its updates whenever they arrive.
        samples: dict[str, int] = {}
        for result in trained:
            earlier_samples = samples.get(result.device, 0)
            samples[result.device] = earlier_samples + result.samples
        total = sum(result.loss * result.samples for result in trained)
        loss = total / sum(samples.values())
        self._report = {
            "round": self.rounds,
            "start": start,
            "duration": self._device.now() - start,
            "samples": samples,
            **loss_fields(loss, computed=self.has_values),
        }
        self.rounds += 1
        fields = {"rounds": self.rounds, "report": self._report}
        # Prefixes distinguish memory and averages from weights of the same names.
        tensors = dict(self.state)
        for name, tensor in self._memory.items():
            tensors[_MEMORY + name] = tensor
        for name, tensor in self._averages.items():
            tensors[AVERAGE + name] = tensor
        # Saved before the events are recorded: a restarted server records them again, and trains no round twice.
        await self._device.save(GLOBAL, Message(GLOBAL, fields, tensors))

    def _record_divergence(self, trained: Sequence[Trained]) -> None:
        """Record the devices that sent non-finite numbers, in the first round with such numbers."""
        if self._has_diverged or not self.has_values:
            return
        losses_are_finite = all(math.isfinite(result.loss) for result in trained)
        self._has_diverged = not (_is_finite(self.state) and losses_are_finite)
        if not self._has_diverged:
            return
        for result in trained:
            is_finite = math.isfinite(result.loss) and _is_finite(result.state)
            if not is_finite:
                self._device.record("diverged", step=self.rounds, target=result.device)

    def is_reported(self) -> bool:
        """Return whether the newest round was recorded completely, without interruption by a restart of the server."""
        saved = self._device.saved(REPORTED)
        reported = 0 if saved is None else saved["rounds"]
        return bool(self.rounds == reported)

    async def report(self) -> None:
        """Record the newest round, and evaluate the model if the interval between evaluations has passed."""
        round_fields = dict(self._report)
        samples = sum(round_fields["samples"].values())
        # For metrics of training, a round is a step of the global model.
        step_fields = {"step": round_fields["round"], "samples": samples}
        # Timing-only runs have no loss.
        if "loss" in round_fields:
            step_fields["loss"] = round_fields.pop("loss")
        self._device.record("round", **round_fields)
        self._device.record("step", **step_fields)
        is_last = self.rounds == self._total_rounds
        if is_last or self._evaluation_trigger.is_due(self.rounds, self._device.now()):
            score = await evaluation(
                self._layers, self.result(), self._tests, self.rounds
            )
            score_fields = score.fields()
            self._device.record("evaluate", step=self.rounds, **score_fields)
            self._evaluation_trigger.restart(self._device.now())
            self.stopping.judge(self.rounds, score_fields, self.result)
        # Saved after all events, so that a server that restarts earlier records the round again.
        reported = Message(REPORTED, {"rounds": self.rounds})
        await self._device.save(REPORTED, reported)


async def evaluation(
    layers: Layers, state: State, tests: Requests, number: int
) -> Score:
    """Return the score of the whole model with the weights ``state`` on the test samples; takes the device's time.

    ``number`` is the number of rounds before this evaluation.
    """
    await layers.load(state, number)
    score = Score(layers.training)
    for index in range(len(tests)):
        outputs = await layers.infer(index, tests.images(index))
        score.add(outputs, tests.labels(index))
    return score


@dataclass(frozen=True)
class ServerSide:
    """Trains the server's layers, which follow a device's split point, together with the devices.

    The server has a copy of its layers for each device, or one copy for all devices that train in turn. Algorithm 2 of
    PipeLearn, lines 4 to 17.
    """

    mailbox: Mailbox
    copies: Mapping[str, Layers]
    """Device -> the server's layers for the device."""
    losses: dict[str, float] = field(default_factory=dict)
    """Device -> mean loss of the iterations of the device's newest round."""

    async def serve(self, state: State, number: int, begun: Begun) -> None:
        """Train the server's layers for a device in round ``number``, together with the device.

        ``state`` is the global model's state at the beginning of the round.
        """
        device = begun.sender
        layers = self.copies[device]
        own_state = restrict(state, layers.start, layers.stop)
        await layers.load(own_state, number)
        steps = range(begun.first, begun.last)
        summed_loss = 0.0
        for step in steps:
            # Added in the order of the mini-batches, which decides how sums are rounded.
            for part in await self._train_mini_batches(layers, begun, step):
                summed_loss += part
            norms = None
            if layers.clips_by_norm:
                # Gradients are clipped by the norm of the whole model, whose first layers are on the device.
                device_norms = await self.mailbox.take(Norms, (device, step))
                norms = torch.cat([device_norms.tensor, layers.norms()])
                self.mailbox.post(device, Norms(begun.configuration, step, norms))
            await layers.update(step, norms)
        self.losses[device] = summed_loss / len(steps)

    async def _train_mini_batches(
        self, layers: Layers, begun: Begun, step: int
    ) -> list[float]:
        """Do forward and backward of each mini-batch of an iteration; return their parts of the mean loss."""
        device = begun.sender
        losses: list[float] = []
        trained_samples = 0
        # A placeholder until the first activation, which has the number of samples of the iteration.
        samples = 1
        while trained_samples < samples:
            micro = len(losses)
            activation = await self.mailbox.take(
                DeviceActivation, (device, step, micro)
            )
            labels = activation.labels
            samples = activation.samples
            total_weight: float = samples
            if activation.whole is not None:
                total_weight = activation.whole
            loss = await layers.forward_loss(
                step,
                micro,
                activation.tensor,
                labels,
                samples,
                total_weight,
                begin=trained_samples,
            )
            losses.append(loss)
            gradient = await layers.backward(step, micro, len(labels))
            assert gradient is not None
            answer = ActivationGradient(begun.configuration, step, micro, gradient)
            self.mailbox.post(device, answer)
            trained_samples += len(labels)
        return losses

    def join(self, update: Update) -> tuple[State, float]:
        """Return the whole model of a device, M^k of equation (1), and the mean loss of the device's newest round."""
        device = update.sender
        server_weights = self.copies[device].weights()
        whole_model = {**update.state, **server_weights}
        return whole_model, self.losses[device]


@dataclass(frozen=True)
class Server:
    """Runs the rounds of a workload; after a restart of the server, the rounds after the newest saved one."""

    device: Device
    rounds: Rounds
    model: GlobalModel
    split_points: Mapping[str, int]
    """Device -> P: the device trains the first P layers of the model."""
    server_side: ServerSide | None
    """Trains the server's layers; None if the server trains no layers."""
    in_turn: bool = False
    """Whether the devices train one after the other, each from the merged model of the previous device."""
    receives_changes: bool = False
    """Whether devices send changes of weights, which the server adds to the weights that it sent to the devices."""

    async def run(self) -> None:
        """Run the remaining rounds."""
        devices = list(self.split_points)
        # The devices of a turn train at the same time.
        turns = [devices]
        if self.in_turn:
            turns = [[name] for name in devices]
        # True if the server restarted after it saved a round, and before it had recorded the round.
        if not self.model.is_reported():
            await self.model.report()
        while not self.model.finished:
            start = self.device.now()
            trained: list[Trained] = []
            # Devices that train in turn may all be late; a round without any update is repeated.
            while not trained:
                await self.rounds.wait_for_present(devices, minimum=1)
                for turn in turns:
                    trained += await self._train_round(self.model.rounds, turn)
            await self.model.keep(start, trained)
            await self.model.report()

    async def _train_round(self, number: int, devices: Sequence[str]) -> list[Trained]:
        """Train some devices from the global model in round ``number``, and merge their updates."""
        state = self.model.state
        server_extra = self.model.extra()

        def invite(name: str, configuration: int) -> Begin:
            device_state = restrict(state, 0, self.split_points[name])
            return Begin(configuration, number, with_extra(device_state, server_extra))

        serve = None
        if self.server_side is not None:
            serve = partial(self.server_side.serve, state, number)
        updates = await self.rounds.run_round(number, devices, invite, serve)
        trained = []
        for update in updates:
            weights, extra = split_extra(update.state)
            # Only a method that sends changes itself has a `Merge` that expects them.
            if self.receives_changes:
                weights = _add_changes(state, weights)
            whole_model, loss = self._whole_model(replace(update, state=weights))
            result = Trained(update.sender, update.samples, whole_model, loss, extra)
            trained.append(result)
        await self.model.merge(trained)
        return trained

    def _whole_model(self, update: Update) -> tuple[State, float]:
        """Return the whole model of a device and the mean loss, which the server has computed for a split model."""
        if self.server_side is not None:
            return self.server_side.join(update)
        assert update.loss is not None
        return update.state, update.loss


def _is_finite(state: State) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in state.values())


def _add_changes(start: State, changes: State) -> dict[str, torch.Tensor]:
    """Return the weights of a device's layers, with the sent changes added."""
    weights = {}
    for name, change in changes.items():
        weights[name] = start[name] + change
    return weights
