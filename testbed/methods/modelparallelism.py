"""Model parallelism: the stages take turns at one batch, so that all but one of them wait."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from testbed.kits.pipeline.method import SynchronousMethod
from testbed.kits.pipeline.planning import SynchronousOptions


class ModelParallelismOptions(SynchronousOptions):
    """Options of `ModelParallelism`: those of the pipeline, but for the schedule."""

    schedule: Literal["model-parallelism"] = Field("model-parallelism", description="the only one")


class ModelParallelism(SynchronousMethod):
    """A batch goes forward through all stages and back before the next one begins."""

    name = "model-parallelism"
    summary = "one batch at a time through all stages and back: no pipelining"
    Options = ModelParallelismOptions
