"""Split learning (Gupta and Raskar, 2018; Vepakomma et al., 2018): round robin."""

from __future__ import annotations

from pydantic import Field

from testbed.device import Device
from testbed.kits.rounds import planner
from testbed.kits.rounds.figures import DECLARED
from testbed.kits.rounds.options import SPLIT, RoundOptions, SplitPoints
from testbed.kits.rounds.planner import CollaborativeDetails, Team
from testbed.kits.rounds.programs import Style, run
from testbed.method import Job, Method, Problem
from testbed.plan import Plan


class SplitLearningOptions(RoundOptions):
    """Options of `SplitLearning`."""

    split: SplitPoints = Field("best", description=SPLIT)


class SplitLearning(Method[SplitLearningOptions, CollaborativeDetails]):
    """One device after the other trains the first layers, the server the rest.

    A device's layers go to the next one by way of the server, for devices are linked to that alone. In a round each
    device has one turn; one that is gone is passed over.
    """

    name = "split-learning"
    summary = "split learning: the first layers on one device after the other, the rest on the server"
    Options = SplitLearningOptions
    Details = CollaborativeDetails
    declared = DECLARED
    timing_only = True
    takes_weights = True

    def data_owners(self, problem: Problem[SplitLearningOptions]) -> tuple[str, ...]:
        """Return all devices but the first, which is the server."""
        return Team(problem).names

    def plan(self, problem: Problem[SplitLearningOptions]) -> Plan[CollaborativeDetails]:
        """Split the model for each device. Raises `InputError` where that cannot be."""
        team = Team(problem)
        team.check()
        return planner.split_plan(self.name, team, problem.options.split, at_once=1)

    async def program(self, device: Device, job: Job[SplitLearningOptions, CollaborativeDetails]) -> None:
        """Hold rounds on the first device, train on the others."""
        await run(device, job, Style(split=True, in_turn=True))
