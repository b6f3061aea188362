"""Federated learning with federated averaging (McMahan et al., 2017)."""

from __future__ import annotations

from testbed.device import Device
from testbed.kits.rounds import planner
from testbed.kits.rounds.figures import DECLARED
from testbed.kits.rounds.options import GroupOptions
from testbed.kits.rounds.planner import CollaborativeDetails, Team
from testbed.kits.rounds.programs import Style, run
from testbed.method import Job, Method, Problem
from testbed.plan import Plan


class FederatedOptions(GroupOptions):
    """Options of `Federated`."""


class Federated(Method[FederatedOptions, CollaborativeDetails]):
    """Each device trains the whole model on its own data; the server averages what they send, by their samples.

    Momentum stays on its device. A device that is gone is left out of a round at its deadline, and takes part again
    once it is back.
    """

    name = "federated"
    summary = "federated learning: devices train the whole model on their data, the server averages"
    Options = FederatedOptions
    Details = CollaborativeDetails
    declared = DECLARED
    timing_only = True
    takes_weights = True

    def data_owners(self, problem: Problem[FederatedOptions]) -> tuple[str, ...]:
        """Return all devices but the first, which is the server."""
        return Team(problem).names

    def plan(self, problem: Problem[FederatedOptions]) -> Plan[CollaborativeDetails]:
        """Give the whole model to each device. Raises `InputError` where it does not fit."""
        team = Team(problem)
        team.check()
        portions = {device.name: planner.whole(team, device) for device in team.devices}
        return planner.plan(self.name, team, portions, {})

    async def program(self, device: Device, job: Job[FederatedOptions, CollaborativeDetails]) -> None:
        """Hold rounds on the first device, train on the others."""
        options = job.problem.options
        await run(device, job, Style(split=False, fraction=options.fraction, min_devices=options.min_devices))
