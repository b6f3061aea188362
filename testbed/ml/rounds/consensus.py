"""Evaluation of methods without a server: each device has its own weights, and the coordinator evaluates all of them.

`Consensus` is the part of the devices' programs; `CONSENSUS` declares its events and metrics.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from testbed.messaging.mailbox import Mailbox
from testbed.messaging.typed_messages import TypedMessage
from testbed.ml.layers.feed import Requests
from testbed.ml.layers.shard import State
from testbed.ml.method import ProgramContext
from testbed.ml.rounds.layers import Layers
from testbed.ml.rounds.server import average, evaluation
from testbed.trace.events import EventType
from testbed.trace.metrics_spec import Metric, MetricsSpec, Row
from testbed.trace.record import RunView


@dataclass(frozen=True)
class Snapshot(TypedMessage, kind="snapshot", key=("step", "sender")):
    """To the coordinator: a device's weights after a round."""

    step: int
    """Number of rounds before."""
    state: State


def distance(states: Sequence[State], mean: State) -> float:
    """Return the distance of the devices' weights from their mean: the root of the mean squared Euclidean distance.

    ``states`` has the weights of each device, and ``mean`` the mean over the devices.

    >>> import torch
    >>> states = [{"w": torch.tensor([0.0])}, {"w": torch.tensor([6.0])}]
    >>> distance(states, {"w": torch.tensor([3.0])})
    3.0
    """
    squares = []
    for state in states:
        square = 0.0
        for name, tensor in mean.items():
            # Integers are counters, such as the number of batches seen, and do not count.
            if tensor.is_floating_point():
                difference = state[name] - tensor
                square += float((difference**2).sum())
        squares.append(square)
    return math.sqrt(fmean(squares))


class Consensus:
    """Evaluation of a method without a server: the coordinator evaluates each device's weights and the mean weights.

    The coordinator evaluates in the background of its own training. Every device, the coordinator included, calls
    `report` after the same rounds, and `finish` at the end.
    """

    def __init__(
        self, mailbox: Mailbox, context: ProgramContext, report_timeout: float
    ) -> None:
        """``report_timeout`` is how many seconds the coordinator waits for other reports after its own report."""
        self._mailbox = mailbox
        self._coordinator = context.plan.coordinator
        self._others = []
        for name in context.plan.devices:
            if name != self._coordinator:
                self._others.append(name)
        self._report_timeout = report_timeout
        self._evaluation: asyncio.Task[None] | None = None
        """On the coordinator, the evaluation of the newest report."""
        if mailbox.device.name == self._coordinator:
            assert context.dataset is not None
            units = len(context.problem.model.units)
            self._layers = Layers(mailbox.device, context.problem, 0, units)
            self._tests = Requests(context.dataset, context.problem.workload.batch_size)

    async def report(self, step: int, state: State) -> None:
        """Send the weights after ``step`` rounds to the coordinator; on the coordinator, start the evaluation."""
        if self._mailbox.device.name != self._coordinator:
            self._mailbox.post(self._coordinator, Snapshot(step, state))
        else:
            self._evaluation = self._mailbox.start(
                self._evaluate_round(step, state, self._evaluation)
            )

    async def finish(self) -> None:
        """On the coordinator, return after the last evaluation; on other devices, wait until the end of the run."""
        if self._evaluation is None:
            # This future never gets a result: the runtime cancels the program at the end of the run.
            await asyncio.get_running_loop().create_future()
        else:
            await self._evaluation

    async def _evaluate_round(
        self, step: int, own_state: State, previous: asyncio.Task[None] | None
    ) -> None:
        """Collect the reports after ``step`` rounds, evaluate all weights and their mean, and record the scores.

        ``own_state`` has the coordinator's weights, and ``previous`` is the evaluation of the report before.
        """
        device = self._mailbox.device
        deadline = device.now() + self._report_timeout
        if previous is not None:
            # One evaluation at a time, since all use the same layers.
            await previous
        states = {device.name: own_state}
        for name in self._others:
            snapshot = await self._mailbox.take(
                Snapshot, (step, name), deadline=deadline
            )
            # The evaluation omits a device that is off or late.
            if snapshot is not None:
                states[name] = snapshot.state
        # Each device counts as one, however many samples it has.
        equal_weights = [1] * len(states)
        mean = average(list(states.values()), equal_weights)
        accuracies = {}
        for name, state in states.items():
            score = await evaluation(self._layers, state, self._tests, step)
            if score.accuracy is not None:
                accuracies[name] = score.accuracy
        # Tensors of timing-only runs have shapes only.
        has_values = not any(tensor.is_meta for tensor in mean.values())
        if has_values:
            device.record(
                "consensus",
                step=step,
                accuracies=accuracies,
                distance=distance([*states.values()], mean),
            )
        score = await evaluation(self._layers, mean, self._tests, step)
        device.record("evaluate", step=step, **score.fields())
        missing = [name for name in self._others if name not in states]
        if missing and has_values:
            device.record("missed", round=step, devices=missing)


def _last_accuracies(record: RunView) -> list[float]:
    """Return the accuracies of the devices' weights in the last evaluation; empty without evaluations."""
    events = record.of("consensus")
    if not events:
        return []
    accuracies: Mapping[str, float] = events[-1].fields["accuracies"]
    return list(accuracies.values())


def _mean_accuracy(record: RunView) -> float | None:
    accuracies = _last_accuracies(record)
    return fmean(accuracies) if accuracies else None


def _least_accuracy(record: RunView) -> float | None:
    return min(_last_accuracies(record), default=None)


def _last_distance(record: RunView) -> float | None:
    events = record.of("consensus")
    return events[-1].fields["distance"] if events else None


CONSENSUS = MetricsSpec(
    metrics=(
        Metric(
            "consensus_distance",
            "number",
            "of the devices' weights from their mean, at the end",
            _last_distance,
        ),
        Metric(
            "mean_device_accuracy",
            "share",
            "of the devices' own weights at the end; `accuracy` is that of their mean",
            _mean_accuracy,
        ),
        Metric(
            "least_device_accuracy",
            "share",
            "of the device with the worst weights at the end",
            _least_accuracy,
        ),
    ),
    events=(
        EventType(
            "consensus",
            "at which the devices' own weights were evaluated",
            ("batch",),
            ("step", "accuracies", "distance"),
        ),
        EventType(
            "missed",
            "weights of devices arrived too late for an evaluation",
            fields=("round", "devices"),
        ),
    ),
    rows=(
        Row(
            "Devices",
            "{mean_device_accuracy}",
            "mean accuracy, the worst {least_device_accuracy}",
        ),
    ),
)
"""Metrics, events and rows of methods with `Consensus`."""
