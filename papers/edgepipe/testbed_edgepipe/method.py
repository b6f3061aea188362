"""EdgePipe (Yoon et al., "EdgePipe: Tailoring Pipeline Parallelism With Deep Neural Networks for Volatile Wireless
Edge Devices", IEEE Internet of Things Journal, 2022).

Numbers of layers and batches begin at 0, and in the paper at 1. Layer 0 is the input layer, whose neurons are the
values of a sample. `EdgePipeOptions.baselines` has the paper's baselines, except Naive, the training on a single
device: a scenario with one device is this baseline.
"""

from __future__ import annotations

from dataclasses import replace

from testbed.device import Device
from testbed.ml.method import PlanningProblem, ProgramContext
from testbed.ml.slots.metrics import DECLARED, details_of
from testbed.ml.slots.planner import SlotDetails, SlotMethod
from testbed.ml.slots.planner import plan as plan_slots
from testbed.plan import Plan
from testbed.trace.metrics_spec import Metric
from testbed.trace.record import RunView
from testbed_edgepipe.planner import PARTITION_MESSAGES, EdgePipeOptions


def _update_share(record: RunView) -> float | None:
    """Return the number of updates divided by the number of possible updates; None for a run without steps.

    A device can update each of its layers once a step, after the last micro-batch. The update takes place if the device
    has a gradient of at least one micro-batch; without micro-batches this is the gradient of the batch.
    """
    updates_per_step = 0
    for assignment in record.plan.assignments:
        updates_per_step += assignment.stop - assignment.start
    possible_updates = len(record.of("step")) * updates_per_step
    if not possible_updates:
        return None
    micro_batches = details_of(record).micro_batches
    updates = 0
    for event in record.of("compute"):
        if event.fields["span"] != "backward":
            continue
        # Only the backward of the last micro-batch changes weights; earlier ones add up gradients.
        if (event.fields["batch"] + 1) % micro_batches == 0:
            updates += 1
    return updates / possible_updates


def _model_partition_bytes(record: RunView) -> int | None:
    """Return the bytes of messages with or about the model partition; None for a run without these messages."""
    total = 0
    for event in record.of("send"):
        if event.fields["message"] in PARTITION_MESSAGES:
            total += event.fields["bytes"]
    return total or None


METRICS = (
    Metric(
        "update_share",
        "share",
        "fraction of layer updates performed; each needs all losses of a batch, or of one of its micro-batches",
        _update_share,
        brief=True,
    ),
    Metric(
        "model_partition_bytes",
        "bytes",
        "bytes that the device coordinator sends to distribute the model partition",
        _model_partition_bytes,
    ),
)

FORMER_METRICS = {
    "informing_bytes": "model_partition_bytes",
    "learned": "update_share",
}
"""Former name -> present name of each renamed metric."""


class EdgePipe(SlotMethod[EdgePipeOptions, SlotDetails]):
    """Training in fixed timeslots over lossy casts; missing values count as zero.

    A super neuron is the set of neurons, of several successive layers, that one device has. A device that restarts
    continues in the current slot with its initial weights.
    """

    name = "edgepipe"
    summary = "neurons of several layers on each device, trained in timeslots over lossy casts"
    Options = EdgePipeOptions
    Details = SlotDetails
    declared = replace(
        DECLARED,
        metrics=(*METRICS, *DECLARED.metrics),
        former_metrics={**DECLARED.former_metrics, **FORMER_METRICS},
    )

    def plan(self, problem: PlanningProblem[EdgePipeOptions]) -> Plan[SlotDetails]:
        """Divide layers into super neurons, choose a device for each, and compute the length of a timeslot.

        Raises `InputError` if such a plan is impossible.
        """
        options = problem.options
        micro_batches = options.micro_batches
        if micro_batches == "devices":
            micro_batches = len(problem.devices)
        return plan_slots(
            self.name,
            problem,
            options.divide,
            micro_batches,
            options.send_model_partition,
        )

    async def program(
        self, device: Device, context: ProgramContext[EdgePipeOptions, SlotDetails]
    ) -> None:
        """Do the work of the device's super neuron, slot by slot; devices without a super neuron do nothing."""
        if device.name not in context.plan.devices:
            return
        # Imported here, since only devices need torch.
        from testbed_edgepipe.program import run

        await run(device, context)
