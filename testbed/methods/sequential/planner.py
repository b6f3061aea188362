"""Which device gets which units in an inference chain."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from pydantic import ConfigDict, Field

from testbed.hardware import DeviceSpec
from testbed.kits.pipeline.arrangement import StagesOptions, all_devices, devices_among, pieces
from testbed.method import Problem
from testbed.partition import Chain, Cuts
from testbed.plan import Details, Piece, Plan
from testbed.wire.message import size_around


class SequentialOptions(StagesOptions):
    """Options of `testbed.methods.sequential.Sequential`."""

    partition: Literal["even", "latency", "bottleneck"] = Field(
        "latency",
        description="even: by number of units; latency: least time of one request; bottleneck: most requests a second",
    )
    in_flight: int = Field(1, ge=1, description="requests under way at once")


class InferenceChain(Chain):
    """A chain that several requests pass at once."""

    def bottleneck(self, cuts: Cuts) -> float:
        """Return the seconds between two requests' outputs when many are in flight."""
        return max(super().bottleneck(cuts), self.way_back[0])

    @property
    def way_back(self) -> tuple[float, float]:
        """The seconds that a link is busy with the outputs, which return to the first device, and its delay."""
        link = self.links.get((self.devices[-1].name, self.devices[0].name))
        if link is None:
            return 0.0, 0.0
        return link.transmission_time(size_around(self.batch_size * self.units[-1].output_bytes)), link.delay


class SequentialDetails(Details):
    """What the plan of an inference chain tells; in seconds."""

    model_config = ConfigDict(extra="forbid")
    partition: str
    """How the cuts were chosen."""
    latency: float
    """Of one request alone."""
    bottleneck: float
    """Between two requests' outputs when many are in flight."""


def plan(method: str, problem: Problem[SequentialOptions]) -> Plan[SequentialDetails]:
    """Plan for all devices. Raises `InputError` for too many stages, missing links and too little memory."""
    options = problem.options
    chain, cuts = _cut(problem, all_devices(problem))
    latency, bottleneck = chain.latency(cuts) + sum(chain.way_back), chain.bottleneck(cuts)
    return Plan(
        method=method,
        lead=problem.devices[0].name,
        pieces=pieces(chain, cuts),
        step_time=max(bottleneck, latency / options.in_flight),
        details=SequentialDetails(partition=options.partition, latency=latency, bottleneck=bottleneck),
    )


def stages_over(problem: Problem[SequentialOptions], there: Collection[str]) -> tuple[Piece, ...]:
    """Plan for the devices that are there; raises `InputError` where they are too few or too small."""
    return pieces(*_cut(problem, devices_among(problem, there)))


def _cut(problem: Problem[SequentialOptions], devices: Sequence[DeviceSpec]) -> tuple[InferenceChain, Cuts]:
    chain = InferenceChain(problem.model, tuple(devices), problem.links, problem.workload.batch_size)
    cut = {"even": chain.even, "latency": chain.least_latency, "bottleneck": chain.least_bottleneck}
    return chain, cut[problem.options.partition]()
