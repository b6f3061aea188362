"""VersatileFL (Yoon et al., "VersatileFL: Volatility-Resilient Federated Learning in Wireless Edge Networks").

Layers and batches are numbered from 0.
"""

from __future__ import annotations

from testbed.device import Device
from testbed.ml.method import PlanningProblem, ProgramContext
from testbed.ml.slots.planner import SlotMethod
from testbed.plan import Plan
from testbed_versatilefl.metrics import DECLARED
from testbed_versatilefl.planner import VersatileDetails, VersatileOptions, plan


class Versatile(SlotMethod[VersatileOptions, VersatileDetails]):
    """Learning with incomplete values, in which neurons move as devices and links fail.

    Missing values are substituted, saved gradients are used again, and the neurons of a layer are divided among the
    devices of its group in proportion to their credibility. A device that restarts joins again, and so does a device
    that lost its neurons because its casts did not arrive, once its casts arrive again. Losses go to all neurons of the
    previous layer (equation 2), also to neurons whose outputs had not arrived: to leave these out, as EdgePipe does,
    made no measurable difference.
    """

    name = "versatile"
    summary = "EdgePipe that substitutes what is lost, and moves neurons away from devices that fail"
    Options = VersatileOptions
    Details = VersatileDetails
    supports = SlotMethod.supports | {"retirement"}
    declared = DECLARED

    def plan(
        self, problem: PlanningProblem[VersatileOptions]
    ) -> Plan[VersatileDetails]:
        """Divide the layers, map the super neurons and time the slots. Raises `InputError` for an impossible plan."""
        return plan(problem)

    def facts(
        self,
        problem: PlanningProblem[VersatileOptions],
        plan: Plan[VersatileDetails],
        device: str,
    ) -> tuple[PlanningProblem[VersatileOptions], Plan[VersatileDetails]]:
        """Return the whole problem and plan: any device may become the acting coordinator, which needs all links."""
        return problem, plan

    async def program(
        self,
        device: Device,
        context: ProgramContext[VersatileOptions, VersatileDetails],
    ) -> None:
        """Work slot by slot with the current neurons of the device."""
        if device.name in context.plan.devices:
            # Imported here, since only devices need torch.
            from testbed_versatilefl.program import run

            await run(device, context)
