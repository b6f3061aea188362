"""VersatileFL (Yoon et al., "VersatileFL: Volatility-Resilient Federated Learning in Wireless Edge Networks").

Layers and batches are numbered from 0.
"""

from __future__ import annotations

from testbed.device import Device
from testbed.ml.method import Job, Problem
from testbed.ml.slots.planner import SlotMethod
from testbed.plan import Plan
from testbed_versatilefl.figures import DECLARED
from testbed_versatilefl.planner import VersatileDetails, VersatileOptions, plan


class Versatile(SlotMethod[VersatileOptions, VersatileDetails]):
    """Learning that continues with the values that arrive, and moves neurons as devices and links fail.

    Missing values are substituted, saved gradients are used again, and the neurons of a layer go to the devices of its
    group in proportion to how well these are heard. A device that restarts joins again, and so does one that was not
    heard, and lost its neurons, once it is heard again. Losses go to all neurons of the layer before (equation
    2), also to those whose outputs had not arrived: to leave them out, as EdgePipe does, made no difference that could
    be measured.
    """

    name = "versatile"
    summary = "EdgePipe that substitutes what is lost, and moves neurons away from devices that fail"
    Options = VersatileOptions
    Details = VersatileDetails
    supports = SlotMethod.supports | {"retirement"}
    declared = DECLARED

    def plan(self, problem: Problem[VersatileOptions]) -> Plan[VersatileDetails]:
        """Divide the layers, map the super neurons, time the slots. Raises `InputError` where that cannot be."""
        return plan(problem)

    def facts(
        self,
        problem: Problem[VersatileOptions],
        plan: Plan[VersatileDetails],
        device: str,
    ) -> tuple[Problem[VersatileOptions], Plan[VersatileDetails]]:
        """Return all to each: whoever is heard first decides for all, by how well all hear each other."""
        return problem, plan

    async def program(
        self, device: Device, job: Job[VersatileOptions, VersatileDetails]
    ) -> None:
        """Be a super neuron, slot by slot, whichever neurons it has."""
        if device.name in job.plan.devices:
            from testbed_versatilefl.program import run

            await run(device, job)
