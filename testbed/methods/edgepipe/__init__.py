"""EdgePipe (Yoon et al., "EdgePipe: Tailoring Pipeline Parallelism With Deep Neural Networks for Volatile Wireless
Edge Devices", IEEE Internet of Things Journal, 2022).

Layers are numbered from 0, the input layer, whose neurons are the values of a sample; batches from 0. The paper counts
both from 1.
"""

from __future__ import annotations

from testbed.device import Device
from testbed.kits.slots.figures import DECLARED
from testbed.kits.slots.planner import EdgePipeDetails, EdgePipeOptions, plan, timetable_of
from testbed.kits.slots.timeslots import draw
from testbed.method import Job, Method, Problem
from testbed.plan import Plan


class EdgePipe(Method[EdgePipeOptions, EdgePipeDetails]):
    """Super neurons trained in fixed timeslots over casts that may be lost; what does not arrive counts as zero.

    Every device has all samples, of which those of the input layer read their own values, and the output layer the
    labels. A device that restarts goes on with the slot that it is, from its first weights.
    """

    name = "edgepipe"
    summary = "neurons of several layers on each device, trained in timeslots over lossy casts"
    Options = EdgePipeOptions
    Details = EdgePipeDetails
    samples_everywhere = True
    declared = DECLARED

    def plan(self, problem: Problem[EdgePipeOptions]) -> Plan[EdgePipeDetails]:
        """Divide the layers, map the super neurons, time the slots. Raises `InputError` where that cannot be."""
        return plan(problem)

    async def program(self, device: Device, job: Job[EdgePipeOptions, EdgePipeDetails]) -> None:
        """Be a super neuron, slot by slot."""
        if device.name in job.plan.details.devices:
            from testbed.kits.slots.member import run

            await run(device, job)

    def draw(self, plan: Plan[EdgePipeDetails]) -> str | None:
        """Draw the first timeslots, a line a group of layers."""
        return draw(timetable_of(plan.details))

    def spans(self, plan: Plan, device: str) -> frozenset[str]:
        """Return the spans of a super neuron; other devices begin none."""
        return frozenset({"forward", "backward", "evaluate"} if device in plan.devices else ())
