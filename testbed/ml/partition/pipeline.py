"""Partitions of a model over devices in a row: planned, checked against device memory, and timed by formula.

The times equal those charged by the testbed: `DeviceSpec.seconds`, bytes on the wire over the link's rate, and
the link's one-way delay. Each direction of a link has its own rate, so activations and gradients do not share it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import ClassVar

from testbed.common import formats
from testbed.common.errors import InputError
from testbed.device import Cost
from testbed.hardware import DeviceSpec
from testbed.ml.data.batches import cut_batch
from testbed.ml.models.chain import Model, Tied, Unit, backward_of, forward_of
from testbed.ml.models.shapes import BYTES_PER_VALUE
from testbed.ml.partition import cuts as cutting
from testbed.ml.partition.cuts import Costs, Cuts
from testbed.ml.partition.memory import inference_bytes, training_bytes
from testbed.ml.schedule import Action, Schedule, Slot, in_flight, orders, play
from testbed.network.link import Link, Pair
from testbed.wire.message import size_around

OfStage = Callable[[int, int, int], float]
"""(stage, first unit, last unit exclusive) -> demand of the units on the stage."""


@dataclass(frozen=True)
class Chain:
    """The units of a model over devices in a row, one stage each, with the costs of a batch."""

    model: Model
    devices: tuple[DeviceSpec, ...]
    """Devices in the order of the stages."""
    links: Mapping[Pair, Link]
    batch_size: int
    shares: tuple[float, float] = field(default=(1.0, 1.0), kw_only=True)
    """Transmitted bytes for each byte of activations and of their gradients."""

    sums_tied: ClassVar[bool] = True
    """Whether stages with copies of one weight train them as a single weight."""

    def __post_init__(self) -> None:
        cutting.check_counts(len(self.units), len(self.devices))
        for one, other in pairwise(self.devices):
            for pair in ((one.name, other.name), (other.name, one.name)):
                if pair not in self.links:
                    raise InputError(
                        f"{pair[0]} and {pair[1]} hold neighbouring stages, but no link leads from {pair[0]} to "
                        f"{pair[1]}: add one, or list the devices in the order in which they are linked",
                        ("network", "topology"),
                    )

    @property
    def units(self) -> tuple[Unit, ...]:
        """Number of units."""
        return self.model.units

    @cached_property
    def _cumulative_costs(self) -> list[Cost]:
        """Cost of a forward of one sample, up to each cut."""
        return [Cost(), *accumulate(unit.cost for unit in self.units)]

    @cached_property
    def _cumulative_parameters(self) -> list[int]:
        return [0, *accumulate(unit.parameters for unit in self.units)]

    def forward_time(self, stage: int, first: int, last: int, samples: int) -> float:
        """Return the seconds of a forward of units ``first`` to ``last`` (exclusive)."""
        return self.devices[stage].seconds(
            forward_of(
                self._cumulative_costs[last] - self._cumulative_costs[first], samples
            )
        )

    def backward_time(self, stage: int, first: int, last: int, samples: int) -> float:
        """Return the seconds of a backward."""
        return self.devices[stage].seconds(
            backward_of(
                self._cumulative_costs[last] - self._cumulative_costs[first], samples
            )
        )

    def transfer(
        self, source: int, target: int, cut: int, samples: int
    ) -> tuple[float, float]:
        """Return the seconds a link is busy with the tensors of a cut, and its delay; equal for activation and
        gradient.
        """
        link = self.links[self.devices[source].name, self.devices[target].name]
        return link.transmission_time(
            size_around(
                samples * self.model.cut_bytes(cut) * self.shares[source > target]
            )
        ), link.delay

    def memory(self, stage: int, first: int, last: int) -> float:
        """Return the bytes needed by units ``first`` to ``last`` (exclusive) as this stage."""
        return inference_bytes(
            self.model,
            range(first, last),
            self.batch_size,
            self.devices[stage].precision,
        )

    @cached_property
    def _stage_memory(self) -> OfStage:
        return cache(self.memory)

    def _fitting_costs(self, costs: Costs) -> Costs:
        """Forbid stages exceeding their device's memory."""

        def stage(index: int, first: int, last: int) -> float:
            fits = self._stage_memory(index, first, last) <= self.devices[index].memory
            return costs.stage(index, first, last) if fits else math.inf

        def boundary(index: int, cut: int) -> float:
            return math.inf if self._tied_across(cut) else costs.boundary(index, cut)

        return Costs(stage, boundary)

    def _tied_across(self, cut: int) -> Tied | None:
        """Return a weight shared by stages on both sides of a cut, if unsupported; None if the cut is allowed."""
        return None if self.sums_tied else self.model.tied_across(cut)

    def _check_tied(self, cuts: Cuts) -> None:
        """Raise `InputError` for cuts between units sharing weights."""
        for cut in cuts[1:-1]:
            if (tied := self._tied_across(cut)) is not None:
                units = " and ".join(self.units[unit].name for unit in tied.units)
                raise InputError(
                    f"units {units} share a weight ({tied.title}), and stages that update at different times cannot "
                    "have a copy each: take pipeline, gpipe or model-parallelism, untie them, or use fewer stages",
                    ("method", "stages"),
                )

    @cached_property
    def fullness(self) -> tuple[float, Cuts]:
        """The smallest possible memory use of the fullest device, as a fraction, with its cuts."""

        def stage(index: int, first: int, last: int) -> float:
            return self._stage_memory(index, first, last) / self.devices[index].memory

        return cutting.best(
            len(self.units),
            len(self.devices),
            Costs(stage, lambda _stage, _cut: 0.0),
            max,
        )

    def check(self, cuts: Cuts) -> None:
        """Raise `InputError` for a stage exceeding its device's memory, with a remedy."""
        shares = [
            self._stage_memory(stage, first, last) / self.devices[stage].memory
            for stage, (first, last) in enumerate(pairwise(cuts))
        ]
        fullest = max(range(len(shares)), key=shares.__getitem__)
        if shares[fullest] <= 1:
            return
        first, last = cuts[fullest : fullest + 2]
        device, need = self.devices[fullest], self._stage_memory(fullest, first, last)
        names = self.units[first].name + (
            "" if last == first + 1 else f" to {self.units[last - 1].name}"
        )
        raise InputError(
            f"{device.name} has {formats.size(device.memory)} of memory, but its part of the model ({names}) needs "
            f"{formats.size(need)} at batch_size {self.batch_size}: {self._what_fits()}",
            ("devices", device.name, "memory"),
        )

    def _what_fits(self) -> str:
        if self.fullness[0] <= 1:
            return "an optimal partition would fit"
        ways = []
        smaller = range(1, self.batch_size)
        batch_size = bisect(
            smaller, False, key=lambda size: self._with_batch(size).fullness[0] > 1
        )
        if batch_size:
            ways.append(f"a batch_size of at most {batch_size} fits")
        devices = self._enough_devices()
        if devices:
            ways.append(
                f"{devices} devices fit, the added ones like {self.devices[-1].name}"
            )
        return ", or ".join(ways) or (
            "no smaller batch and no number of such devices fits; it takes devices with more memory or a smaller model"
        )

    def _with_batch(self, batch_size: int) -> Chain:
        return replace(self, batch_size=batch_size)

    def _enough_devices(self) -> int:
        """Return how many devices would hold the model, extra ones being copies of the last; 0 if no number
        suffices.
        """
        last = self.devices[-1]
        for count in range(len(self.devices) + 1, len(self.units) + 1):
            added = tuple(
                replace(last, name=f"{last.name}+{index}")
                for index in range(len(self.devices), count)
            )
            devices = self.devices + added
            links = {
                pair: Link()
                for one, other in pairwise(d.name for d in devices)
                for pair in ((one, other), (other, one))
            }
            if self._with_devices(devices, links).fullness[0] <= 1:
                return count
        return 0

    def _with_devices(
        self, devices: tuple[DeviceSpec, ...], links: Mapping[Pair, Link]
    ) -> Chain:
        """Return the same chain over these devices and some more at the end."""
        return replace(self, devices=devices, links=links)

    @property
    def latency_costs(self) -> Costs:
        """Summands of the time of one batch forward through all stages."""

        def stage(index: int, first: int, last: int) -> float:
            return self.forward_time(index, first, last, self.batch_size)

        def boundary(index: int, cut: int) -> float:
            return sum(self.transfer(index, index + 1, cut, self.batch_size))

        return Costs(stage, boundary)

    def latency(self, cuts: Cuts) -> float:
        """Return the seconds of one batch through all stages, without the transfers of input and result."""
        return self.latency_costs.of(cuts, lambda one, other: one + other)

    def least_latency(self) -> Cuts:
        """Return the fitting partition with the least latency; raises `InputError` if none fits."""
        return self._check_optimum(
            cutting.least_total(
                len(self.units),
                len(self.devices),
                self._fitting_costs(self.latency_costs),
            )
        )

    @property
    def passage_costs(self) -> Costs:
        """Summands of the time of a single batch, or micro-batch, through the whole pipeline."""
        return self.latency_costs

    @property
    def bottleneck_costs(self) -> Costs:
        """Busy seconds of each stage and link for one batch; a link's delay does not count as busy."""

        def boundary(stage: int, cut: int) -> float:
            return self.transfer(stage, stage + 1, cut, self.batch_size)[0]

        return replace(self.latency_costs, boundary=boundary)

    def bottleneck(self, cuts: Cuts) -> float:
        """Return the seconds of the busiest stage or link per batch or micro-batch: the pace of a full pipeline."""
        return self.bottleneck_costs.of(cuts, max)

    def least_bottleneck(self) -> Cuts:
        """Return the fitting cuts of least bottleneck, then quickest passage; raises `InputError` if none fit."""
        fitting = self._fitting_costs(self.bottleneck_costs)
        best = cutting.least_bottleneck(
            len(self.units), len(self.devices), fitting, self.passage_costs
        )
        return self._check_optimum(best)

    def even(self) -> Cuts:
        """Return even cuts; raises `InputError` if they do not fit."""
        cuts = cutting.even(len(self.units), len(self.devices))
        self.check(cuts)
        self._check_tied(cuts)
        return cuts

    def _check_optimum(self, best: tuple[float, Cuts]) -> Cuts:
        cost, cuts = best
        if math.isinf(cost):
            self.check(self.fullness[1])
            self._check_tied(cuts)
        return cuts


@dataclass(frozen=True)
class TrainingPipeline(Chain):
    """Training over devices in a row: activations flow forward, gradients backward."""

    state_values: float = field(default=0, kw_only=True)

    @property
    def samples(self) -> int:
        """Maximum number of samples passing together."""
        return self.batch_size

    @abstractmethod
    def stage_time(self, stage: int, first: int, last: int) -> float:
        """Return the seconds of a stage per batch or micro-batch: forward, backward and a share of the update."""

    @abstractmethod
    def action_time(self, stage: int, first: int, last: int, action: Action) -> float:
        """Return the seconds of one action of a stage."""

    def samples_of(self, action: Action) -> int:
        """Return the number of samples of an action."""
        return self.samples

    @property
    def bottleneck_costs(self) -> Costs:
        """Busy seconds of each stage and each direction of a link, per batch or micro-batch."""

        def boundary(stage: int, cut: int) -> float:
            there, _ = self.transfer(stage, stage + 1, cut, self.samples)
            back, _ = self.transfer(stage + 1, stage, cut, self.samples)
            return max(there, back)

        return Costs(cache(self.stage_time), boundary)

    @property
    def passage_costs(self) -> Costs:
        """Summands of the time of a batch or micro-batch forward through all stages and back."""

        def boundary(stage: int, cut: int) -> float:
            ways = ((stage, stage + 1), (stage + 1, stage))
            return sum(sum(self.transfer(*way, cut, self.samples)) for way in ways)

        return Costs(cache(self.stage_time), boundary)

    def played(self, cuts: Cuts, stages: Sequence[Sequence[Action]]) -> list[Slot]:
        """Simulate the schedule; return the times of each stage's actions, in seconds."""

        def duration(stage: int, action: Action) -> float:
            first, last = cuts[stage : stage + 2]
            return self.action_time(stage, first, last, action)

        def transfer(stage: int, action: Action) -> tuple[float, float]:
            forward = action.kind == "forward"
            target, cut = (
                (stage + 1, cuts[stage + 1]) if forward else (stage - 1, cuts[stage])
            )
            return self.transfer(stage, target, cut, self.samples_of(action))

        return play(stages, duration, transfer)


@dataclass(frozen=True)
class SynchronousPipeline(TrainingPipeline):
    """Training in a synchronous pipeline: micro-batches forward and back by a schedule, then one update."""

    micro_batches: int
    schedule: Schedule
    update_flops: float = 2.0
    """Cost of an update in FLOPs per parameter."""
    recompute: bool = False
    """Whether all stages but the last forward a second time before they backward, instead of keeping activations."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.micro_batches <= self.batch_size:
            raise InputError(
                f"a batch of {self.batch_size} cannot be cut into {self.micro_batches} micro-batches: "
                f"use 1 to {self.batch_size}",
                ("method", "micro_batches"),
            )

    @cached_property
    def _sizes(self) -> list[int]:
        return [
            part.stop - part.start
            for part in cut_batch(self.batch_size, self.micro_batches)
        ]

    @cached_property
    def _in_flight(self) -> list[int]:
        """Maximum number of samples kept by each stage."""
        kept = (
            in_flight(actions)
            for actions in orders(self.schedule, len(self.devices), self.micro_batches)
        )
        return [sum(self._sizes[:count]) for count in kept]

    def memory(self, stage: int, first: int, last: int) -> float:
        """Return the bytes needed by units ``first`` to ``last`` (exclusive) as this stage."""
        units, samples, precision = (
            range(first, last),
            self._in_flight[stage],
            self.devices[stage].precision,
        )
        if self._repeats_forward(stage):
            inputs = self.units[first].input_bytes * samples
            return (
                training_bytes(
                    self.model,
                    units,
                    self._sizes[0],
                    self.state_values,
                    precision=precision,
                )
                + inputs
            )
        return training_bytes(
            self.model, units, samples, self.state_values, precision=precision
        )

    def _repeats_forward(self, stage: int) -> bool:
        return self.recompute and stage + 1 < len(self.devices)

    def backward_time(self, stage: int, first: int, last: int, samples: int) -> float:
        """Return the seconds of a backward, including a repeated forward if activations are not kept."""
        again = (
            self.forward_time(stage, first, last, samples)
            if self._repeats_forward(stage)
            else 0.0
        )
        return super().backward_time(stage, first, last, samples) + again

    def _with_batch(self, batch_size: int) -> Chain:
        return replace(
            self,
            batch_size=batch_size,
            micro_batches=min(self.micro_batches, batch_size),
        )

    def update_time(self, stage: int, first: int, last: int) -> float:
        """Return the seconds of the update at the end of a step."""
        return self.devices[stage].seconds(
            Cost(
                self.update_flops
                * (
                    self._cumulative_parameters[last]
                    - self._cumulative_parameters[first]
                )
            )
        )

    @property
    def samples(self) -> int:
        """Size of the largest micro-batch."""
        return self._sizes[0]

    def stage_time(self, stage: int, first: int, last: int) -> float:
        """Return the seconds of forward and backward of the largest micro-batch, and of its share of the update."""
        ends, samples = (stage, first, last), self.samples
        compute = self.forward_time(*ends, samples) + self.backward_time(*ends, samples)
        return compute + self.update_time(*ends) / self.micro_batches

    def samples_of(self, action: Action) -> int:
        """Return the size of an action's micro-batch."""
        return self._sizes[action.micro % self.micro_batches]

    def action_time(self, stage: int, first: int, last: int, action: Action) -> float:
        """Return the seconds of one action of a stage."""
        if action.kind == "update":
            return self.update_time(stage, first, last)
        time = self.forward_time if action.kind == "forward" else self.backward_time
        return time(stage, first, last, self.samples_of(action))

    def least_step_time(self) -> Cuts:
        """Return the fitting partition with the least predicted `step_time`, among the trade-offs of two costs.

        A short pipeline with few micro-batches spends much of a step filling and draining, when the passage matters
        more than the bottleneck. Therefore all partitions with the best passage for some bottleneck are timed. Raises
        `InputError` if none fits.
        """
        fitting = self._fitting_costs(self.bottleneck_costs)
        candidates = cutting.trade_offs(
            len(self.units), len(self.devices), fitting, self.passage_costs
        )
        if not candidates:
            self.check(self.fullness[1])
        return min(candidates, key=self.step_time)

    def timeline(self, cuts: Cuts, steps: int = 1) -> list[Slot]:
        """Return the times of each stage's actions over several consecutive steps, in seconds.

        Micro-batches are numbered through all steps. The first stage starts a step after its update.
        """
        count = self.micro_batches
        stages = [
            [
                action
                for step in range(steps)
                for action in (
                    *(
                        Action(action.kind, step * count + action.micro)
                        for action in actions
                    ),
                    Action("update", step),
                )
            ]
            for actions in orders(self.schedule, len(self.devices), count)
        ]
        return self.played(cuts, stages)

    def step_time(self, cuts: Cuts) -> float:
        """Return the predicted seconds between the starts of two steps: the critical path of the schedule."""
        starts = [
            slot.start
            for slot in self.timeline(cuts, steps=3)
            if slot.stage == 0
            and slot.action.kind == "forward"
            and slot.action.micro % self.micro_batches == 0
        ]
        return starts[2] - starts[1] + self._tied_time(cuts)

    def _tied_time(self, cuts: Cuts) -> float:
        """Return the seconds added to a step by the exchange of tied gradients.

        The first stage with a tied weight waits for the gradients of the others, which follow those of activations on
        their way; the others receive the sum before the next step, because its activations follow the sum.
        """
        sizes: dict[tuple[int, int], int] = {}
        for tied in self.model.tied:
            first, *others = tied.holders(cuts[:-1])
            for other in others:
                sizes[first, other] = (
                    sizes.get((first, other), 0) + BYTES_PER_VALUE * tied.values
                )
        waits, shifts = [0.0], [0.0]
        slots = self.timeline(cuts) if sizes else []
        for (first, other), size in sizes.items():
            begun = min(slot.start for slot in slots if slot.stage == other)
            ready, last = (
                max(
                    slots,
                    key=lambda slot: (
                        slot.stage == stage and slot.action.kind == "backward",
                        slot.end,
                    ),
                )
                for stage in (first, other)
            )
            sent = max(last.end, ready.start) if other == first + 1 else last.end
            waits.append(
                sent + sum(self._tied_transfer(other, first, size)) - ready.end
            )
            busy, delay = self._tied_transfer(first, other, size)
            updated = (
                self.update_time(stage, *cuts[stage : stage + 2])
                for stage in (first, other)
            )
            mine, theirs = updated
            shifts.append(busy + delay + theirs - mine - begun)
            if other == first + 1:
                shifts.append(
                    busy
                    - mine
                    - self.forward_time(
                        first, cuts[first], cuts[first + 1], self.samples
                    )
                )
        return max(waits) + max(shifts)

    def _tied_transfer(
        self, source: int, target: int, size: int
    ) -> tuple[float, float]:
        """Return how long gradients of tied weights keep a link busy, and its delay; raises `InputError`."""
        pair = self.devices[source].name, self.devices[target].name
        if pair not in self.links:
            raise InputError(
                f"{pair[0]} and {pair[1]} use the same weights ({self.model.tied[0].title}) and send each other "
                f"gradients, but no link leads from {pair[0]} to {pair[1]}: use the topology mesh or add the link",
                ("network", "topology"),
            )
        return self.links[pair].transmission_time(size_around(size)), self.links[
            pair
        ].delay
