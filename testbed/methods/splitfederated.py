"""Split-federated learning (Thapa et al., 2020), with one server-side model for each device."""

from __future__ import annotations

from pydantic import Field

from testbed.kits.rounds.method import Hooks, SplitMethod
from testbed.kits.rounds.options import SPLIT, GroupOptions, SplitPoints
from testbed.kits.rounds.planner import Participants, RoundDetails, split_plan
from testbed.method import Problem
from testbed.plan import Plan


class SplitFederatedOptions(GroupOptions):
    """Options of `SplitFederated`."""

    split: SplitPoints = Field("best", description=SPLIT)


class SplitFederated(SplitMethod[SplitFederatedOptions]):
    """All devices train the first layers at once, the server the rest for each of them; both sides are averaged."""

    name = "split-federated"
    summary = "split-federated learning: the first layers on all devices at once, the rest on the server"
    Options = SplitFederatedOptions

    def hooks(self, options: SplitFederatedOptions) -> Hooks:
        """Average the models of a fraction of the devices."""
        return Hooks(choose=options.choose, min_updates=options.min_devices)

    def plan(self, problem: Problem[SplitFederatedOptions]) -> Plan[RoundDetails]:
        """Split the model for each device. Raises `InputError` where that cannot be."""
        team = Participants(problem)
        return split_plan(self.name, team, problem.options.split, concurrent_clients=len(team.devices))
