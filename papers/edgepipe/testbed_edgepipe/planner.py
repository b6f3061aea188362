"""EdgePipe's options and placement of neurons."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from testbed.ml.method import Baselines, PlanningProblem
from testbed.ml.slots.arrangement import Allocation, NeuronAssignment, partition_neurons
from testbed.ml.slots.planner import Divide, SlotDetails, SlotOptions, layer_sizes
from testbed.plan import Plan

INFORMING = ("needs_arrangement", "arrangement")
"""Kinds of the messages before the first timeslot, see `EdgePipeOptions.send_model_partition`."""
UpdateCondition = Literal["all_losses", "all_results", "all_transmissions"]


class EdgePipeOptions(SlotOptions):
    """Options of `EdgePipe`."""

    baselines: ClassVar[Baselines] = {
        # Section VI's Model: model parallelism without a pipeline of batches.
        "model": {"pipelined": False},
        # GPipe and PipeDream place whole layers on devices, as Vertical does.
        "gpipe": {"allocation": "vertical", "micro_batches": "devices"},
        "pipedream": {"allocation": "vertical"},
        # Figure 8's Random: super neurons on devices in a random order.
        "random": {"mapping": "random"},
    }
    former_keys: ClassVar[Mapping[str, str]] = {
        **SlotOptions.former_keys,
        "informs": "send_model_partition",
        "learns": "update_condition",
        "masks": "mask_missing_outputs",
    }
    allocation: Allocation = "hybrid"
    """Groups of layers: one layer each, by equation (1), or all layers in one."""
    micro_batches: Annotated[int, Field(ge=1)] | Literal["devices"] = 1
    """Parts of a batch. More than one is GPipe, which needs the vertical division: all parts go forward, then all go
    backward, one a slot. `devices` takes one part per device."""
    update_condition: UpdateCondition = "all_losses"
    """The data of a batch without which a layer makes no update. `all_losses`: a missing input counts as zero, and a
    layer computes gradients "only if it receives all of the losses from its next layer" (Section V-B). `all_results`:
    the output layer also needs all results. `all_transmissions`: each layer also needs all outputs of the previous
    layer."""
    mask_missing_outputs: bool = True
    """Whether an output that counted as zero gets no losses, as the gradient of a constant is zero. The paper does not
    state this; otherwise losses of outputs that nobody received let weights grow without bound."""
    send_model_partition: bool = False
    """Whether the coordinator sends all other devices their neurons before the first timeslot, as in Algorithm 1.
    Otherwise each device reads the plan."""

    @property
    def divide(self) -> Divide:
        """The division of layers by `layers_per_group` or `allocation`.

        >>> EdgePipeOptions(allocation="vertical").divide([4, 4], ["a", "b"]).devices
        ('a', 'b')
        """
        return partial(
            partition_neurons, allocation=self.layers_per_group or self.allocation
        )


def planned_assignment(
    problem: PlanningProblem[EdgePipeOptions], plan: Plan[SlotDetails]
) -> NeuronAssignment:
    """Return the placement of neurons in a plan."""
    return problem.options.divide(layer_sizes(problem), plan.details.devices)
