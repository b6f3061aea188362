"""Which devices become stages, at the start and after a failure, and what they have in common to be told."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

from pydantic import Field

from testbed.common.errors import InputError
from testbed.common.quantities import Duration
from testbed.hardware import DeviceSpec
from testbed.method import Options, Problem
from testbed.partition import Chain, Cuts
from testbed.plan import Piece


class StagesOptions(Options):
    """Options of every method that has its devices in a row."""

    stages: int | None = Field(
        None, ge=1, description="use only the first N devices; the others stand by; default: all"
    )
    patience: Duration = Field(
        2.0,
        gt=0,
        description="without progress before devices are polled, and without a reply before they count as lost",
    )
    return_window: Duration = Field(15.0, description="how long a lost device may take to come back")


def all_devices(problem: Problem[StagesOptions]) -> tuple[DeviceSpec, ...]:
    """Return the devices to begin with.

    Raises `InputError` for more stages than devices, and for devices that the first one cannot talk to: it tells them
    what to do and hears how they are.
    """
    count = problem.options.stages or len(problem.devices)
    if count > len(problem.devices):
        raise InputError(f"{count} stages need {count} devices, there are {len(problem.devices)}", ("method", "stages"))
    lead, *others = (device.name for device in problem.devices)
    for other in others:
        if (lead, other) not in problem.links or (other, lead) not in problem.links:
            raise InputError(
                f"{lead} leads the others and needs a link to each and back, but there is none between {lead} and "
                f"{other}: use the topology mesh or add the link",
                ("network", "topology"),
            )
    return problem.devices[:count]


def devices_among(problem: Problem[StagesOptions], there: Collection[str]) -> tuple[DeviceSpec, ...]:
    """Return the devices to go on with, of those that are there."""
    devices = [device for device in problem.devices if device.name in there]
    return tuple(devices[: min(problem.options.stages or len(devices), len(problem.model.units))])


def pieces(chain: Chain, cuts: Cuts) -> tuple[Piece, ...]:
    """Return the stages that the cuts make."""
    return tuple(
        Piece(device=device.name, first=first, last=last, memory=chain.memory(stage, first, last))
        for stage, (device, (first, last)) in enumerate(zip(chain.devices, pairwise(cuts), strict=True))
    )
