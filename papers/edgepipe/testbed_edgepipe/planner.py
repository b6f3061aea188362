"""EdgePipe's options, and the assignment of neurons to devices that a plan implies."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from testbed.ml.method import Baselines, PlanningProblem
from testbed.ml.slots.arrangement import Allocation, NeuronAssignment, partition_neurons
from testbed.ml.slots.planner import Divide, SlotDetails, SlotOptions, layer_sizes
from testbed.plan import Plan

PARTITION_MESSAGES = ("needs_arrangement", "arrangement")
"""Kinds of the messages by which devices request and receive the model partition before the first timeslot, if
`EdgePipeOptions.send_model_partition` is set."""
UpdateCondition = Literal["all_losses", "all_results", "all_transmissions"]


class EdgePipeOptions(SlotOptions):
    """Options of `EdgePipe`."""

    baselines: ClassVar[Baselines] = {
        # Section VI's Model: model parallelism alone, where a batch begins after the previous one is complete.
        "model": {"pipelined": False},
        # Section VI compares with the cores of GPipe and PipeDream, both on the allocation Vertical. GPipe's batches
        # are divided into as many micro-batches as there are devices.
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
    """Groups of layers; each group is divided among devices that belong to it alone. `vertical`: one layer in each
    group, as far as there are devices. `hybrid`: the numbers of layers of equation (1). `horizontal`: all layers in one
    group."""
    micro_batches: Annotated[int, Field(ge=1)] | Literal["devices"] = 1
    """Number of parts of a batch. With more than one the schedule is GPipe's, and `allocation` must be `vertical`: all
    parts go forward, one in each slot, then all go backward, and the weights change after the last. `devices`: as many
    parts as devices."""
    update_condition: UpdateCondition = "all_losses"
    """The transmissions of a batch that a layer on a device must have received to learn from the batch. `all_losses`:
    all losses of the next layer, as in the paper: a layer computes gradients "only if it receives all of the losses
    from its next layer" (Section V-B), and a missing input counts as zero. The output layer has no next layer, and
    learns from those shared results that have arrived. `all_results`: as before, but the output layer must have
    received all shared results. `all_transmissions`: as before, and each layer must have received all outputs of the
    previous layer."""
    mask_missing_outputs: bool = True
    """Whether an output that was missing, and counted as zero, gets no losses: the zero is a constant, and the gradient
    by a constant is zero. The paper does not state this. With `false` such losses are sent; in some runs weights then
    grew until the loss was not a number."""
    send_model_partition: bool = False
    """Whether the device coordinator sends the model partition to all other devices before the first timeslot, as in
    Algorithm 1. Otherwise each device takes its neurons from the plan, without a message."""

    @property
    def divide(self) -> Divide:
        """The division of neurons among devices: by `layers_per_group` if set, otherwise by `allocation`.

        >>> EdgePipeOptions(allocation="vertical").divide([4, 4], ["a", "b"]).devices
        ('a', 'b')
        """
        # A number of layers in place of an allocation's name is the paper's M_layers.
        allocation = self.layers_per_group or self.allocation
        return partial(partition_neurons, allocation=allocation)


def planned_assignment(
    problem: PlanningProblem[EdgePipeOptions], plan: Plan[SlotDetails]
) -> NeuronAssignment:
    """Return the assignment of neurons to devices; a plan stores only the order of the devices, not the neurons."""
    return problem.options.divide(layer_sizes(problem), plan.details.devices)
