"""Sequential layer mapping: inference in which each device computes consecutive units of the model.

The first device sends the samples of a request through the devices in their order, and the last device returns the
outputs to the first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Literal

from pydantic import ConfigDict, Field

from testbed.device import Device
from testbed.hardware import DeviceSpec
from testbed.ml.method import Method, PlannedMessage, PlanningProblem, ProgramContext
from testbed.ml.partition import Chain, Cuts
from testbed.ml.pipeline.planning import (
    StagesOptions,
    devices_among,
    initial_devices,
    stage_assignments,
    stage_messages,
)
from testbed.plan import Assignment, Plan, PlanDetails
from testbed.wire.message import size_around


class SequentialOptions(StagesOptions):
    """Options of `Sequential`."""

    partition: Literal["even", "latency", "bottleneck"] = Field(
        "latency",
        description=(
            "even: equal numbers of units; latency: minimum time of a request; "
            "bottleneck: maximum requests per second"
        ),
    )
    in_flight: int = Field(1, ge=1, description="requests in flight at once")


class InferenceChain(Chain):
    """Devices in a row that work on one or more requests at once, and return the outputs to the first device."""

    def bottleneck(self, cuts: Cuts) -> float:
        """Return the seconds between two outputs with many requests in flight."""
        busy, _ = self.output_transfer
        return max(super().bottleneck(cuts), busy)

    @property
    def output_transfer(self) -> tuple[float, float]:
        """Seconds for which the outputs of a batch occupy the link to the first device, and the link's delay."""
        last = self.devices[-1].name
        first = self.devices[0].name
        link = self.links.get((last, first))
        # A single device has no such link, and has the outputs already.
        if link is None:
            return 0.0, 0.0
        size = size_around(self.batch_size * self.units[-1].output_bytes)
        return link.transmission_time(size), link.delay


class SequentialDetails(PlanDetails):
    """Plan details of an inference chain, in seconds."""

    model_config = ConfigDict(extra="forbid")
    partition: str
    """How the cuts were chosen."""
    latency: float
    """Seconds of one request alone."""
    bottleneck: float
    """Seconds between the outputs of two requests with many requests in flight."""


class Sequential(Method[SequentialOptions, SequentialDetails]):
    """Each device computes its units and forwards the result; the outputs return to the first device.

    With one request in flight, the latency of a request is the time of the whole chain; with more requests, the devices
    work on several at once ("layer pipelining"). `testbed.ml.pipeline.checkpointing` describes the recovery from a
    crash. Requests in flight at a crash are sent again, and their latency counts from the first attempt.
    """

    name = "sequential"
    summary = "sequential layer mapping: inference through the devices in a row, several requests in flight"
    tasks = ("infer",)
    Options = SequentialOptions
    supports = frozenset({"all_links", "initial_weights", "precisions", "timing_only"})
    Details = SequentialDetails
    span_names = frozenset({"load", "forward"})

    def plan(
        self, problem: PlanningProblem[SequentialOptions]
    ) -> Plan[SequentialDetails]:
        """Cut the model over the devices.

        Raises `InputError` for too many stages, missing links or insufficient memory.
        """
        options = problem.options
        chain, cuts = _choose_cuts(problem, initial_devices(problem))
        latency = chain.latency(cuts) + sum(chain.output_transfer)
        bottleneck = chain.bottleneck(cuts)
        return Plan(
            method=self.name,
            coordinator=problem.devices[0].name,
            assignments=stage_assignments(chain, cuts),
            # With few requests in flight, even the slowest stage or link waits, and the latency decides.
            step_time=max(bottleneck, latency / options.in_flight),
            details=SequentialDetails(
                partition=options.partition, latency=latency, bottleneck=bottleneck
            ),
        )

    def largest_messages(
        self, problem: PlanningProblem[SequentialOptions], plan: Plan[SequentialDetails]
    ) -> Iterator[PlannedMessage]:
        """Return the activations and initial weights as messages."""
        return stage_messages(problem, plan)

    async def program(
        self,
        device: Device,
        context: ProgramContext[SequentialOptions, SequentialDetails],
    ) -> None:
        """Send requests from the first device; run a stage on every device."""
        from testbed.ml.pipeline.program import run_inference

        def assign_stages(present: Collection[str]) -> tuple[Assignment, ...]:
            devices = devices_among(context.problem, present)
            chain, cuts = _choose_cuts(context.problem, devices)
            return stage_assignments(chain, cuts)

        in_flight = context.problem.options.in_flight
        await run_inference(device, context, assign_stages, in_flight)


def _choose_cuts(
    problem: PlanningProblem[SequentialOptions], devices: Sequence[DeviceSpec]
) -> tuple[InferenceChain, Cuts]:
    """Return the devices as a chain, and the best cuts by the option `partition`."""
    options = problem.options
    chain = InferenceChain(
        problem.model,
        tuple(devices),
        problem.links,
        problem.workload.batch_size,
        shares=options.shares,
    )
    if options.partition == "even":
        return chain, chain.even()
    if options.partition == "latency":
        return chain, chain.least_latency()
    return chain, chain.least_bottleneck()
