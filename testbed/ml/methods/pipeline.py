"""Synchronous pipelines: with any schedule, as GPipe, and as model parallelism without pipelining."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from testbed.ml.pipeline.method import SynchronousMethod
from testbed.ml.pipeline.planning import SynchronousOptions


class Pipeline(SynchronousMethod):
    """Model parallelism, GPipe or 1F1B, by the option `schedule`, with one update for each batch.

    A batch is cut into micro-batches. The gradients of these sum to the gradient of the batch, so with every schedule
    and partition the trained weights equal those of training on one device, except for rounding. Only batch
    normalisation depends on micro-batches, as in GPipe. `testbed.ml.pipeline.checkpointing` describes the recovery from
    crashes of stages.
    """

    name = "pipeline"
    summary = "synchronous pipeline training: model parallelism, GPipe or 1F1B, with recovery from checkpoints"


class GPipeOptions(SynchronousOptions):
    """Options of `GPipe`: those of `Pipeline`, with a fixed schedule."""

    schedule: Literal["gpipe"] = Field("gpipe", description="fixed for this method")
    # As in the paper, where a stage discards activations after the forward and recomputes them for the backward.
    recompute: bool = Field(
        True,
        description="all stages but the last discard activations and recompute them before backward",
    )


class GPipe(SynchronousMethod):
    """All forwards of a batch's micro-batches, then all backwards, then one update (Huang et al., 2019)."""

    name = "gpipe"
    summary = "synchronous pipeline as in GPipe: all forwards, then all backwards, with recomputation"
    Options = GPipeOptions


class ModelParallelismOptions(SynchronousOptions):
    """Options of `ModelParallelism`: those of `Pipeline`, with a fixed schedule."""

    schedule: Literal["model-parallelism"] = Field(
        "model-parallelism", description="fixed for this method"
    )


class ModelParallelism(SynchronousMethod):
    """A batch passes forward through all stages and back before the next one begins."""

    name = "model-parallelism"
    summary = "one batch at a time through all stages and back: no pipelining"
    Options = ModelParallelismOptions
