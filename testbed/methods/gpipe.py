"""GPipe: the synchronous pipeline with its schedule, and activations computed again instead of kept."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from testbed.kits.pipeline.method import SynchronousMethod
from testbed.kits.pipeline.planning import SynchronousOptions


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
