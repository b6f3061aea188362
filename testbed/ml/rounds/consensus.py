"""Evaluation without a server: each device has its own weights, and the plan's coordinator scores all of them."""

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
    """To the coordinator: a device's weights after a number of rounds."""

    step: int
    state: State


def distance(states: Sequence[State], mean: State) -> float:
    """Return the distance of the devices' weights from the mean: the root of the mean squared Euclidean distance.

    ``states`` has the weights of each device, and ``mean`` the mean of all.

    >>> import torch
    >>> states = [{"w": torch.tensor([0.0])}, {"w": torch.tensor([6.0])}]
    >>> distance(states, {"w": torch.tensor([3.0])})
    3.0
    """
    squares = []
    for state in states:
        square = 0.0
        for name, tensor in mean.items():
            # Counters, such as the number of batches seen, have no distance.
            if tensor.is_floating_point():
                difference = state[name] - tensor
                square += float((difference**2).sum())
        squares.append(square)
    return math.sqrt(fmean(squares))


class Consensus:
    """Evaluation of a method without a server: the coordinator scores every device's weights and the mean weights.

    The coordinator does this beside its own training. Every device calls `report` after the same rounds, and `finish`
    at the end.
    """

    def __init__(
        self, mailbox: Mailbox, context: ProgramContext, report_timeout: float
    ) -> None:
        """``report_timeout``: seconds after its own report that the coordinator waits for the other reports."""
        self._mailbox = mailbox
        self._coordinator = context.plan.coordinator
        self._others = []
        for name in context.plan.devices:
            if name != self._coordinator:
                self._others.append(name)
        self._report_timeout = report_timeout
        self._scoring: asyncio.Task[None] | None = None
        if mailbox.device.name == self._coordinator:
            assert context.dataset is not None
            units = len(context.problem.model.units)
            self._layers = Layers(mailbox.device, context.problem, 0, units)
            self._tests = Requests(context.dataset, context.problem.workload.batch_size)

    async def report(self, step: int, state: State) -> None:
        """Send a device's weights after a round to the coordinator, which scores incoming weights in the background."""
        if self._mailbox.device.name != self._coordinator:
            self._mailbox.post(self._coordinator, Snapshot(step, state))
        else:
            self._scoring = self._mailbox.start(
                self._score_round(step, state, self._scoring)
            )

    async def finish(self) -> None:
        """On the coordinator, return once all reports are scored; elsewhere, stay until the end of the run."""
        if self._scoring is None:
            # A future without a result: the runtime cancels the program at the end of the run.
            await asyncio.get_running_loop().create_future()
        else:
            await self._scoring

    async def _score_round(
        self, step: int, own: State, before: asyncio.Task[None] | None
    ) -> None:
        """Collect the reports of a round in which ``own`` are the coordinator's weights; record the scores.

        ``before`` is the scoring of the previous round.
        """
        device = self._mailbox.device
        deadline = device.now() + self._report_timeout
        if before is not None:
            # Rounds are scored one after the other, since all use the same layers.
            await before
        states = {device.name: own}
        for name in self._others:
            snapshot = await self._mailbox.take(
                Snapshot, (step, name), deadline=deadline
            )
            # A device that is off or late is left out, and recorded below.
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
        # Timing-only runs have shapes without values.
        has_numbers = not any(tensor.is_meta for tensor in mean.values())
        if has_numbers:
            device.record(
                "consensus",
                step=step,
                accuracies=accuracies,
                distance=distance([*states.values()], mean),
            )
        score = await evaluation(self._layers, mean, self._tests, step)
        device.record("evaluate", step=step, **score.fields())
        missed = [name for name in self._others if name not in states]
        if missed and has_numbers:
            device.record("missed", round=step, devices=missed)


def _last_accuracies(record: RunView) -> list[float]:
    """Return the accuracies of the devices' weights in the last scored round; empty without rounds."""
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
