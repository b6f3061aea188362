"""Split-federated learning (Thapa et al., 2020), with one server-side model for each device."""

from __future__ import annotations

from pydantic import Field

from testbed.device import Device
from testbed.kits.rounds import planner
from testbed.kits.rounds.figures import DECLARED
from testbed.kits.rounds.options import SPLIT, GroupOptions, SplitPoints
from testbed.kits.rounds.planner import CollaborativeDetails, Team
from testbed.kits.rounds.programs import Style, run
from testbed.method import Job, Method, Problem
from testbed.plan import Plan


class SplitFederatedOptions(GroupOptions):
    """Options of `SplitFederated`."""

    split: SplitPoints = Field("best", description=SPLIT)


class SplitFederated(Method[SplitFederatedOptions, CollaborativeDetails]):
    """All devices train the first layers at once, the server the rest for each of them; both sides are averaged."""

    name = "split-federated"
    summary = "split-federated learning: the first layers on all devices at once, the rest on the server"
    Options = SplitFederatedOptions
    Details = CollaborativeDetails
    declared = DECLARED
    timing_only = True
    takes_weights = True

    def data_owners(self, problem: Problem[SplitFederatedOptions]) -> tuple[str, ...]:
        """Return all devices but the first, which is the server."""
        return Team(problem).names

    def plan(self, problem: Problem[SplitFederatedOptions]) -> Plan[CollaborativeDetails]:
        """Split the model for each device. Raises `InputError` where that cannot be."""
        team = Team(problem)
        team.check()
        return planner.split_plan(self.name, team, problem.options.split, at_once=len(team.devices))

    async def program(self, device: Device, job: Job[SplitFederatedOptions, CollaborativeDetails]) -> None:
        """Hold rounds on the first device, train on the others."""
        options = job.problem.options
        await run(device, job, Style(split=True, fraction=options.fraction, min_devices=options.min_devices))
