"""PipeDream and ResPipe as FTPipeHD is compared with them: asynchronous 1F1B that never adapts its partition."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from pydantic import Field

from testbed.ml.partition import Cuts
from testbed.ml.partition.asynchronous import AsynchronousPipeline
from testbed.ml.partition.redistribution import StagePartition
from testbed.ml.pipeline.method import AsynchronousMethod
from testbed.ml.pipeline.planning import AsynchronousOptions, Partitioner, as_given


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


class ResPipeOptions(AsynchronousOptions):
    """Options of `ResPipe`."""

    partition: Literal["homogeneous", "capacities"] = Field(
        "homogeneous",
        description="homogeneous: least bottleneck if all devices were alike; capacities: for the speeds they have",
    )

    global_every: int = Field(0, ge=0, description="batches after which all weights go to the first device; 0: never")


class TakeOverPartitioner(Partitioner[ResPipeOptions]):
    """The device that has a lost stage's replica takes its units; none joins again, and nothing else ever changes."""

    admits = False

    def pipeline(self, names: Sequence[str]) -> AsynchronousPipeline:
        """Return the pipeline over these devices, for equal ones or, as FTPipeHD comes to, by their capacities."""
        given = self.problem.options.partition == "capacities"
        return as_given(self.problem, names) if given else super().pipeline(names)

    def after_loss(self, old: StagePartition, there: Sequence[str]) -> StagePartition:
        """Return the partition over the devices that are left."""
        return take_over(old, set(old.devices).difference(there))

    def due(self, done: int) -> bool:
        """Return that no better partition is ever looked for."""
        return False


def take_over(old: StagePartition, lost: Collection[str]) -> StagePartition:
    """Return ResPipe's partition: the next stage that is left takes all units of a lost one.

    The last one's replica is at the coordinator, but a pipeline that ends where it begins would be no pipeline: its
    units go to the stage before it, which fetches them there. Raises ValueError when no device is left.
    """
    left = tuple(device for device in old.devices if device not in lost)
    if not left:
        raise ValueError("no device is left to take over")
    ends = [old.of(device).stop for device in left]
    return StagePartition(left, (0, *ends[:-1], old.units))


class ResPipe(AsynchronousMethod[ResPipeOptions]):
    """The take-over moves no weights: the next worker has them. A last worker's go to the one before it."""

    name = "respipe"
    summary = "asynchronous 1F1B; a lost worker's layers are taken over by the next one, which has their replica"
    Options = ResPipeOptions
    Partitioner = TakeOverPartitioner
