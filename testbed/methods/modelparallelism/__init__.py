"""Model parallelism: the stages take turns at one batch, so that all but one of them wait."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from testbed.methods.pipeline import Pipeline
from testbed.methods.pipeline.options import PipelineOptions


class ModelParallelismOptions(PipelineOptions):
    """Options of `ModelParallelism`: those of the pipeline, but for the schedule."""

    schedule: Literal["model-parallelism"] = Field("model-parallelism", description="the only one")


class ModelParallelism(Pipeline):
    """A batch goes forward through all stages and back before the next one begins."""

    name = "model-parallelism"
    summary = "one batch at a time through all stages and back: no pipelining"
    Options = ModelParallelismOptions
