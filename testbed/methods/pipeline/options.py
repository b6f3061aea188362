"""What a scenario may say of the pipeline."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from testbed.kits.pipeline.arrangement import StagesOptions

MICRO_BATCHES = {"model-parallelism": 1, "gpipe": 4, "1f1b": 4}
"""What ``micro_batches`` is where it is not given."""


class PipelineOptions(StagesOptions):
    """Options of `testbed.methods.pipeline.Pipeline`."""

    schedule: Literal["model-parallelism", "gpipe", "1f1b"] = "1f1b"
    micro_batches: int | None = Field(None, ge=1, description="of a batch; 4, or 1 for model-parallelism")
    partition: Literal["even", "optimal"] = Field(
        "optimal", description="even: by number of units; optimal: least predicted time of a step"
    )
    recompute: bool = Field(
        False,
        description="all stages but the last keep no activations and compute them again before backward, as in GPipe",
    )
    checkpoint_every: int = Field(20, ge=1, description="steps after which the first device gathers all weights")
    evaluate_every: int | None = Field(None, ge=1, description="in steps; default: at the end only")

    @property
    def pieces(self) -> int:
        """Micro-batches of a batch."""
        return self.micro_batches or MICRO_BATCHES[self.schedule]
