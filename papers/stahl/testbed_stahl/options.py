"""Scenario options of fully distributed inference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Self

from pydantic import Field, model_validator

from testbed.common.quantities import Duration
from testbed.ml.method import Options
from testbed_stahl.schemes import Reuse

SchemeName = Literal["single", "sequential", "lop", "lip", "fuse", "optimal"]
SCHEMES: tuple[SchemeName, ...] = (
    "single",
    "sequential",
    "lop",
    "lip",
    "fuse",
    "optimal",
)


class DistributedOptions(Options):
    """Options of `testbed_stahl.Distributed`."""

    scheme: SchemeName = Field(
        "optimal",
        description="lop, lip: by output or input, everywhere; fuse: by output, with fused pairs; optimal: the least "
        "communication of all three; sequential: layers in a row; single: the source alone",
    )
    fused_pairs: tuple[tuple[int, int], ...] | None = Field(
        None,
        description="pairs of layers, by index, for the scheme fuse; default: those with the least communication",
    )
    communication_formula: Reuse = Field(
        "with-reuse",
        description="formula of the communication that is minimal. with-reuse: values that a device already holds are "
        "not sent; equation-9: the paper's equation (9) as printed, for comparison",
    )
    shares: Literal["speed", "equal"] = Field(
        "speed",
        description="of each layer: in proportion to the devices' speed, or equal; within their memory",
    )
    tiled_layers: int | None = Field(
        None,
        ge=0,
        description="number of first layers that are done by fused tiles, in all schemes but sequential and single; "
        "none: those dominated by features",
    )
    tile_grid: tuple[int, int] | None = Field(
        None, description="rows and columns of tiles; default: what is done soonest"
    )
    source: str | None = Field(
        None,
        description="the device that has the images; default: the first of the scenario",
    )
    exchange: Literal["via-source", "direct"] = Field(
        "via-source",
        description="via-source: everything passes the source, as in the paper; direct: between all devices",
    )
    """By ``via-source`` the source collects and merges, pools and routes, and spreads. By ``direct`` each device
    sends its parts to those that need them. The sums of LIP and of a fused pair's second layer are merged in ranges,
    one on each device, so that no device's link carries more than its share; pooling is done where the channels are,
    and routing is nothing but knowing what to ask for. Both move the same elements for LOP and for fused pairs, M (N
    - 1) for each output M that everybody needs (equations (7) and (9) with the reuse of the own part), but over other
    links."""
    layerwise: bool = Field(
        False,
        description="whether a device computes its part of a layer once it has all of the input, sends it once all is "
        "computed, and the source sends on what it has collected whole; otherwise all of this overlaps, in pieces",
    )
    on_loss: Literal["replan", "fail"] = Field(
        "replan",
        description="requests under way when a device is lost: finish them with the others, or fail",
    )
    stall_timeout: Duration = Field(
        2.0,
        gt=0,
        description="without progress before devices are polled, and without a reply before they count as lost",
    )
    rejoin_timeout: Duration = Field(
        5.0, description="how long a lost device may take to come back"
    )

    # Beyond the paper, from here on.

    in_flight: int = Field(1, ge=1, description="requests under way at once")
    tile_overlap: Literal["compute", "reuse"] = Field(
        "compute",
        description="what neighbouring tiles both need within the early layers: computed by each, or reused "
        "(DeepThings): computed by one and sent to the other, which begins later",
    )
    tile_stealing: bool = Field(
        False,
        description="whether idle devices take tiles that wait for others (DeepThings); each device has one tile at a "
        "time, and the early layers' weights",
    )
    chunks: int = Field(
        16,
        ge=1,
        description="parts in which a device's share of a layer is computed and sent",
    )
    min_chunk_bytes: int = Field(
        65_536,
        ge=1,
        description="bytes that a chunk has at least, unless it is the only one",
    )
    """Smaller ones would hardly overlap more, and each message keeps an emulating host busy for about a millisecond."""

    @model_validator(mode="after")
    def _pairs_have_their_scheme(self) -> Self:
        if self.fused_pairs is not None and self.scheme != "fuse":
            raise ValueError(
                f"'fused_pairs' names pairs for the scheme fuse, but the scheme is {self.scheme}: use scheme fuse"
            )
        if self.layerwise and self.exchange != "via-source":
            raise ValueError(
                "'layerwise' applies to traffic through the source: remove it or 'exchange: direct'"
            )
        return self


@dataclass(frozen=True)
class PlanSettings:
    """Settings for building and executing a plan."""

    options: DistributedOptions = field(default_factory=DistributedOptions)
    source: int = 0
    """Index of the device that has the images."""
    samples: int = 1
    """Samples in a request, at most."""

    def with_options(self, **changes: object) -> PlanSettings:
        """Return a copy with other options, without validation."""
        return PlanSettings(
            self.options.model_copy(update=changes), self.source, self.samples
        )
