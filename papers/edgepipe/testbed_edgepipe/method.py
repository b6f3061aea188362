"""EdgePipe (Yoon et al., "EdgePipe: Tailoring Pipeline Parallelism With Deep Neural Networks for Volatile Wireless
Edge Devices", IEEE Internet of Things Journal, 2022).

Layers are numbered from 0, the input layer, whose neurons are the values of a sample; batches from 0. The paper counts
both from 1. Of its baselines, `EdgePipeOptions.baselines`, one is missing: Naive is a scenario of one device.
"""

from __future__ import annotations

from dataclasses import replace

from testbed.device import Device
from testbed.ml.method import Job, Problem
from testbed.ml.slots.figures import DECLARED, details_of
from testbed.ml.slots.planner import SlotDetails, SlotMethod, plan
from testbed.plan import Plan
from testbed.trace.metrics_spec import Metric
from testbed.trace.record import RunView
from testbed_edgepipe.planner import INFORMING, EdgePipeOptions


def _learned(record: RunView) -> float | None:
    """Each piece updates its units once a batch, unless losses of the layer behind are missing."""
    units = sum(piece.last - piece.first for piece in record.plan.pieces)
    due = len(record.of("step")) * details_of(record).micro_batches * units
    made = sum(event.fields["span"] == "backward" for event in record.of("compute"))
    return made / due if due else None


def _informing(record: RunView) -> int | None:
    sizes = [
        event.fields["bytes"]
        for event in record.of("send")
        if event.fields["message"] in INFORMING
    ]
    return sum(sizes) or None


FIGURES = (
    Metric(
        "learned",
        "share",
        "fraction of layer updates performed (all gradients received)",
        _learned,
        brief=True,
    ),
    Metric(
        "informing_bytes",
        "bytes",
        "bytes that the coordinator sends to announce the assignment of neurons",
        _informing,
    ),
)


class EdgePipe(SlotMethod[EdgePipeOptions, SlotDetails]):
    """Super neurons trained in fixed timeslots over casts that may be lost; missing values are treated as null.

    A device that restarts goes on with the slot that it is, from its first weights.
    """

    name = "edgepipe"
    summary = "neurons of several layers on each device, trained in timeslots over lossy casts"
    Options = EdgePipeOptions
    Details = SlotDetails
    declared = replace(DECLARED, figures=(*FIGURES, *DECLARED.figures))

    def plan(self, problem: Problem[EdgePipeOptions]) -> Plan[SlotDetails]:
        """Divide the layers, map the super neurons, time the slots. Raises `InputError` where that cannot be."""
        given = problem.options.micro_batches
        micro_batches = len(problem.devices) if given == "devices" else given
        return plan(
            self.name,
            problem,
            problem.options.divide,
            micro_batches,
            problem.options.informs,
        )

    async def program(
        self, device: Device, job: Job[EdgePipeOptions, SlotDetails]
    ) -> None:
        """Be a super neuron, slot by slot."""
        if device.name in job.plan.devices:
            from testbed_edgepipe.program import run

            await run(device, job)
