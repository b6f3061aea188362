"""PipeDream as FTPipeHD is compared with it: asynchronous 1F1B on the partition for equal devices."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from testbed.kits.pipeline.method import AsynchronousMethod
from testbed.kits.pipeline.planning import AsynchronousOptions, Partitioner
from testbed.partition import Cuts
from testbed.partition.asynchronous import AsynchronousPipeline


class PipeDreamOptions(AsynchronousOptions):
    """Options of `PipeDream`."""

    partition: Literal["homogeneous", "even"] = Field(
        "homogeneous", description="homogeneous: least bottleneck if all devices were alike; even: by number of units"
    )
    chain_every: int = Field(0, ge=0, description="batches after which each stage's weights go to the next; 0: never")


class PipeDreamPartitioner(Partitioner[PipeDreamOptions]):
    """Counts all devices as equal, or even all units."""

    def cut(self, pipeline: AsynchronousPipeline) -> Cuts:
        """Return the cuts that the options ask for; raises `InputError` where they do not fit."""
        return pipeline.even() if self.problem.options.partition == "even" else super().cut(pipeline)


class PipeDream(AsynchronousMethod[PipeDreamOptions]):
    """Never adapts. Checkpoints at the first device are what it goes on from after a failure, on a new partition."""

    name = "pipedream"
    summary = "asynchronous 1F1B with weight stashing on the partition for equal devices; recovery from checkpoints"
    Options = PipeDreamOptions
    Partitioner = PipeDreamPartitioner
