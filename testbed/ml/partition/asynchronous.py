"""Partitions for asynchronous pipelines by measured times: the dynamic program of FTPipeHD, equations (4) to (7).

The coordinator profiles every unit of the model. The time of a unit on another device is the profiled time multiplied
by the device's capacity, equation (3). Link rates are measured between neighbours: `links_at_rates` replaces the rates
of the scenario by the measured ones.

A batch takes as long as the slowest part of the pipeline: equation (5) minimises the maximum over the stages and the
links between them. The dynamic program itself is `testbed.ml.partition.cuts.best_cuts`; this module gives the costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from testbed.device import Cost
from testbed.hardware import DeviceSpec
from testbed.ml.models.chain import Unit, backward_of, cost_of, forward_of
from testbed.ml.partition.cuts import Costs, Cuts
from testbed.ml.partition.memory import training_bytes
from testbed.ml.partition.pipeline import Chain, TrainingPipeline
from testbed.ml.schedule import Action, Slot, asynchronous_1f1b
from testbed.ml.schedule.versions import max_in_flight, max_versions
from testbed.network.link import Link, Pair
from testbed.wire.message import size_around

Extra = Callable[[int, int, int], float]
"""(stage, first unit, last unit exclusive) -> bytes kept beside the stage's own training, such as replicas."""

Replicas = Callable[[int, int, int], Mapping[int, float]]
"""(stage, first unit, last unit exclusive) -> bytes sent to each keeper stage per batch."""


@dataclass(frozen=True)
class UnitTimes:
    """Seconds of each unit for one batch on the coordinator, in the order of the model."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update: tuple[float, ...]
    """Seconds of an optimizer step, which the paper's execution time T_e leaves out."""

    @cached_property
    def execution(self) -> tuple[float, ...]:
        """Seconds of each unit for forward, backward and update: T_e of the paper plus the update."""
        times = zip(self.forward, self.backward, self.update, strict=True)
        return tuple(map(sum, times))

    @staticmethod
    def by_formula(
        units: Sequence[Unit],
        batch_size: int,
        device: DeviceSpec,
        update_flops: float,
    ) -> UnitTimes:
        """Return the unit times charged on a device; ``update_flops`` is the cost of an update per parameter."""
        forward = []
        backward = []
        update = []
        for unit in units:
            forward_cost = forward_of(unit.cost, batch_size)
            backward_cost = backward_of(unit.cost, batch_size)
            update_cost = Cost(update_flops * unit.parameters)
            forward.append(device.seconds(forward_cost))
            backward.append(device.seconds(backward_cost))
            update.append(device.seconds(update_cost))
        return UnitTimes(tuple(forward), tuple(backward), tuple(update))


@dataclass(frozen=True)
class AsynchronousPipeline(TrainingPipeline):
    """Asynchronous 1F1B training over devices in a row, with an update after each batch.

    `least_bottleneck` returns FTPipeHD's partition.
    """

    # Stages update at different times, so two copies of one weight would drift apart.
    sums_tied = False
    profile: UnitTimes
    """Unit times on the coordinator."""
    capacities: tuple[float, ...]
    """C_i by stage: the time of the stage's device relative to that of the coordinator, for equal work.

    The paper sets C_0 to 1. Here it exceeds 1 while the coordinator is slower than during its profiling.
    """
    window: int | None = None
    """Batches in the pipeline at once, at most one per stage; None for one per stage."""
    vertical_sync: bool = True
    """Whether all stages use the same weight version for a batch, which takes more versions on later stages."""
    counts_traffic: bool = False
    """Whether the bottleneck counts each direction of a link and the replicas, instead of equation (5) as printed."""
    extra: Extra = lambda stage, first, last: 0.0
    """Bytes a stage keeps in addition to its training; nothing by default."""
    replicas: Replicas = lambda stage, first, last: {}
    """Bytes of replicas a stage sends; nothing by default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        has_one_per_stage = len(self.capacities) == len(self.devices)
        if not has_one_per_stage or min(self.capacities) <= 0:
            raise ValueError(
                f"{len(self.devices)} devices need as many capacities above 0, not {self.capacities}"
            )
        if len(self.profile.execution) != len(self.units):
            raise ValueError(
                f"{len(self.units)} units, but a profile of {len(self.profile.execution)}"
            )

    def memory(self, stage: int, first: int, last: int) -> float:
        """Return the bytes that a stage needs with units ``first`` to ``last`` (exclusive)."""
        stages = len(self.devices)
        in_flight = max_in_flight(stages, stage, self.window)
        versions = max_versions(stages, stage, vertical_sync=self.vertical_sync)
        # Fewer batches in the pipeline need fewer versions.
        versions = min(versions, self.window or stages)
        own = training_bytes(
            self.model,
            range(first, last),
            in_flight * self.batch_size,
            self.state_values,
            versions,
            self.devices[stage].precision,
        )
        return own + self.extra(stage, first, last)

    def _with_devices(
        self, devices: tuple[DeviceSpec, ...], links: Mapping[Pair, Link]
    ) -> Chain:
        # The added devices are copies of the last one.
        added = len(devices) - len(self.devices)
        capacities = self.capacities + (self.capacities[-1],) * added
        return replace(self, devices=devices, links=links, capacities=capacities)

    @cached_property
    def _cumulative_times(self) -> dict[str, list[float]]:
        """By kind of action, the seconds of all units before each cut, on the coordinator."""
        times_of_units = {
            "forward": self.profile.forward,
            "backward": self.profile.backward,
            "update": self.profile.update,
        }
        cumulative = {}
        for kind, times in times_of_units.items():
            cumulative[kind] = [0.0, *accumulate(times)]
        return cumulative

    def seconds(self, kind: str, stage: int, first: int, last: int) -> float:
        """Return the seconds of units ``first`` to ``last`` (exclusive) on a stage, by equations (3) and (7).

        ``kind`` is ``forward``, ``backward`` or ``update``.
        """
        before = self._cumulative_times[kind]
        on_coordinator = before[last] - before[first]
        return self.capacities[stage] * on_coordinator

    def forward_time(self, stage: int, first: int, last: int, samples: int) -> float:
        """Return the seconds of a forward of ``samples`` samples."""
        # The profile has whole batches; fewer samples take their share of the time.
        seconds = self.seconds("forward", stage, first, last)
        return seconds * samples / self.batch_size

    def backward_time(self, stage: int, first: int, last: int, samples: int) -> float:
        """Return the seconds of a backward of ``samples`` samples."""
        seconds = self.seconds("backward", stage, first, last)
        return seconds * samples / self.batch_size

    def action_time(self, stage: int, first: int, last: int, action: Action) -> float:
        """Return the seconds of one action of a stage."""
        return self.seconds(action.kind, stage, first, last)

    def stage_time(self, stage: int, first: int, last: int) -> float:
        """Return T(first, last) of equation (7) for a stage and one batch: forward, backward and update."""
        times = []
        for kind in self._cumulative_times:
            times.append(self.seconds(kind, stage, first, last))
        return sum(times)

    @property
    def bottleneck_costs(self) -> Costs:
        """The terms of equation (5): seconds of each stage for one batch, and twice the transfer of activations.

        With ``counts_traffic`` a link counts the larger of its two directions, and a stage its replicas.
        """

        def activations_twice(stage: int, cut: int) -> float:
            # The paper counts the gradients, which return over the same link, as a second transfer in this direction.
            busy, _ = self.transfer(stage, stage + 1, cut, self.batch_size)
            return 2 * busy

        def stage_with_replicas(stage: int, first: int, last: int) -> float:
            computing = self.stage_time(stage, first, last)
            replicating = self._replication_time(stage, first, last)
            # A device computes and sends at the same time, so the longer one counts.
            return max(computing, replicating)

        costs = super().bottleneck_costs
        if self.counts_traffic:
            return replace(costs, stage=stage_with_replicas)
        return replace(costs, boundary=activations_twice)

    def _replication_time(self, stage: int, first: int, last: int) -> float:
        """Return the seconds for one batch of the busiest link carrying a stage's replicas.

        Equation (5) of the paper omits replicas. They share a link with other messages to the same neighbour.
        """
        busiest = 0.0
        own_name = self.devices[stage].name
        for target, size in self.replicas(stage, first, last).items():
            link = self.links.get((own_name, self.devices[target].name))
            if link is None:
                continue
            seconds = link.transmission_time(size_around(size))
            # The next stage also receives activations, and the previous one gradients.
            cut = None
            if target == stage + 1:
                cut = last
            elif target == stage - 1:
                cut = first
            if cut is not None:
                busy, _ = self.transfer(stage, target, cut, self.batch_size)
                seconds += busy
            busiest = max(busiest, seconds)
        return busiest

    def slowest_stage(self, cuts: Cuts) -> float:
        """Return the seconds for one batch of the busiest stage, without links."""
        times = []
        for stage, (first, last) in enumerate(pairwise(cuts)):
            times.append(self.stage_time(stage, first, last))
        return max(times)

    def timeline(self, cuts: Cuts, batches: int) -> list[Slot]:
        """Return the schedule of each stage in a run of ``batches`` batches, in seconds."""
        count = len(self.devices)
        stages = []
        for stage in range(count):
            actions = asynchronous_1f1b(count, stage, batches, self.window)
            stages.append(tuple(actions))
        return self.simulate(cuts, stages)

    def batch_time(self, cuts: Cuts) -> float:
        """Return the predicted seconds between two updates of the first stage in a full pipeline.

        The result is at least the bottleneck, and more if the batches in flight do not cover the round trip of a batch.
        """
        # The first third of the batches fills the pipeline, the last third drains it: the middle one is averaged.
        third = 4 * len(self.devices)
        ends = []
        for slot in self.timeline(cuts, 3 * third):
            if slot.stage == 0 and slot.action.kind == "update":
                ends.append(slot.end)
        begin = ends[third - 1]
        end = ends[2 * third - 1]
        return (end - begin) / third


def links_at_rates(rates: Mapping[Pair, float]) -> dict[Pair, Link]:
    """Return links with these measured rates in bit/s on the wire (infinite: no limit), for planning.

    >>> links_at_rates({("a", "b"): 8e6})["a", "b"].rate
    8000000.0
    """
    links = {}
    for pair, rate in rates.items():
        limit = None if math.isinf(rate) else rate
        links[pair] = Link(limit)
    return links


def relative_capacities(
    devices: Sequence[DeviceSpec], units: Sequence[Unit], batch_size: int
) -> tuple[float, ...]:
    """Return the capacities given by the scenario, relative to the first device: C_i of equation (3).

    A capacity refers to all units together, as in the paper; for single units it is exact if all rates of the devices
    are proportional.

    >>> from testbed.ml.models.catalog import create
    >>> model = create("mlp", {"hidden": [32]}, (1, 8, 8), 10)
    >>> fast = DeviceSpec("fast", speed=2e9, memory=1e9)
    >>> slow = DeviceSpec("slow", speed=1e9, memory=1e9)
    >>> relative_capacities([fast, slow], model.units, batch_size=16)
    (1.0, 2.0)
    """
    one_sample = cost_of(units)
    forward = forward_of(one_sample, batch_size)
    backward = backward_of(one_sample, batch_size)
    batch = forward + backward
    of_coordinator = devices[0].seconds(batch)
    capacities = []
    for device in devices:
        capacities.append(device.seconds(batch) / of_coordinator)
    return tuple(capacities)


def divisible_limit(speeds: Sequence[float]) -> float:
    """Return the slowdown of equal parts relative to optimal parts, for a chain divisible at any point.

    Let the work be 1, and s the ``speeds`` of n devices. With equal parts the slowest device needs the longest time,
    1 / (n min(s)). With optimal parts all devices end together, after 1 / sum(s). Communication is ignored.

    >>> divisible_limit([1.0, 2.0, 3.0])
    2.0
    """
    return sum(speeds) / (len(speeds) * min(speeds))
