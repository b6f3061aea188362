"""FTPipeHD (Chen et al.): asynchronous 1F1B with a partition that follows measured devices, and recovery of lost ones.

Equations and sections are those of the paper. The pipeline, replication and recovery are the testbed's; this module
adds the capacities of devices, the measured links, and the rule that decides when the partition changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import ClassVar, Literal

from pydantic import Field

from testbed.common.errors import InputError
from testbed.ml.data.batches import is_due
from testbed.ml.method import PlanningProblem
from testbed.ml.partition import Cuts
from testbed.ml.partition.asynchronous import (
    AsynchronousPipeline,
    UnitTimes,
    links_at_rates,
)
from testbed.ml.partition.redistribution import StagePartition
from testbed.ml.pipeline.method import AsynchronousMethod
from testbed.ml.pipeline.planning import (
    RESUME_HELP,
    AsynchronousOptions,
    Partitioner,
    pipeline_over,
)
from testbed.network.link import Link, Pair


class FTPipeHDOptions(AsynchronousOptions):
    """Options of FTPipeHD; defaults are the values of Section IV-B of the paper."""

    former_keys: ClassVar[Mapping[str, str]] = {
        **AsynchronousOptions.former_keys,
        "least_gain": "min_improvement",
    }
    # Section III-C: "we aggregate the n - i weights at an interval which is a multiple of n - i".
    aggregation_interval: int = Field(
        1,
        ge=0,
        description="weight aggregation: stage i of n averages its versions every aggregation_interval * (n - i) "
        "batches; 0: never",
    )
    resume: Literal["next-batch", "last-replica"] = Field(
        "next-batch", description=RESUME_HELP
    )
    profile_runs: int = Field(
        10,
        ge=1,
        description="number of times that the first device runs each unit before training, to measure its time",
    )
    # Section III-D: "after training 10 batches at epoch 0 [...] and then performs every 100 batches".
    repartition_first: int = Field(
        10,
        ge=0,
        description="number of batches after which a better partition is searched for the first time; 0: no such time",
    )
    repartition_every: int = Field(
        100,
        ge=0,
        description="interval in batches between later searches for a better partition; 0: never",
    )
    min_improvement: float = Field(
        0.02,
        ge=0,
        lt=1,
        description="minimum reduction of the bottleneck for which the partition changes, as a share of the bottleneck",
    )


class AdaptivePartitioner(Partitioner[FTPipeHDOptions]):
    """Partitions by equations (4) to (7) with measured unit times, capacities of devices and rates of links.

    A unit is the smallest part of the model that moves as a whole. The capacity C_i of a device is its time divided by
    the coordinator's for the same units: a capacity of 10 is a device with a tenth of the coordinator's speed. Before
    the first measurement all devices have the same capacity, as in Section III-B. The partitioner that counts is the
    one of the coordinator, the paper's central node.
    """

    def __init__(self, problem: PlanningProblem[FTPipeHDOptions]) -> None:
        super().__init__(problem)
        self._profile: UnitTimes | None = None
        """Measured seconds of each unit on the coordinator; None before the measurement."""
        self._rates: dict[Pair, float] = {}
        """Measured bit/s of each link, by sender and receiver."""
        self._capacities: dict[str, float] = {}
        """Measured capacity of each device."""
        self.profile_runs = problem.options.profile_runs

    def store_profile(self, profile: UnitTimes) -> None:
        """Store the seconds of each unit on the coordinator, for equations (2) and (3)."""
        self._profile = profile

    def store_rate(self, pair: Pair, rate: float) -> None:
        """Store the bit/s of a link, for equation (6)."""
        self._rates[pair] = rate

    def discard_rate(self, one: str, other: str) -> None:
        """Discard the measurement between two devices, since the link has changed."""
        self._rates.pop((one, other), None)
        self._rates.pop((other, one), None)

    def unmeasured_links(self, partition: StagePartition) -> list[Pair]:
        """Return (sender, receiver) for each unmeasured link between neighbouring stages."""
        # Equation (6) needs no other links: a stage sends activations to the next stage, which sends gradients back.
        pairs = []
        for pair in _neighbours(partition.devices):
            if pair not in self._rates:
                pairs.append(pair)
        return pairs

    def pipeline(self, names: Sequence[str]) -> AsynchronousPipeline:
        """Return the pipeline over the devices ``names``, with measured unit times, capacities and links."""
        # A device without a measurement counts as equal to the coordinator (Section III-F: "assume that all workers
        # have the same computing capacity").
        capacities = [self._capacities.get(name, 1.0) for name in names]
        pipeline = pipeline_over(self.problem, names, self._profile, capacities)
        return replace(pipeline, links=self._links(names))

    def _links(self, names: Sequence[str]) -> Mapping[Pair, Link]:
        """Return the links needed by the planner between the devices ``names``, with measured rates.

        A link without a measurement has the rate of its other direction, or the mean of all measured rates. Before any
        measurement the links are those of the scenario.
        """
        if not self._rates:
            return self.problem.links
        # A link without a limit has an infinite rate, which would make the mean infinite.
        finite_rates = []
        for rate in self._rates.values():
            if not math.isinf(rate):
                finite_rates.append(rate)
        mean_rate = fmean(finite_rates) if finite_rates else math.inf
        # Every stage sends replicas to the coordinator (global replication). The second stage is its neighbour; the
        # links from later stages come in addition.
        to_coordinator = [(name, names[0]) for name in names[2:]]
        rates: dict[Pair, float] = {}
        for source, target in [*_neighbours(names), *to_coordinator]:
            # Only links of the scenario, since a topology may lack some.
            if (source, target) in self.problem.links:
                opposite = self._rates.get((target, source), mean_rate)
                rate = self._rates.get((source, target), opposite)
                rates[source, target] = rate
        return links_at_rates(rates)

    def is_repartition_due(self, batches: int) -> bool:
        """Return whether to search a better partition after ``batches`` batches: once early, then regularly."""
        options = self.problem.options
        # Section III-D: after 10 batches, to reach a good partition early, and then after every 100 batches.
        is_first = batches > 0 and batches == options.repartition_first
        return is_first or is_due(batches, options.repartition_every)

    def store_times(
        self, partition: StagePartition, times: Sequence[float | None]
    ) -> None:
        """Estimate capacities from the mean seconds of a batch of each stage."""
        profile = self.pipeline(partition.devices).profile
        capacities = estimate_capacities(profile.execution, partition.cuts, times)
        stages = zip(partition.devices, capacities, times, strict=True)
        for device, capacity, seconds in stages:
            # A stage without a finished batch keeps its earlier estimate.
            if seconds is not None:
                self._capacities[device] = capacity

    def propose_repartition(
        self, old: StagePartition, present: Sequence[str]
    ) -> StagePartition | None:
        """Return a partition over the ``present`` devices if the improvement is worth the change, otherwise None."""
        try:
            new = self.partition_for(present)
        except InputError:
            # With the measured times no partition fits into the devices' memory, so the run keeps the old one.
            return None
        # Both partitions by the newest measurements: the old one may have become slower since it was chosen.
        old_pipeline = self.pipeline(old.devices)
        new_pipeline = self.pipeline(new.devices)
        current = old_pipeline.bottleneck(old.cuts)
        best = new_pipeline.bottleneck(new.cuts)
        min_improvement = self.problem.options.min_improvement
        if new != old and is_worthwhile(current, best, min_improvement):
            return new
        return None


def _neighbours(names: Sequence[str]) -> list[Pair]:
    """Return the (sender, receiver) pairs of neighbouring stages: activations go forward, gradients back."""
    pairs: list[Pair] = []
    for one, other in pairwise(names):
        pairs += [(one, other), (other, one)]
    return pairs


def estimate_capacities(
    execution: Sequence[float], cuts: Cuts, observed: Sequence[float | None]
) -> tuple[float, ...]:
    """Return the capacities of stages by equations (1) and (2): observed seconds over profiled seconds of their units.

    ``execution`` are the coordinator's profiled seconds of each unit for one batch, ``observed`` the mean seconds of
    each stage for one batch. A stage without an observation (None) has capacity 1. The paper sets the coordinator's
    capacity to 1; here the coordinator's is estimated like that of any other stage, and is 1 unless something slows the
    coordinator down.

    >>> estimate_capacities([1.0, 2.0, 3.0], (0, 1, 3), [1.0, 50.0])
    (1.0, 10.0)
    """
    capacities = []
    for seconds, (first, last) in zip(observed, pairwise(cuts), strict=True):
        if seconds is None:
            capacities.append(1.0)
            continue
        # Equation (2): the coordinator's time for the units of this stage.
        profiled = sum(execution[first:last])
        capacities.append(seconds / profiled)
    return tuple(capacities)


def is_worthwhile(current: float, best: float, min_improvement: float = 0.02) -> bool:
    """Return whether a partition with bottleneck ``best`` improves enough on one with bottleneck ``current``.

    Measurements scatter, so that without a minimum improvement the cuts would alternate between equally fast
    partitions.

    >>> is_worthwhile(1.0, 0.99), is_worthwhile(1.0, 0.9)
    (False, True)
    """
    return best < current * (1 - min_improvement)


class FTPipeHD(AsynchronousMethod[FTPipeHDOptions]):
    """Asynchronous pipeline with a partition by the measured capacities of the devices.

    Training begins with PipeDream's partition for equal devices. After the loss of a device training continues with the
    first batch without gradients (option ``resume``).

    Batch normalisation uses the statistics of the batch; its running averages, which only evaluation uses, follow the
    batches in the order of their updates, and are replicated and moved with the weights. Random numbers of dropout
    depend on seed, unit and batch, so a repeated batch has the same ones.
    """

    name = "ftpipehd"
    summary = "asynchronous 1F1B, repartitioned to the devices' measured capacities, recovering from replicas"
    Options = FTPipeHDOptions
    Partitioner = AdaptivePartitioner
