"""Synchronous pipelines: with the schedule of one's choice, as GPipe, and as model parallelism without pipelining."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from testbed.ml.pipeline.method import SynchronousMethod
from testbed.ml.pipeline.planning import SynchronousOptions


class Pipeline(SynchronousMethod):
    """Model parallelism, GPipe and 1F1B: the update is that of the whole batch, whatever the schedule and the cuts.

    A batch is cut into micro-batches whose gradients add up to the batch's, so weights equal the undivided model's
    to round-off; batch normalisation alone sees micro-batches, as in GPipe, and so differs. Stages that die, come back
    or stay away are dealt with as `testbed.ml.pipeline.checkpointing` says.
    """

    name = "pipeline"
    summary = "synchronous pipeline training: model parallelism, GPipe or 1F1B, with recovery from checkpoints"


class GPipeOptions(SynchronousOptions):
    """Options of `GPipe`: those of the pipeline, but for the schedule."""

    schedule: Literal["gpipe"] = Field("gpipe", description="the only one")
    recompute: bool = Field(
        True, description="all stages but the last keep no activations and compute them again before backward"
    )


class GPipe(SynchronousMethod):
    """All forwards of a batch's micro-batches, then all backwards, then one update (Huang et al., 2019)."""

    name = "gpipe"
    summary = "synchronous pipeline as in GPipe: all forwards, then all backwards, with recomputation"
    Options = GPipeOptions


class ModelParallelismOptions(SynchronousOptions):
    """Options of `ModelParallelism`: those of the pipeline, but for the schedule."""

    schedule: Literal["model-parallelism"] = Field("model-parallelism", description="the only one")


class ModelParallelism(SynchronousMethod):
    """A batch goes forward through all stages and back before the next one begins."""

    name = "model-parallelism"
    summary = "one batch at a time through all stages and back: no pipelining"
    Options = ModelParallelismOptions
