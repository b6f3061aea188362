"""EdgePipe's options and placement of neurons."""

from __future__ import annotations

from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from testbed.ml.method import Baselines, Problem
from testbed.ml.slots.arrangement import Allocation, NeuronAssignment, partition
from testbed.ml.slots.planner import Divide, SlotDetails, SlotOptions, neurons_of
from testbed.plan import Plan

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
    """When layers learn. `what_arrived`: a missing input counts as zero, and a layer computes gradients "only if it
    receives all of the losses from its next layer" (Section V-B). `with_all_results`: the output layer learns only of a
    batch whose results have all arrived, too. `with_all_transmissions`: each layer also only of a batch whose outputs
    before it have all arrived."""
    masks: bool = True
    """Whether an output that counted as zero gets no losses, as the gradient of a constant is zero. The paper does not
    say; otherwise losses of outputs that nobody received let weights grow without bound."""
    informs: bool = False
    """Whether the device that coordinates sends each other what it is to hold before the first timeslot, as Algorithm 1
    has it, and nobody begins before. Else each knows it by itself."""

    @property
    def divide(self) -> Divide:
        """How layers are divided."""
        return partial(partition, allocation=self.layers or self.allocation)


def arrangement(
    problem: Problem[EdgePipeOptions], plan: Plan[SlotDetails]
) -> NeuronAssignment:
    """Return the placement of neurons in a plan."""
    return problem.options.divide(neurons_of(problem), plan.details.devices)
