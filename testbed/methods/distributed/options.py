"""What a scenario may say of fully distributed inference."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from testbed.common.quantities import Duration
from testbed.method import Options
from testbed.methods.distributed.candidates import SchemeName
from testbed.methods.distributed.plan import ExchangeMode, Execution, OverlapMode
from testbed.methods.distributed.schemes import Reuse


class DistributedOptions(Options):
    """Options of `testbed.methods.distributed.Distributed`."""

    scheme: SchemeName = Field(
        "optimal",
        description="lop, lip: by output or input, everywhere; fuse: by output, with fused pairs; optimal: the least "
        "communication of all three; sequential: layers in a row; single: the source alone",
    )
    fused: tuple[tuple[int, int], ...] | None = Field(
        None, description="pairs of layers, by index, for the scheme fuse; default: those with the least communication"
    )
    reuse: Reuse = Field(
        "everywhere", description="by which formula it is the least; paper: equation (9) as printed, for comparison"
    )
    shares: Literal["speed", "equal"] = Field(
        "speed", description="of each layer: in proportion to the devices' speed, or equal; within their memory"
    )
    early: int | None = Field(
        None,
        ge=0,
        description="number of first layers that are done by fused tiles, in all schemes but sequential and single; "
        "none: those dominated by features",
    )
    grid: tuple[int, int] | None = Field(None, description="rows and columns of tiles; default: what is done soonest")
    overlap: OverlapMode = Field(
        Execution.overlap,
        description="what neighbouring tiles both need within the early layers: computed by each, or reused "
        "(DeepThings): computed by one and sent to the other, which begins later",
    )
    stealing: bool = Field(
        Execution.stealing,
        description="whether idle devices take tiles that wait for others (DeepThings); each device has one tile at a "
        "time, and the early layers' weights",
    )
    source: str | None = Field(None, description="the device that has the images; default: the first of the scenario")
    exchange: ExchangeMode = Field(
        Execution.exchange,
        description="source: everything passes the source, as in the paper; direct: between all devices",
    )
    in_flight: int = Field(Execution.in_flight, ge=1, description="requests under way at once")
    chunks: int = Field(
        Execution.chunks, ge=1, description="parts in which a device's share of a layer is computed and sent"
    )
    least_chunk: int = Field(
        Execution.least_chunk, ge=1, description="bytes that a chunk has at least, unless it is the only one"
    )
    on_loss: Literal["replan", "fail"] = Field(
        "replan", description="requests under way when a device is lost: finish them with the others, or fail"
    )
    patience: Duration = Field(
        2.0,
        gt=0,
        description="without progress before devices are polled, and without a reply before they count as lost",
    )
    return_window: Duration = Field(5.0, description="how long a lost device may take to come back")

    @model_validator(mode="after")
    def _pairs_have_their_scheme(self) -> Self:
        if self.fused is not None and self.scheme != "fuse":
            raise ValueError(
                f"'fused' names pairs for the scheme fuse, but the scheme is {self.scheme}: use scheme fuse"
            )
        return self
