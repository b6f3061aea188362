"""FTPipeHD: asynchronous 1F1B that adapts its partition to the devices as they are, and survives losing them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Literal

from pydantic import Field

from testbed.common.errors import InputError
from testbed.ml.data.batches import is_due
from testbed.ml.method import Problem
from testbed.ml.partition import Cuts
from testbed.ml.partition.asynchronous import (
    AsynchronousPipeline,
    UnitTimes,
    links_at_rates,
)
from testbed.ml.partition.redistribution import StagePartition
from testbed.ml.pipeline.method import AsynchronousMethod
from testbed.ml.pipeline.planning import (
    RESUME,
    AsynchronousOptions,
    Partitioner,
    pipeline_over,
)
from testbed.network.link import Link, Pair


class FTPipeHDOptions(AsynchronousOptions):
    """Options of `FTPipeHD`."""

    aggregate: int = Field(
        1,
        ge=0,
        description="stage i of n averages its weight versions every aggregate * (n - i) batches; 0: never",
    )
    resume: Literal["next-batch", "last-replica"] = Field(
        "next-batch", description=RESUME
    )
    profile_runs: int = Field(
        10, ge=1, description="times the first device tries each unit before training"
    )
    repartition_first: int = Field(
        10,
        ge=0,
        description="batches after which the first better partition is looked for",
    )
    repartition_every: int = Field(
        100, ge=0, description="batches between later ones; 0: never"
    )
    least_gain: float = Field(
        0.02,
        ge=0,
        lt=1,
        description="of the bottleneck, for which the partition is changed",
    )


class AdaptivePartitioner(Partitioner[FTPipeHDOptions]):
    """Capacities of devices as measured during the run; all devices count as equal before the first measurement."""

    def __init__(self, problem: Problem[FTPipeHDOptions]) -> None:
        super().__init__(problem)
        self._profile: UnitTimes | None = None
        self._rates: dict[Pair, float] = {}
        self._capacities: dict[str, float] = {}
        self.profile_runs = problem.options.profile_runs

    def profiled(self, profile: UnitTimes) -> None:
        """Take in the seconds of each unit on the first device."""
        self._profile = profile

    def measured(self, pair: Pair, rate: float) -> None:
        """Take in the bit/s of a link."""
        self._rates[pair] = rate

    def forget(self, one: str, other: str) -> None:
        """Discard the measurement between two devices, since the link has changed."""
        self._rates.pop((one, other), None)
        self._rates.pop((other, one), None)

    def unknown(self, partition: StagePartition) -> list[Pair]:
        """Return the neighbours, both ways, whose link was not measured."""
        return [
            pair for pair in _both_ways(partition.devices) if pair not in self._rates
        ]

    def pipeline(self, names: Sequence[str]) -> AsynchronousPipeline:
        """Return the pipeline over these devices with measured capacities."""
        capacities = [self._capacities.get(name, 1.0) for name in names]
        known = pipeline_over(self.problem, names, self._profile, capacities)
        return replace(known, links=self._links(names))

    def _links(self, names: Sequence[str]) -> Mapping[Pair, Link]:
        """Return the links as measured; one that never was counts as its other direction, or the mean of all."""
        if not self._rates:
            return self.problem.links
        finite = [rate for rate in self._rates.values() if not math.isinf(rate)]
        unknown = fmean(finite) if finite else math.inf
        pairs = [*_both_ways(names), *((name, names[0]) for name in names[2:])]
        back = {
            (target, source): rate for (source, target), rate in self._rates.items()
        }
        rates = {**back, **self._rates}
        return links_at_rates(
            {
                pair: rates.get(pair, unknown)
                for pair in pairs
                if pair in self.problem.links
            }
        )

    def due(self, done: int) -> bool:
        """Return whether a better partition is looked for after ``done`` batches: after the first, then regularly."""
        options = self.problem.options
        return 0 < done == options.repartition_first or is_due(
            done, options.repartition_every
        )

    def observe(self, partition: StagePartition, times: Sequence[float | None]) -> None:
        """Estimate capacities from the mean seconds of a batch of each stage."""
        profile = self.pipeline(partition.devices).profile
        found = estimate(profile.execution, partition.cuts, times)
        for device, capacity, seconds in zip(
            partition.devices, found, times, strict=True
        ):
            if seconds is not None:
                self._capacities[device] = capacity

    def better(
        self, old: StagePartition, there: Sequence[str]
    ) -> StagePartition | None:
        """Return a partition that is worth changing to, or None."""
        try:
            new = self.over(there)
        except InputError:
            return None
        before = self.pipeline(old.devices).bottleneck(old.cuts)
        after = self.pipeline(new.devices).bottleneck(new.cuts)
        return (
            new
            if new != old and worthwhile(before, after, self.problem.options.least_gain)
            else None
        )


def _both_ways(names: Sequence[str]) -> list[Pair]:
    return [
        pair for one, other in pairwise(names) for pair in ((one, other), (other, one))
    ]


def estimate(
    execution: Sequence[float], cuts: Cuts, observed: Sequence[float | None]
) -> tuple[float, ...]:
    """Return the capacities by equations (1) and (2): observed over profiled seconds of each stage's units.

    ``execution`` are the coordinator's profiled seconds of each unit for one batch, ``observed`` the mean seconds of
    each stage for one batch; None, nothing observed yet, gives 1. The paper sets the coordinator's to 1; where its
    time is observed, it is estimated like any other, and is 1 as long as nothing slows it.
    """
    return tuple(
        1.0 if seconds is None else seconds / sum(execution[first:last])
        for seconds, (first, last) in zip(observed, pairwise(cuts), strict=True)
    )


def worthwhile(current: float, best: float, least_gain: float = 0.02) -> bool:
    """Return whether a partition of bottleneck ``best`` is worth leaving one of ``current`` for.

    Measurements scatter: without a least gain the cuts would flutter between neighbours that are as good as each other.
    """
    return best < current * (1 - least_gain)


class FTPipeHD(AsynchronousMethod[FTPipeHDOptions]):
    """Begins as PipeDream does, with equal devices; measured capacities decide from then on.

    Normalisation by batch statistics uses those of the batch; its running averages, which only evaluation uses, follow
    the batches in the order of their updates, and are replicated and moved with the weights. Dropout draws by seed,
    unit and batch, so a batch that is done again is the same batch.
    """

    name = "ftpipehd"
    summary = "asynchronous 1F1B, repartitioned to the devices' measured capacities, recovering from replicas"
    Options = FTPipeHDOptions
    Partitioner = AdaptivePartitioner
