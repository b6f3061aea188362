"""VersatileFL's options, plan and initial assignment of neurons."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import ClassVar, Literal

from pydantic import Field

from testbed.common.errors import InputError
from testbed.common.quantities import Fraction
from testbed.common.seeds import derive
from testbed.ml.method import Baselines, PlanningProblem
from testbed.ml.models.slices import Channels, as_channels
from testbed.ml.slots import planner
from testbed.ml.slots.arrangement import Allocation, NeuronAssignment, partition_neurons
from testbed.ml.slots.planner import SlotDetails, SlotOptions
from testbed.ml.slots.timeslots import Timetable
from testbed.plan import Plan
from testbed_versatilefl.records import ALPHA

PATIENCE = 60
"""Steps without a better loss after which the next stage begins; the value of Section VI."""
MARGIN_STEPS = 4
"""Steps that a record gets beyond those in which it reaches all devices without loss, for casts that are lost."""


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
            "forward_criterion": "none",
            "backward_granularity": "neuron",
            "reuse_gradients": False,
            "rearrangement": False,
        },
        "naive-blocked": {
            "substitution": "tests",
            "forward_criterion": "none",
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
    """Groups of layers as in EdgePipe. `random`: all layers in one group, each neuron on a random device of all."""
    substitution: bool | Literal["tests"] = True
    """Whether zeros replace missing values. Otherwise a device drops a batch with a missing value. `tests`: a device
    drops it in training, and zeros replace missing values in test runs."""
    substitute_past_outputs: bool = False
    """Whether past outputs replace missing ones ("substituting the missing intermediate values with the past or
    approximated values"): the sender's last complete outputs, averaged over the samples of that batch, since the
    samples of this batch are others. Zeros replace outputs that never arrived."""
    reuse_gradients: bool = True
    """Whether a layer without new gradients makes its update with saved ones (Section IV-B)."""
    rearrangement: bool = True
    """Whether neurons move as devices fail, leave and join, and as their credibility changes (Section V-B)."""
    backward_granularity: Literal["layer", "neuron", "link"] = "link"
    """Losses required for new gradients: all losses of the layer, all losses of a neuron, or any loss of a neuron."""
    result_sharing: Literal["layer", "neuron", "ideal"] = "neuron"
    """Results required for new gradients of the output layer: all results on all devices of the layer, or all results
    on a device. `ideal`: no shared result is lost."""
    forward_criterion: Literal["larger", "at-least", "none"] = "larger"
    """A device drops a batch unless its success rates between all layers are larger than `thres_fw` (Section IV-A), or
    `at-least` equal to `thres_fw`, as the first example of Section IV-A reads. `none`: no batch is dropped for its
    success rates."""
    thres_fw: Fraction | None = None
    """Threshold of the forward criterion. None: from 0 to 0.5, by stages."""
    grad_reuse_bw: int | None = Field(None, ge=0, le=1_000_000)
    """The paper's gradReuse_bw: steps in a row in which saved gradients may be used. None: from 10 to 0, by stages."""
    patience: int = Field(PATIENCE, ge=1)
    """Steps without a better loss after which thres_fw and gradReuse_bw enter their next stage. Losses count only if
    all results of their batch have arrived."""
    loss_window: int = Field(1, ge=1, le=1_000_000)
    """Steps of which the mean loss is compared. EdgePipe's Figure 5 averages over a tenth of an epoch, 60 steps."""
    management_window: int | None = Field(None, ge=1)
    """Steps of the paper's window w, after which credibility is updated. None: an epoch, but at least the steps that
    records need to reach all devices."""
    alpha: Fraction = ALPHA
    """Weight of the last window in credibility (equation 4)."""
    credibility_threshold: Fraction | None = None
    """The paper's C_thres: a group with a device of less credibility is rearranged. None: the mean reception ratio of
    the plan's links."""


class VersatileDetails(SlotDetails):
    """Details of a VersatileFL plan, in addition to `SlotDetails`."""

    credibility_threshold: float
    """Credibility below which a device's group is rearranged."""
    management_window: int | None
    """Steps of a window; None: an epoch."""
    record_delay: int
    """Steps from the end of a window until its records have reached all devices, for which decisions wait."""
    random_allocation: bool
    """Whether each neuron was given to a random device."""


def plan(problem: PlanningProblem[VersatileOptions]) -> Plan[VersatileDetails]:
    """Plan as EdgePipe does, with the constants of rearrangement. Raises `InputError` for an impossible plan."""
    options = problem.options
    # With `random`, every device has neurons of every layer, as in Horizontal, so the schedule is the same.
    allocation: Allocation = "horizontal"
    if options.allocation != "random":
        allocation = options.allocation

    def divide(sizes: Sequence[int], names: Sequence[str]) -> NeuronAssignment:
        return partition_neurons(sizes, names, options.layers_per_group or allocation)

    slot_plan = planner.plan("versatile", problem, divide)
    record_delay = _record_delay(planner.timetable_of(slot_plan.details))
    window = options.management_window
    if options.rearrangement and window is not None and window <= record_delay:
        # The next window would end before the decision about this window.
        text = f"{window} steps are too few: records take {record_delay} steps to reach every device"
        raise InputError(text, ("method", "management_window"))
    ratios = [1 - link.message_loss for link in problem.links.values()]
    threshold = options.credibility_threshold
    if threshold is None:
        # The paper's C_thres, 0.7767, is the mean reception ratio of its network.
        threshold = fmean(ratios or [1.0])
    details = VersatileDetails(
        **slot_plan.details.model_dump(),
        credibility_threshold=threshold,
        management_window=window,
        record_delay=record_delay,
        random_allocation=options.allocation == "random",
    )
    return Plan(**{**dict(slot_plan), "details": details})


def _record_delay(table: Timetable) -> int:
    """Return the number of steps in which a record of received casts reaches all devices."""
    # The casts of one batch carry a record through all layers, forward and backward.
    steps = math.ceil(table.slot_count(1) / table.period)
    return steps + MARGIN_STEPS


def initial_assignment(
    problem: PlanningProblem[VersatileOptions], details: VersatileDetails
) -> NeuronAssignment:
    """Return the initial assignment of neurons: EdgePipe's, or with `allocation: random` one drawn from the seed."""
    options = problem.options
    names = details.devices
    sizes = planner.layer_sizes(problem)
    if options.allocation != "random":
        allocation = options.layers_per_group or options.allocation
        return partition_neurons(sizes, names, allocation)
    layers = []
    for layer, size in enumerate(sizes):
        # Each device computes this assignment, so draws depend on seed and layer alone.
        draws = random.Random(derive(problem.seed, "scatter", layer))
        layers.append(_scatter_neurons(size, names, draws))
    groups = tuple(range(first, stop) for first, stop in details.groups)
    return NeuronAssignment(groups, sizes, tuple(layers))


def _scatter_neurons(
    size: int, names: Sequence[str], draws: random.Random
) -> dict[str, Channels]:
    """Return the neurons of each device in a layer of ``size`` neurons, each on a random device."""
    owners = draws.choices(names, k=size)
    # Each device gets at least one neuron: without neurons it would never cast, and the others could not judge it.
    owners[: len(names)] = names
    draws.shuffle(owners)
    neurons_by_device: dict[str, list[int]] = {name: [] for name in names}
    for neuron, owner in enumerate(owners):
        neurons_by_device[owner].append(neuron)
    return {name: as_channels(neurons) for name, neurons in neurons_by_device.items()}
