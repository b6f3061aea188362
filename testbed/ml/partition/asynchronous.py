"""Partitions for asynchronous pipelines by measured times: the dynamic program of FTPipeHD, equations (4) to (7).

The coordinator profiles every unit of the model: it measures the time of the unit for a batch. The time of the unit on
another device is the profiled time multiplied by the device's capacity, equation (3). Link rates are measured between
neighbours: `links_at_rates` replaces the rates of the scenario by the measured ones.

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
"""(stage, first, stop) -> bytes that the stage keeps in addition to the training of units ``first`` to ``stop``
(exclusive), such as replicas of other stages."""

Replicas = Callable[[int, int, int], Mapping[int, float]]
"""(stage, first, stop) -> replicas of units ``first`` to ``stop`` (exclusive) that the stage sends: by receiving stage,
the bytes per batch."""


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
        times_of_units = zip(self.forward, self.backward, self.update, strict=True)
        return tuple(sum(times) for times in times_of_units)

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

    # Stages update at different times, so two copies of one weight would become different.
    supports_tied_weights = False
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
    extra: Extra = lambda stage, first, stop: 0.0
    """Bytes a stage keeps in addition to its training; nothing by default."""
    replicas: Replicas = lambda stage, first, stop: {}
    """Bytes of replicas a stage sends; nothing by default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        has_one_per_stage = len(self.capacities) == len(self.devices)
        if not has_one_per_stage or min(self.capacities) <= 0:
            raise ValueError(
                f"{len(self.devices)} devices need as many capacities above 0, not {self.capacities}"
            )
        profiled_units = len(self.profile.execution)
        if profiled_units != len(self.units):
            raise ValueError(
                f"the profile must have {len(self.units)} units, not {profiled_units}"
            )

    def memory(self, stage: int, first: int, stop: int) -> float:
        """Return the bytes needed by a stage with units ``first`` to ``stop`` (exclusive)."""
        stages = len(self.devices)
        in_flight = max_in_flight(stages, stage, self.window)
        versions = max_versions(stages, stage, vertical_sync=self.vertical_sync)
        # Fewer batches in the pipeline need fewer versions.
        versions = min(versions, self.window or stages)
        training = training_bytes(
            self.model,
            range(first, stop),
            in_flight * self.batch_size,
            self.state_values,
            versions,
            self.devices[stage].precision,
        )
        return training + self.extra(stage, first, stop)

    def _with_devices(
        self, devices: tuple[DeviceSpec, ...], links: Mapping[Pair, Link]
    ) -> Chain:
        # The added devices are copies of the last one.
        added = len(devices) - len(self.devices)
        capacities = self.capacities + (self.capacities[-1],) * added
        return replace(self, devices=devices, links=links, capacities=capacities)

    @cached_property
    def _cumulative_times(self) -> dict[str, list[float]]:
        """By kind of action, the seconds on the coordinator of all units before each cut."""
        times_of_units = {
            "forward": self.profile.forward,
            "backward": self.profile.backward,
            "update": self.profile.update,
        }
        cumulative = {}
        for kind, times in times_of_units.items():
            cumulative[kind] = [0.0, *accumulate(times)]
        return cumulative

    def seconds(self, kind: str, stage: int, first: int, stop: int) -> float:
        """Return the seconds of units ``first`` to ``stop`` (exclusive) on a stage, by equations (3) and (7).

        ``kind`` is ``forward``, ``backward`` or ``update``.
        """
        cumulative = self._cumulative_times[kind]
        on_coordinator = cumulative[stop] - cumulative[first]
        return self.capacities[stage] * on_coordinator

    def forward_time(self, stage: int, first: int, stop: int, samples: int) -> float:
        """Return the seconds of a forward of ``samples`` samples."""
        # The profile has the times of whole batches; fewer samples take a proportional share.
        seconds = self.seconds("forward", stage, first, stop)
        return seconds * samples / self.batch_size

    def backward_time(self, stage: int, first: int, stop: int, samples: int) -> float:
        """Return the seconds of a backward of ``samples`` samples."""
        seconds = self.seconds("backward", stage, first, stop)
        return seconds * samples / self.batch_size

    def action_time(self, stage: int, first: int, stop: int, action: Action) -> float:
        """Return the seconds of one action of a stage."""
        return self.seconds(action.kind, stage, first, stop)

    def stage_time(self, stage: int, first: int, stop: int) -> float:
        """Return the seconds of a stage for one batch: forward, backward and update, T of equation (7)."""
        times = []
        for kind in self._cumulative_times:
            times.append(self.seconds(kind, stage, first, stop))
        return sum(times)

    @property
    def bottleneck_costs(self) -> Costs:
        """The terms of equation (5): seconds of each stage for one batch, and twice the transfer of activations.

        With ``counts_traffic`` the cost of a link is the larger one of its two directions, and the cost of a stage
        includes the transfer of its replicas.
        """

        def activations_twice(stage: int, cut: int) -> float:
            # The paper counts the gradients, which return over the link, like a second transfer of activations.
            busy, _ = self.transfer_time(stage, stage + 1, cut, self.batch_size)
            return 2 * busy

        def stage_with_replicas(stage: int, first: int, stop: int) -> float:
            computing = self.stage_time(stage, first, stop)
            replicating = self._replication_time(stage, first, stop)
            # A device computes and sends at the same time, so the longer one counts.
            return max(computing, replicating)

        costs = super().bottleneck_costs
        if self.counts_traffic:
            return replace(costs, stage=stage_with_replicas)
        return replace(costs, boundary=activations_twice)

    def _replication_time(self, stage: int, first: int, stop: int) -> float:
        """Return for how many seconds per batch the busiest link is occupied that carries a stage's replicas.

        Equation (5) of the paper omits replicas. They share a link with other messages to the same neighbour.
        """
        busiest = 0.0
        sender = self.devices[stage].name
        for target, size in self.replicas(stage, first, stop).items():
            link = self.links.get((sender, self.devices[target].name))
            if link is None:
                continue
            seconds = link.transmission_time(size_around(size))
            # The link to the next stage also carries activations, and the link to the previous stage gradients.
            cut = None
            if target == stage + 1:
                cut = stop
            elif target == stage - 1:
                cut = first
            if cut is not None:
                busy, _ = self.transfer_time(stage, target, cut, self.batch_size)
                seconds += busy
            busiest = max(busiest, seconds)
        return busiest

    def slowest_stage(self, cuts: Cuts) -> float:
        """Return the slowest stage's seconds of computation for one batch; links do not count."""
        times = []
        for stage, (first, stop) in enumerate(pairwise(cuts)):
            times.append(self.stage_time(stage, first, stop))
        return max(times)

    def timeline(self, cuts: Cuts, batches: int) -> list[Slot]:
        """Return the start and end of all actions in a run of ``batches`` batches, in seconds."""
        stages = len(self.devices)
        actions_of_stages = []
        for stage in range(stages):
            actions = asynchronous_1f1b(stages, stage, batches, self.window)
            actions_of_stages.append(tuple(actions))
        return self.simulate(cuts, actions_of_stages)

    def batch_time(self, cuts: Cuts) -> float:
        """Return the predicted seconds between two updates of the first stage in a full pipeline.

        The result is at least the bottleneck, and more if the batches in flight do not cover the round trip of a batch.
        """
        # The first third of the batches fills the pipeline and the last third drains it, so the result is the mean of
        # the middle third. Four batches per stage are enough for a full pipeline.
        third = 4 * len(self.devices)
        ends = []
        for slot in self.timeline(cuts, batches=3 * third):
            if slot.stage == 0 and slot.action.kind == "update":
                ends.append(slot.end)
        first_third_end = ends[third - 1]
        second_third_end = ends[2 * third - 1]
        return (second_third_end - first_third_end) / third


def links_at_rates(rates: Mapping[Pair, float]) -> dict[Pair, Link]:
    """Return links with measured rates, in bit/s on the wire, as planners use them; infinity means no limit.

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
    """Return the capacities by the scenario's device properties, relative to the first device: C_i of equation (3).

    A capacity is a ratio of times for all units together, as in the paper. The ratio for a single unit may differ if
    one device has a larger ratio of memory rate to speed than another.

    >>> from testbed.ml.models.catalog import create
    >>> model = create("mlp", {"hidden": [32]}, (1, 8, 8), 10)
    >>> fast = DeviceSpec("fast", speed=2e9, memory=1e9)
    >>> slow = DeviceSpec("slow", speed=1e9, memory=1e9)
    >>> relative_capacities([fast, slow], model.units, batch_size=16)
    (1.0, 2.0)
    """
    sample_cost = cost_of(units)
    forward = forward_of(sample_cost, batch_size)
    backward = backward_of(sample_cost, batch_size)
    batch_cost = forward + backward
    coordinator_seconds = devices[0].seconds(batch_cost)
    capacities = []
    for device in devices:
        capacities.append(device.seconds(batch_cost) / coordinator_seconds)
    return tuple(capacities)


def divisible_limit(speeds: Sequence[float]) -> float:
    """Return by which factor an even partition is slower than the best one, if a model could be cut at any point.

    Let the work be 1, and s the ``speeds`` of n devices. With equal parts the slowest device needs the longest time,
    1 / (n min(s)). With optimal parts all devices finish together, after 1 / sum(s). Communication is ignored.

    >>> divisible_limit([1.0, 2.0, 3.0])
    2.0
    """
    return sum(speeds) / (len(speeds) * min(speeds))
