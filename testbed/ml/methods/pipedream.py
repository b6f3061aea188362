"""PipeDream and ResPipe as compared with FTPipeHD: asynchronous 1F1B with a fixed partition."""

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
        "homogeneous",
        description=(
            "homogeneous: minimum bottleneck for identical devices; even: equal "
            "numbers of units"
        ),
    )
    chain_replication_interval: int = Field(
        0,
        ge=0,
        description=(
            "interval in batches after which each stage sends its weights to the "
            "next; 0: never"
        ),
    )


class PipeDreamPartitioner(Partitioner[PipeDreamOptions]):
    """Treats all devices, or even all units, as equal."""

    def cut(self, pipeline: AsynchronousPipeline) -> Cuts:
        """Return the cuts the options ask for; raises `InputError` for cuts that do not fit."""
        if self.problem.options.partition == "even":
            return pipeline.even()
        return super().cut(pipeline)


class PipeDream(AsynchronousMethod[PipeDreamOptions]):
    """Never adapts. After a failure, training resumes from the first device's checkpoint with a new partition."""

    name = "pipedream"
    summary = "asynchronous 1F1B with weight stashing on the partition for equal devices; recovery from checkpoints"
    Options = PipeDreamOptions
    Partitioner = PipeDreamPartitioner


class ResPipeOptions(AsynchronousOptions):
    """Options of `ResPipe`."""

    partition: Literal["homogeneous", "capacities"] = Field(
        "homogeneous",
        description=(
            "homogeneous: minimum bottleneck for identical devices; capacities: for "
            "their actual speeds"
        ),
    )

    global_replication_interval: int = Field(
        0,
        ge=0,
        description=(
            "interval in batches after which all weights are sent to the first "
            "device; 0: never"
        ),
    )


class TakeOverPartitioner(Partitioner[ResPipeOptions]):
    """The device holding a lost stage's replica takes over its units; devices never rejoin and nothing else changes."""

    admits_devices = False

    def pipeline(self, names: Sequence[str]) -> AsynchronousPipeline:
        """Return the pipeline over these devices, equal ones or, as FTPipeHD's adapts, by their capacities."""
        if self.problem.options.partition == "capacities":
            return as_given(self.problem, names)
        return super().pipeline(names)

    def after_loss(self, old: StagePartition, present: Sequence[str]) -> StagePartition:
        """Return the partition over the remaining devices."""
        return take_over(old, set(old.devices).difference(present))

    def due(self, done: int) -> bool:
        """Never look for a better partition."""
        return False


def take_over(old: StagePartition, lost: Collection[str]) -> StagePartition:
    """Return ResPipe's partition: the next remaining stage takes all units of a lost one.

    The last stage's replica is at the coordinator. A pipeline cannot end at its first device, so the last stage's units
    go to the stage before, which fetches them from the coordinator. Raises ValueError if no device is left.

    >>> take_over(StagePartition(("a", "b", "c"), (0, 2, 4, 6)), {"b"})
    StagePartition(devices=('a', 'c'), cuts=(0, 2, 6))
    """
    left = tuple(device for device in old.devices if device not in lost)
    if not left:
        raise ValueError("no device is left to take over")
    ends = [old.of(device).stop for device in left]
    return StagePartition(left, (0, *ends[:-1], old.units))


class ResPipe(AsynchronousMethod[ResPipeOptions]):
    """A take-over moves no weights, since the next worker has replicas. A last worker's units go to its predecessor."""

    name = "respipe"
    summary = "asynchronous 1F1B; a lost worker's layers are taken over by the next one, which has their replica"
    Options = ResPipeOptions
    Partitioner = TakeOverPartitioner
