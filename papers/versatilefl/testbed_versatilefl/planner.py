"""VersatileFL's options, plan and first placement of neurons."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from statistics import fmean
from typing import ClassVar, Literal

from pydantic import Field

from testbed.common.errors import InputError
from testbed.common.quantities import Fraction
from testbed.common.seeds import derive
from testbed.ml.method import Baselines, PlanningProblem
from testbed.ml.models.slices import as_channels
from testbed.ml.slots import planner
from testbed.ml.slots.arrangement import Allocation, NeuronAssignment, partition_neurons
from testbed.ml.slots.planner import SlotDetails, SlotOptions
from testbed.plan import Plan
from testbed_versatilefl.records import ALPHA

PATIENCE = 60
"""Steps without a better loss after which the next stage begins; the paper's."""
MARGIN_STEPS = 4
"""Steps beyond those that a record needs to reach all devices, for casts that are lost on the way."""


class VersatileOptions(SlotOptions):
    """Options of `Versatile`."""

    former_keys: ClassVar[Mapping[str, str]] = {
        **SlotOptions.former_keys,
        "backward": "backward_granularity",
        "credibility": "credibility_threshold",
        "grad_reuse": "grad_reuse_bw",
        "naive": "naive_baseline",
        "past": "substitute_past_outputs",
        "reuse": "reuse_gradients",
        "sharing": "result_sharing",
        "stage_window": "loss_window",
        "window": "management_window",
    }
    baselines: ClassVar[Baselines] = {
        "naive": {
            "substitution": False,
            "reuse_gradients": False,
            "rearrangement": False,
        },
        "naive-zeros": {
            "thres_fw": 0,
            "backward_granularity": "neuron",
            "reuse_gradients": False,
            "rearrangement": False,
        },
        "naive-blocked": {
            "thres_fw": "100%",
            "backward_granularity": "neuron",
            "reuse_gradients": False,
            "rearrangement": False,
        },
    }
    """The paper's Naive "does not have any maintenance scheme against failures". `naive` drops a batch with anything
    missing: "there is no perfect data delivery until the output layer in horizontal allocation at all, which means it
    failed to converge" (Section VI-A). With `naive-zeros` missing values count as zero, and a layer learns if all its
    losses have arrived; `naive-blocked` also drops a batch with missing values, but only in training."""
    naive_after: int | None = Field(None, ge=1)
    """Steps after which nothing is maintained any more: "applying Naive to the VersatileFL-based trained or recovered
    model after each network variation outbreak" (Figure 11), as the baseline `naive`."""
    naive_baseline: Literal["naive", "naive-zeros", "naive-blocked"] = "naive"
    """The baseline of `naive_after`."""
    allocation: Literal["vertical", "hybrid", "horizontal", "random"] = "hybrid"
    """As EdgePipe's; random: all layers in one group, each neuron on any of the devices."""
    substitution: bool = True
    """Zeros for missing values. False: a batch with anything missing goes no further."""
    substitute_past_outputs: bool = False
    """Substitute the past for missing outputs ("the missing intermediate values with the past or approximated values"):
    what their sender's neurons last gave on the mean of a batch, since other samples pass now; zeros before that."""
    reuse_gradients: bool = True
    """Saved gradients where new ones are missing."""
    rearrangement: bool = True
    """Neurons move as devices fail, leave and join, and with their credibility."""
    backward_granularity: Literal["layer", "neuron", "link"] = "link"
    """Transmissions required for new gradients: all to the layer, all to the neuron, or any to the neuron."""
    result_sharing: Literal["layer", "neuron", "ideal"] = "neuron"
    """The same of the results that the output layer shares; ideal: none is lost."""
    thres_fw: Fraction | None = None
    """Forward criterion; None: from 0 to 0.5, dynamically."""
    grad_reuse_bw: int | None = Field(None, ge=0, le=1_000_000)
    """gradReuse_bw, most steps in a row that saved gradients are used; None: from 10 to 0, dynamically."""
    patience: int = Field(PATIENCE, ge=1)
    """Steps after that of the best loss until both become stricter. Only losses of complete results are seen."""
    loss_window: int = Field(1, ge=1, le=1_000_000)
    """Steps whose mean loss is compared; EdgePipe's Figure 5 takes a tenth of an epoch, 60."""
    management_window: int | None = Field(None, ge=1)
    """Steps from one judgement of credibility to the next; None: an epoch, or as many as records need to travel."""
    alpha: Fraction = ALPHA
    """Weight of the last window in credibility."""
    credibility_threshold: Fraction | None = None
    """A group is rearranged while a device of it has less; None: the mean reception ratio of the plan's links."""


class VersatileDetails(SlotDetails):
    """Details of a VersatileFL plan, in addition to `SlotDetails`."""

    credibility_threshold: float
    """Credibility below which a device's group is rearranged."""
    management_window: int | None
    """Steps; None: an epoch."""
    record_delay: int
    """Steps after the end of a window in which records travel, before anything is decided from them."""
    random_allocation: bool
    """Whether each neuron was given to any device of the group."""


def plan(problem: PlanningProblem[VersatileOptions]) -> Plan[VersatileDetails]:
    """Plan as EdgePipe does; scattered neurons are planned as Horizontal ones. Raises `InputError`."""
    options = problem.options
    allocation: Allocation = (
        "horizontal" if options.allocation == "random" else options.allocation
    )
    planned = planner.plan(
        "versatile",
        problem,
        lambda sizes, names: partition_neurons(
            sizes, names, options.layers_per_group or allocation
        ),
    )
    table = planner.timetable_of(planned.details)
    # Casts carry records through all layers and back: one whole batch, and some for lost casts.
    grace = math.ceil(table.slot_count(1) / table.period) + MARGIN_STEPS
    if (
        options.rearrangement
        and options.management_window is not None
        and options.management_window <= grace
    ):
        text = f"{options.management_window} steps are too few: records take {grace} steps to reach every device"
        raise InputError(text, ("method", "management_window"))
    ratios = [1 - link.message_loss for link in problem.links.values()]
    threshold = options.credibility_threshold
    if threshold is None:
        # The paper's C_thres, 0.7767, is the mean reception ratio of its network.
        threshold = fmean(ratios or [1.0])
    details = VersatileDetails(
        **planned.details.model_dump(),
        credibility_threshold=threshold,
        management_window=options.management_window,
        record_delay=grace,
        random_allocation=options.allocation == "random",
    )
    return Plan(**{**dict(planned), "details": details})


def initial_assignment(
    problem: PlanningProblem[VersatileOptions], details: VersatileDetails
) -> NeuronAssignment:
    """Return the initial placement of neurons: EdgePipe's, or with `allocation: random` one drawn from the seed."""
    options, names = problem.options, details.devices
    sizes = planner.layer_sizes(problem)
    if options.allocation != "random":
        return partition_neurons(
            sizes, names, options.layers_per_group or options.allocation
        )
    layers = []
    for layer, size in enumerate(sizes):
        draws = random.Random(derive(problem.seed, "scatter", layer))
        owners = draws.choices(names, k=size)
        # A device without neurons would never cast, and the others could not judge it.
        owners[: len(names)] = names
        draws.shuffle(owners)
        neurons: dict[str, list[int]] = {name: [] for name in names}
        for neuron, owner in enumerate(owners):
            neurons[owner].append(neuron)
        layers.append({name: as_channels(own) for name, own in neurons.items()})
    groups = tuple(range(first, stop) for first, stop in details.groups)
    return NeuronAssignment(groups, sizes, tuple(layers))
