"""Scenario options of fully distributed inference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Self

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
    """Options of `testbed_stahl.method.Distributed`."""

    former_keys: ClassVar[Mapping[str, str]] = {
        "early": "tiled_layers",
        "fused": "fused_pairs",
        "grid": "tile_grid",
        "least_chunk": "min_chunk_bytes",
        "overlap": "tile_overlap",
        "reuse": "communication_formula",
        "stealing": "tile_stealing",
    }
    scheme: SchemeName = Field(
        "optimal",
        description="division of the layers. lop, lip: all by output or all by input; fuse: by output, with fused "
        "pairs; optimal: minimal communication with all three; sequential: whole layers on successive devices; single: "
        "the source alone",
    )
    fused_pairs: tuple[tuple[int, int], ...] | None = Field(
        None,
        description="pairs of layers, by index, for the scheme fuse; default: pairs with minimal communication",
    )
    communication_formula: Reuse = Field(
        "with-reuse",
        description="formula of the communication that is minimal. with-reuse: values that a device already holds are "
        "not sent; equation-9: the paper's equation (9) as printed, for comparison",
    )
    shares: Literal["speed", "equal"] = Field(
        "speed",
        description="shares of the devices in each layer: in proportion to their speed, or equal; limited by memory",
    )
    tiled_layers: int | None = Field(
        None,
        ge=0,
        description="number of first layers computed by fused tiles, in all schemes but sequential and single; "
        "default: the layers whose inputs and outputs are larger than their weights",
    )
    tile_grid: tuple[int, int] | None = Field(
        None, description="rows and columns of tiles; default: the fastest grid"
    )
    source: str | None = Field(
        None,
        description="the device that has the images; default: the first of the scenario",
    )
    exchange: Literal["via-source", "direct"] = Field(
        "via-source",
        description="via-source: everything passes the source, as in the paper; direct: between all devices",
    )
    """With ``via-source``, the source collects outputs, merges sums, pools and routes, and distributes the results.

    With ``direct``, each device sends its parts to the devices that need them. The sums of LIP and of a fused pair's
    second layer are merged in ranges, one on each device, so that no device's link carries more than its share. Pooling
    is done where the channels are, and a route layer sends nothing: its readers ask the devices that made its inputs.
    For LOP and for fused pairs both move the same number of elements, M (N - 1) for each output M that all devices need
    (equations (7) and (9) with the reuse of the own part), but over other links.
    """
    layerwise: bool = Field(
        False,
        description="whether a device computes its part of a layer after all of the input has arrived, sends the whole "
        "part after computing, and the source forwards complete outputs; otherwise these steps overlap, in chunks",
    )
    on_loss: Literal["replan", "fail"] = Field(
        "replan",
        description="requests under way when a device is lost: finish them with the remaining devices, or fail",
    )
    stall_timeout: Duration = Field(
        2.0,
        gt=0,
        description="time without progress before devices are polled, and without a reply before they count as lost",
    )
    rejoin_timeout: Duration = Field(
        5.0, description="time in which a lost device may return"
    )

    # The options below go beyond the paper.

    in_flight: int = Field(1, ge=1, description="requests under way at once")
    tile_overlap: Literal["compute", "reuse"] = Field(
        "compute",
        description="regions that neighbouring tiles both need. compute: each tile computes them; reuse (DeepThings): "
        "one tile computes them and sends them to the other, which begins later",
    )
    tile_stealing: bool = Field(
        False,
        description="whether idle devices steal tiles that wait for other devices (DeepThings); each device has one "
        "tile at a time, and the weights of all tiled layers",
    )
    chunks: int = Field(
        16,
        ge=1,
        description="parts in which a device's share of a layer is computed and sent",
    )
    min_chunk_bytes: int = Field(
        65_536,
        ge=1,
        description="minimum bytes of a chunk, unless it is the only one",
    )
    """Smaller chunks hardly overlap more, and each message occupies an emulating host for about a millisecond."""

    @model_validator(mode="after")
    def _pairs_have_their_scheme(self) -> Self:
        if self.fused_pairs is not None and self.scheme != "fuse":
            raise ValueError(
                f"'fused_pairs' belongs to the scheme fuse, but the scheme is {self.scheme}: use scheme fuse"
            )
        if self.layerwise and self.exchange != "via-source":
            raise ValueError(
                "'layerwise' applies to traffic through the source: remove it or 'exchange: direct'"
            )
        return self


@dataclass(frozen=True)
class PlanSettings:
    """Settings of plans and their dataflow: the options, with the facts of a run that they depend on."""

    options: DistributedOptions = field(default_factory=DistributedOptions)
    source: int = 0
    """Index of the device that has the images."""
    samples: int = 1
    """Maximum number of samples in a request."""

    def with_options(self, **changes: object) -> PlanSettings:
        """Return a copy with other options, without validation.

        >>> PlanSettings().with_options(scheme="lop").options.scheme
        'lop'
        """
        return PlanSettings(
            self.options.model_copy(update=changes), self.source, self.samples
        )
