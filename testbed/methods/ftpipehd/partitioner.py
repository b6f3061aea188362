"""FTPipeHD's choice of partitions: by the profile, the bandwidths and the capacities that were measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

from pydantic import Field

from testbed.common.errors import InputError
from testbed.kits.asynchronous.partitioners import AsynchronousOptions, HomogeneousPartitioner, pipeline_over
from testbed.method import Problem
from testbed.methods.ftpipehd.adaptation import Repartition, estimate, worthwhile
from testbed.network.link import Link, Pair
from testbed.partition.asynchronous import AsynchronousPipeline, UnitTimes, measured
from testbed.partition.redistribution import StagePartition


class FTPipeHDOptions(AsynchronousOptions):
    """Options of `FTPipeHD`."""

    aggregate: int = Field(
        1, ge=0, description="stage i of n averages its weight versions every aggregate * (n - i) batches; 0: never"
    )
    profile_runs: int = Field(10, ge=1, description="times the first device tries each unit before training")
    repartition_first: int = Field(10, ge=0, description="batches after which the first better partition is looked for")
    repartition_every: int = Field(100, ge=0, description="batches between later ones; 0: never")
    least_gain: float = Field(0.02, ge=0, lt=1, description="of the bottleneck, for which the partition is changed")


class AdaptivePartitioner(HomogeneousPartitioner):
    """Knows of the devices what the run has shown: all count as equal only until it has."""

    def __init__(self, problem: Problem[FTPipeHDOptions]) -> None:
        super().__init__(problem)
        self._options = problem.options
        self._when = Repartition(self._options.repartition_first, self._options.repartition_every)
        self._profile: UnitTimes | None = None
        self._rates: dict[Pair, float] = {}
        self._capacities: dict[str, float] = {}
        self.profile_runs = self._options.profile_runs

    def profiled(self, profile: UnitTimes) -> None:
        """Take in the seconds of each unit on the first device."""
        self._profile = profile

    def measured(self, pair: Pair, rate: float) -> None:
        """Take in the bit/s of a link."""
        self._rates[pair] = rate

    def forget(self, one: str, other: str) -> None:
        """Take back what was measured between two devices: it is so no more."""
        self._rates.pop((one, other), None)
        self._rates.pop((other, one), None)

    def unknown(self, partition: StagePartition) -> list[Pair]:
        """Return the neighbours, both ways, whose link was not measured."""
        pairs = [pair for one, other in pairwise(partition.devices) for pair in ((one, other), (other, one))]
        return [pair for pair in pairs if pair not in self._rates]

    def pipeline(self, names: Sequence[str]) -> AsynchronousPipeline:
        """Return what is known of the pipeline over these devices."""
        capacities = [self._capacities.get(name, 1.0) for name in names]
        known = pipeline_over(self.problem, names, self._profile, capacities)
        return replace(known, links=self._links(names))

    def _links(self, names: Sequence[str]) -> Mapping[Pair, Link]:
        """Return the links as measured; one that never was counts as its other direction, or the mean of all."""
        if not self._rates:
            return self.problem.links
        finite = [rate for rate in self._rates.values() if not math.isinf(rate)]
        unknown = fmean(finite) if finite else math.inf
        pairs = [pair for one, other in pairwise(names) for pair in ((one, other), (other, one))]
        pairs += [(name, names[0]) for name in names[2:]]
        back = {(target, source): rate for (source, target), rate in self._rates.items()}
        rates = {**back, **self._rates}
        return measured({pair: rates.get(pair, unknown) for pair in pairs if pair in self.problem.links})

    def due(self, done: int) -> bool:
        """Say whether a better partition is looked for after ``done`` batches."""
        return self._when.due(done)

    def observe(self, partition: StagePartition, times: Sequence[float | None]) -> None:
        """Estimate capacities from the mean seconds of a batch of each stage."""
        profile = self.pipeline(partition.devices).profile
        found = estimate(profile.execution, partition.cuts, times)
        for device, capacity, seconds in zip(partition.devices, found, times, strict=True):
            if seconds is not None:
                self._capacities[device] = capacity

    def better(self, old: StagePartition, there: Sequence[str]) -> StagePartition | None:
        """Return a partition that is worth changing to, or None."""
        try:
            new = self.over(there)
        except InputError:
            return None
        before = self.pipeline(old.devices).bottleneck(old.cuts)
        after = self.pipeline(new.devices).bottleneck(new.cuts)
        return new if new != old and worthwhile(before, after, self._options.least_gain) else None
