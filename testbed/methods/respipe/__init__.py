"""ResPipe as FTPipeHD is compared with it: chain replication, and the next worker takes over a lost one's units."""

from __future__ import annotations

from pydantic import Field

from testbed.methods.base import Problem
from testbed.methods.parts.arranging import AsynchronousOptions, Homogeneous, TakeOver
from testbed.methods.parts.asynchronous_method import AsynchronousMethod


class ResPipeOptions(AsynchronousOptions):
    """Options of `ResPipe`."""

    global_every: int = Field(0, ge=0, description="batches after which all weights go to the first device; 0: never")


class ResPipe(AsynchronousMethod):
    """The take-over moves no weights: the next worker has them. A last worker's go to the one before it."""

    name = "respipe"
    summary = "asynchronous 1F1B; a lost worker's layers are taken over by the next one, which has their replica"
    Options = ResPipeOptions

    def arranger(self, problem: Problem) -> Homogeneous:
        """Return what chooses the partitions."""
        return TakeOver(problem)
