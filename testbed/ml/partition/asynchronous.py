"""Partitions for asynchronous pipelines by measured times: the dynamic program of FTPipeHD, equations (4) to (7).

The coordinator profiles the whole model; a unit's time on another device is the profiled time multiplied by the
device's capacity, equation (3). Link rates are measured between neighbours: `links_at_rates` replaces the scenario's
rates by the measured ones.
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
    """Seconds of each unit for one batch on the coordinator."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update: tuple[float, ...]

    @cached_property
    def execution(self) -> tuple[float, ...]:
        """Seconds of each unit for forward, backward and update: T_e of the paper plus the update."""
        times = zip(self.forward, self.backward, self.update, strict=True)
        return tuple(map(sum, times))

    @staticmethod
    def by_formula(
        units: Sequence[Unit], batch_size: int, device: DeviceSpec, update_flops: float
    ) -> UnitTimes:
        """Return the unit times the testbed charges this device."""
        forward = []
        backward = []
        update = []
        for unit in units:
            forward.append(device.seconds(forward_of(unit.cost, batch_size)))
            backward.append(device.seconds(backward_of(unit.cost, batch_size)))
            update.append(device.seconds(Cost(update_flops * unit.parameters)))
        return UnitTimes(tuple(forward), tuple(backward), tuple(update))


@dataclass(frozen=True)
class AsynchronousPipeline(TrainingPipeline):
    """Asynchronous 1F1B training over devices in a row, with an update after each batch.

    Its `least_bottleneck` is FTPipeHD's partition.
    """

    sums_tied = False
    profile: UnitTimes
    capacities: tuple[float, ...]
    """C_i: how many times as long as the coordinator a device takes; the first stage's is 1 while nothing slows it."""
    window: int | None = None
    """Batches in the pipeline at once, at most one per stage; None for one per stage."""
    vertical_sync: bool = True
    counts_traffic: bool = False
    """Whether the bottleneck counts each direction of a link and the replicas, instead of equation (5) as printed."""
    extra: Extra = lambda stage, first, last: 0.0
    replicas: Replicas = lambda stage, first, last: {}

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.capacities) != len(self.devices) or min(self.capacities) <= 0:
            raise ValueError(
                f"{len(self.devices)} devices need as many capacities above 0, not {self.capacities}"
            )
        if len(self.profile.execution) != len(self.units):
            raise ValueError(
                f"{len(self.units)} units, but a profile of {len(self.profile.execution)}"
            )

    def memory(self, stage: int, first: int, last: int) -> float:
        """Return the bytes needed by units ``first`` to ``last`` (exclusive) as this stage."""
        stages = len(self.devices)
        versions = max_versions(stages, stage, vertical_sync=self.vertical_sync)
        own = training_bytes(
            self.model,
            range(first, last),
            max_in_flight(stages, stage, self.window) * self.batch_size,
            self.state_values,
            min(versions, self.window or stages),
            self.devices[stage].precision,
        )
        return own + self.extra(stage, first, last)

    def _with_devices(
        self, devices: tuple[DeviceSpec, ...], links: Mapping[Pair, Link]
    ) -> Chain:
        # The added devices are copies of the last one.
        added = (self.capacities[-1],) * (len(devices) - len(self.devices))
        capacities = self.capacities + added
        return replace(self, devices=devices, links=links, capacities=capacities)

    @cached_property
    def _cumulative_times(self) -> dict[str, list[float]]:
        kinds = {
            "forward": self.profile.forward,
            "backward": self.profile.backward,
            "update": self.profile.update,
        }
        return {kind: [0.0, *accumulate(times)] for kind, times in kinds.items()}

    def seconds(self, kind: str, stage: int, first: int, last: int) -> float:
        """Return the seconds of units ``first`` to ``last`` (exclusive) on this stage, by equations (3) and (7)."""
        sums = self._cumulative_times[kind]
        return self.capacities[stage] * (sums[last] - sums[first])

    def forward_time(self, stage: int, first: int, last: int, samples: int) -> float:
        """Return the seconds of a forward of ``samples`` samples."""
        return self.seconds("forward", stage, first, last) * samples / self.batch_size

    def backward_time(self, stage: int, first: int, last: int, samples: int) -> float:
        """Return the seconds of a backward of ``samples`` samples."""
        return self.seconds("backward", stage, first, last) * samples / self.batch_size

    def action_time(self, stage: int, first: int, last: int, action: Action) -> float:
        """Return the seconds of one action of a stage."""
        return self.seconds(action.kind, stage, first, last)

    def stage_time(self, stage: int, first: int, last: int) -> float:
        """Return T(first, last) of a stage for one batch: forward, backward and update."""
        return sum(
            self.seconds(kind, stage, first, last) for kind in self._cumulative_times
        )

    @property
    def bottleneck_costs(self) -> Costs:
        """The parts of equation (5): the seconds of each stage for one batch, and twice those of its activations.

        With ``counts_traffic`` a link counts the larger of its two directions, and a stage its replicas.
        """

        def activations_twice(stage: int, cut: int) -> float:
            return 2 * self.transfer(stage, stage + 1, cut, self.batch_size)[0]

        def stage_with_replicas(stage: int, first: int, last: int) -> float:
            return max(
                self.stage_time(stage, first, last),
                self._replication_time(stage, first, last),
            )

        costs = super().bottleneck_costs
        if self.counts_traffic:
            return replace(costs, stage=stage_with_replicas)
        return replace(costs, boundary=activations_twice)

    def _replication_time(self, stage: int, first: int, last: int) -> float:
        """Return the seconds for one batch of the busiest link carrying a stage's replicas.

        The paper's equation (5) omits replicas. They share a link with other messages to the same neighbour.
        """
        busiest = 0.0
        for target, size in self.replicas(stage, first, last).items():
            link = self.links.get((self.devices[stage].name, self.devices[target].name))
            if link is None:
                continue
            seconds = link.transmission_time(size_around(size))
            if target == stage + 1:
                seconds += self.transfer(stage, target, last, self.batch_size)[0]
            elif target == stage - 1:
                seconds += self.transfer(stage, target, first, self.batch_size)[0]
            busiest = max(busiest, seconds)
        return busiest

    def slowest_stage(self, cuts: Cuts) -> float:
        """Return the seconds for one batch of the busiest stage, without links."""
        return max(
            self.stage_time(stage, *ends) for stage, ends in enumerate(pairwise(cuts))
        )

    def timeline(self, cuts: Cuts, batches: int) -> list[Slot]:
        """Return the schedule of each stage in a run of ``batches`` batches, in seconds."""
        count = len(self.devices)
        stages = [
            tuple(asynchronous_1f1b(count, stage, batches, self.window))
            for stage in range(count)
        ]
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
        return (ends[2 * third - 1] - ends[third - 1]) / third


def links_at_rates(rates: Mapping[Pair, float]) -> dict[Pair, Link]:
    """Return links with these measured rates in bit/s on the wire (infinite: no limit), for planning.

    >>> links_at_rates({("a", "b"): 8e6})["a", "b"].rate
    8000000.0
    """
    links = {}
    for pair, rate in rates.items():
        links[pair] = Link(None if math.isinf(rate) else rate)
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
    sample = cost_of(units)
    batch = forward_of(sample, batch_size) + backward_of(sample, batch_size)
    seconds = [device.seconds(batch) for device in devices]
    return tuple(each / seconds[0] for each in seconds)


def divisible_limit(speeds: Sequence[float]) -> float:
    """Return the slowdown of equal parts relative to optimal ones, for a chain divisible at any point.

    Equal: 1/n of the work on the slowest, 1 / (n s_min). Optimal: all end together, 1 / sum(s). Communication is
    ignored.

    >>> divisible_limit([1.0, 2.0, 3.0])
    2.0
    """
    return sum(speeds) / (len(speeds) * min(speeds))
