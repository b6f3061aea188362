"""EdgePipe (Yoon et al., "EdgePipe: Tailoring Pipeline Parallelism With Deep Neural Networks for Volatile Wireless
Edge Devices", IEEE Internet of Things Journal, 2022).

Layers are numbered from 0, the input layer, whose neurons are the values of a sample; batches from 0. The paper counts
both from 1. Of its baselines, `EdgePipeOptions.baselines`, one is missing: Naive is a scenario of one device.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from testbed.device import Device
from testbed.kits.slots.arrangement import Allocation, Arrangement, partition
from testbed.kits.slots.figures import DECLARED, details_of
from testbed.kits.slots.planner import Divide, SlotDetails, SlotMethod, SlotOptions, neurons_of, plan
from testbed.method import Baselines, Job, Problem
from testbed.plan import Plan
from testbed.trace.figures import Figure
from testbed.trace.record import Record

INFORMING = ("needs_arrangement", "arrangement")
"""Messages before the first timeslot, see `EdgePipeOptions.informs`."""
Learns = Literal["what_arrived", "with_all_results", "with_all_transmissions"]


class EdgePipeOptions(SlotOptions):
    """Options of `EdgePipe`."""

    baselines: ClassVar[Baselines] = {
        "model": {"pipelined": False},
        "gpipe": {"allocation": "vertical", "micro_batches": "devices"},
        "pipedream": {"allocation": "vertical"},
        "random": {"mapping": "random"},
    }
    allocation: Allocation = "hybrid"
    """Groups of layers: one layer each, by equation (1), or all layers in one."""
    micro_batches: Annotated[int, Field(ge=1)] | Literal["devices"] = 1
    """More than one: GPipe, for the vertical division; `devices`: as many as there are of these. All parts of a batch
    go forward, then all back, one a slot."""
    learns: Learns = "what_arrived"
    """When layers learn. Of what has arrived: "the corresponding information is treated as null, and the process is
    continued" (Section V-B). With all results: the output layer of a batch whose results are all there. With all
    transmissions: each layer also of a batch whose outputs before it were all there, since "the gradient computation
    would likely fail upon any single transmission loss" (Section VI)."""
    informs: bool = False
    """Whether the device that coordinates sends each other what it is to hold before the first timeslot, as Algorithm 1
    has it, and nobody begins before. Else each knows it by itself."""

    @property
    def divide(self) -> Divide:
        """How layers are divided."""
        return partial(partition, allocation=self.layers or self.allocation)


def arrangement(problem: Problem[EdgePipeOptions], plan: Plan[SlotDetails]) -> Arrangement:
    """Return who holds what by a plan."""
    return problem.options.divide(neurons_of(problem), plan.details.devices)


def _learned(record: Record) -> float | None:
    """Each piece updates its units once a batch, unless losses of the layer behind are missing."""
    units = sum(piece.last - piece.first for piece in record.plan.pieces)
    due = len(record.of("step")) * details_of(record).micro_batches * units
    made = sum(event.fields["span"] == "backward" for event in record.of("compute"))
    return made / due if due else None


def _informing(record: Record) -> int | None:
    sizes = [event.fields["bytes"] for event in record.of("send") if event.fields["message"] in INFORMING]
    return sum(sizes) or None


FIGURES = (
    Figure(
        "learned",
        "share",
        "of all updates of layers, those made: all losses of the layer behind had arrived",
        _learned,
        brief=True,
    ),
    Figure(
        "informing_bytes", "bytes", "by which the device that coordinates sends each what it is to hold", _informing
    ),
)


class EdgePipe(SlotMethod[EdgePipeOptions, SlotDetails]):
    """Super neurons trained in fixed timeslots over casts that may be lost; what does not arrive is treated as null.

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
        return plan(self.name, problem, problem.options.divide, micro_batches, problem.options.informs)

    async def program(self, device: Device, job: Job[EdgePipeOptions, SlotDetails]) -> None:
        """Be a super neuron, slot by slot."""
        if device.name in job.plan.devices:
            from testbed.methods.edgepipe.program import run

            await run(device, job)
