"""PipeDream and ResPipe as compared with FTPipeHD: asynchronous 1F1B with a fixed partition.

PipeDream (Narayanan et al., 2019) and ResPipe do not adapt to the speeds that devices have at run time; they differ in
the recovery from the loss of a device.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from pydantic import Field

from testbed.ml.partition import Cuts
from testbed.ml.partition.asynchronous import AsynchronousPipeline
from testbed.ml.partition.redistribution import StagePartition
from testbed.ml.pipeline.method import AsynchronousMethod
from testbed.ml.pipeline.planning import (
    AsynchronousOptions,
    Partitioner,
    pipeline_at_scenario_speeds,
)


class PipeDreamOptions(AsynchronousOptions):
    """Options of `PipeDream`."""

    partition: Literal["homogeneous", "even"] = Field(
        "homogeneous",
        description=(
            "homogeneous: minimum bottleneck for identical devices; even: equal "
            "numbers of units"
        ),
    )
    # PipeDream has checkpoints alone, and no replicas on neighbouring devices.
    chain_replication_interval: int = Field(
        0,
        ge=0,
        description=(
            "interval in batches after which each stage sends its weights to the "
            "next; 0: never"
        ),
    )


class PipeDreamPartitioner(Partitioner[PipeDreamOptions]):
    """Cuts the model as if all devices had equal speeds, or as if all units had equal costs (`even`)."""

    def cut(self, pipeline: AsynchronousPipeline) -> Cuts:
        """Return the best cuts by the option `partition`; raises `InputError` if no cuts fit."""
        if self.problem.options.partition == "even":
            return pipeline.even()
        return super().cut(pipeline)


class PipeDream(AsynchronousMethod[PipeDreamOptions]):
    """Asynchronous 1F1B on a partition that never adapts to measurements.

    After a failure, training resumes from the first device's checkpoint with a new partition of the same kind.
    """

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

    # ResPipe has replicas on the next worker alone, not on the first device.
    global_replication_interval: int = Field(
        0,
        ge=0,
        description=(
            "interval in batches after which all weights are sent to the first "
            "device; 0: never"
        ),
    )


class TakeOverPartitioner(Partitioner[ResPipeOptions]):
    """Gives the units of a lost stage to the device that has their replicas.

    Devices never rejoin, and the units of all other stages stay where they are.
    """

    admits_devices = False

    def pipeline(self, names: Sequence[str]) -> AsynchronousPipeline:
        """Return the pipeline over these devices, with equal speeds or with the speeds of the scenario."""
        if self.problem.options.partition == "capacities":
            return pipeline_at_scenario_speeds(self.problem, names)
        return super().pipeline(names)

    def after_loss(self, old: StagePartition, present: Sequence[str]) -> StagePartition:
        """Return the partition over the remaining devices."""
        lost = set(old.devices).difference(present)
        return take_over(old, lost)

    def is_repartition_due(self, batches: int) -> bool:
        """Return False: ResPipe never looks for a better partition."""
        return False


def take_over(old: StagePartition, lost: Collection[str]) -> StagePartition:
    """Return ResPipe's partition: the next remaining stage takes over all units of a lost stage.

    The replica of the last stage is at the coordinator, which is the first stage. As a stage has consecutive units, the
    units of a lost last stage go to the stage before, which fetches them from the coordinator. Raises ValueError if no
    device remains.

    >>> take_over(StagePartition(("a", "b", "c"), (0, 2, 4, 6)), {"b"})
    StagePartition(devices=('a', 'c'), cuts=(0, 2, 6))
    """
    remaining = []
    ends = []
    for device in old.devices:
        if device not in lost:
            remaining.append(device)
            ends.append(old.of(device).stop)
    if not remaining:
        raise ValueError("all devices are lost, so none can take over their units")
    # Each remaining stage begins at the end of the remaining stage before, so it includes the lost stages in between.
    # The last one ends with the model.
    cuts = (0, *ends[:-1], old.units)
    return StagePartition(tuple(remaining), cuts)


class ResPipe(AsynchronousMethod[ResPipeOptions]):
    """Asynchronous 1F1B in which the next worker, the device of the next stage, takes over the units of a lost worker.

    A take-over sends no weights, since the next worker has replicas of the units. Only the units of the last worker go
    to the worker before, which has to fetch them.
    """

    name = "respipe"
    summary = "asynchronous 1F1B; a lost worker's layers are taken over by the next one, which has their replica"
    Options = ResPipeOptions
    Partitioner = TakeOverPartitioner
