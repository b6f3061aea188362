"""VersatileFL's options, and its plan: EdgePipe's, and what credibility is compared with."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import fmean
from typing import Literal

from pydantic import Field

from testbed.common.errors import InputError
from testbed.common.quantities import Fraction
from testbed.common.seeds import derive
from testbed.kits.slots import planner as slots
from testbed.kits.slots.planner import EdgePipeDetails, EdgePipeOptions, division_of, timetable_of
from testbed.method import Problem
from testbed.methods.versatile.arrangement import Arrangement, arrangement_of
from testbed.methods.versatile.credibility import ALPHA
from testbed.methods.versatile.thresholds import PATIENCE
from testbed.models.slices import as_channels
from testbed.plan import Plan

Granularity = Literal["layer", "neuron", "link"]
"""What has to have arrived for new gradients: all transmissions to the layer, all to the neuron, or any to it."""
MARGIN_STEPS = 4
"""Steps beyond those that a record needs to reach all devices, for casts that are lost on the way."""


class VersatileOptions(EdgePipeOptions):
    """Options of `VersatileFL`, beside those of `EdgePipe`."""

    # Wider than EdgePipe's, whose planner is only ever asked for one of its own.
    allocation: Literal["vertical", "hybrid", "horizontal", "random"] = "hybrid"  # type: ignore[assignment]
    """As EdgePipe's; random: all layers in one group, each neuron on any of the devices."""
    substitution: bool = True
    """Zeros for missing values. False: a batch with anything missing goes no further."""
    reuse: bool = True
    """Saved gradients where new ones are missing."""
    rearrangement: bool = True
    """Neurons move as devices fail, leave and join, and with their credibility."""
    backward: Granularity = "link"
    """What has to have arrived of the layer behind for new gradients."""
    sharing: Literal["layer", "neuron", "ideal"] = "neuron"
    """The same of the results that the output layer shares; ideal: none is lost."""
    thres_fw: Fraction | None = None
    """Forward criterion; None: from 0 to 0.5, dynamically."""
    grad_reuse: int | None = Field(None, ge=0, le=1_000_000)
    """Most steps in a row that saved gradients are used; None: from 10 to 0, dynamically."""
    patience: int = Field(PATIENCE, ge=1)
    """Steps without a better loss after which both become stricter."""
    window: int | None = Field(None, ge=1)
    """Steps from one judgement of credibility to the next; None: an epoch, or as many as records need to travel."""
    alpha: Fraction = ALPHA
    """Weight of the last window in credibility."""
    credibility: Fraction | None = None
    """A group is rearranged while a device of it has less; None: the mean reception ratio of the plan's links."""


class VersatileDetails(EdgePipeDetails):
    """What a plan of VersatileFL tells beyond EdgePipe's."""

    threshold: float
    """Credibility below which a device's group is rearranged."""
    window: int | None
    """Steps; None: an epoch."""
    grace: int
    """Steps after the end of a window in which records travel, before anything is decided from them."""
    scattered: bool
    """Whether each neuron was given to any device of the group."""


def plan(problem: Problem[VersatileOptions]) -> Plan[VersatileDetails]:
    """Plan as EdgePipe does. Raises `InputError`."""
    options = problem.options
    if options.micro_batches > 1:
        raise InputError("is GPipe's, which waits for a whole batch: leave it out", ("method", "micro_batches"))
    scattered = options.allocation == "random"
    if scattered:
        problem = replace(problem, options=options.model_copy(update={"allocation": "horizontal"}))
    planned = slots.plan(problem)
    ratios = [1 - link.message_loss for link in problem.links.values()]
    table = timetable_of(planned.details)
    grace = math.ceil(table.slots(1) / table.period) + MARGIN_STEPS
    if options.rearrangement and options.window is not None and options.window <= grace:
        text = f"{options.window} steps are too few: records take {grace} steps to reach every device"
        raise InputError(text, ("method", "window"))
    details = VersatileDetails(
        **planned.details.model_dump(),
        threshold=fmean(ratios) if options.credibility is None else options.credibility,
        window=options.window,
        grace=grace,
        scattered=scattered,
    )
    return Plan(
        method="versatile",
        lead=planned.lead,
        pieces=planned.pieces,
        step_time=planned.step_time,
        steps=planned.steps,
        details=details,
    )


def arrangement(problem: Problem[VersatileOptions], details: VersatileDetails) -> Arrangement:
    """Return who holds what at first."""
    if not details.scattered:
        return arrangement_of(division_of(problem), details.devices)
    problem = replace(problem, options=problem.options.model_copy(update={"allocation": "horizontal"}))
    division = division_of(problem)
    layers = []
    for layer, size in enumerate(division.neurons):
        draws = random.Random(derive(problem.seed, "scatter", layer))
        holders = draws.choices(details.devices, k=size)
        # Whoever has none would never be heard.
        holders[: len(details.devices)] = details.devices
        draws.shuffle(holders)
        layers.append(
            {name: as_channels(n for n, each in enumerate(holders) if each == name) for name in details.devices}
        )
    return Arrangement(division.groups, division.neurons, tuple(layers))
