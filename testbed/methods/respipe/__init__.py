"""ResPipe as FTPipeHD is compared with it: chain replication, and the next worker takes over a lost one's units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from testbed.kits.asynchronous.method import AsynchronousMethod
from testbed.kits.asynchronous.partitioners import (
    AsynchronousOptions,
    HomogeneousPartitioner,
    TakeOverPartitioner,
    pipeline_over,
)
from testbed.method import Problem
from testbed.partition.asynchronous import AsynchronousPipeline, capacities


class ResPipeOptions(AsynchronousOptions):
    """Options of `ResPipe`."""

    partition: Literal["homogeneous", "capacities"] = Field(
        "homogeneous",
        description="homogeneous: least bottleneck if all devices were alike; capacities: for the speeds they have",
    )

    global_every: int = Field(0, ge=0, description="batches after which all weights go to the first device; 0: never")


class ResPipe(AsynchronousMethod[ResPipeOptions]):
    """The take-over moves no weights: the next worker has them. A last worker's go to the one before it."""

    name = "respipe"
    summary = "asynchronous 1F1B; a lost worker's layers are taken over by the next one, which has their replica"
    Options = ResPipeOptions

    def partitioner(self, problem: Problem[ResPipeOptions]) -> HomogeneousPartitioner:
        """Return what chooses the partitions."""
        return (
            CapacityPartitioner(problem) if problem.options.partition == "capacities" else TakeOverPartitioner(problem)
        )


class CapacityPartitioner(TakeOverPartitioner):
    """Begins with the partition that FTPipeHD comes to, so that after a loss the take-over alone tells them apart."""

    def pipeline(self, names: Sequence[str]) -> AsynchronousPipeline:
        """Return the pipeline over these devices as the scenario has them."""
        devices = [self.problem.device(name) for name in names]
        given = capacities(devices, self.problem.model.units, self.problem.workload.batch_size)
        return pipeline_over(self.problem, names, capacities=given)
