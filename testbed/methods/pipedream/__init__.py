"""PipeDream as FTPipeHD is compared with it: asynchronous 1F1B on the partition for equal devices."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from testbed.kits.asynchronous.method import AsynchronousMethod
from testbed.kits.asynchronous.partitioners import AsynchronousOptions, EvenPartitioner, HomogeneousPartitioner
from testbed.method import Problem


class PipeDreamOptions(AsynchronousOptions):
    """Options of `PipeDream`."""

    partition: Literal["homogeneous", "even"] = Field(
        "homogeneous", description="homogeneous: least bottleneck if all devices were alike; even: by number of units"
    )
    chain_every: int = Field(0, ge=0, description="batches after which each stage's weights go to the next; 0: never")


class PipeDream(AsynchronousMethod[PipeDreamOptions]):
    """Never adapts. Checkpoints at the first device are what it goes on from after a failure, on a new partition."""

    name = "pipedream"
    summary = "asynchronous 1F1B with weight stashing on the partition for equal devices; recovery from checkpoints"
    Options = PipeDreamOptions

    def partitioner(self, problem: Problem[PipeDreamOptions]) -> HomogeneousPartitioner:
        """Return what chooses the partitions."""
        return EvenPartitioner(problem) if problem.options.partition == "even" else HomogeneousPartitioner(problem)
