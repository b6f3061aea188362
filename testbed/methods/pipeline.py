"""The synchronous pipeline with the schedule of one's choice."""

from __future__ import annotations

from testbed.kits.pipeline.method import SynchronousMethod


class Pipeline(SynchronousMethod):
    """Model parallelism, GPipe and 1F1B: the update is that of the whole batch, whatever the schedule and the cuts.

    A batch is cut into micro-batches whose gradients add up to the batch's, so weights equal the undivided model's
    to round-off; batch normalisation alone sees micro-batches, as in GPipe, and so differs. Stages that die, come back
    or stay away are dealt with as `testbed.kits.pipeline.checkpointing` says.
    """

    name = "pipeline"
    summary = "synchronous pipeline training: model parallelism, GPipe or 1F1B, with recovery from checkpoints"
