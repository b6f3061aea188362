"""Federated learning, split learning, and split-federated learning, which combines the two.

Federated learning is by McMahan et al. (2017), split learning by Gupta and Raskar (2018) and Vepakomma et al. (2018),
split-federated learning by Thapa et al. (2022). `testbed.ml.rounds` has the rounds of training that all three share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from testbed.ml.method import PlanningProblem
from testbed.ml.rounds.method import Hooks, RoundMethod, SplitMethod
from testbed.ml.rounds.options import (
    SPLIT_HELP,
    GroupOptions,
    SplitPoints,
    TransferOptions,
)
from testbed.ml.rounds.planner import Participants, RoundDetails, split_plan
from testbed.plan import Plan


class FederatedOptions(GroupOptions):
    """Options of `Federated`."""


class Federated(RoundMethod[FederatedOptions]):
    """Devices train the whole model on their own data; the server averages the models weighted by sample counts."""

    name = "federated"
    summary = "federated learning: devices train the whole model on their data, the server averages"
    Options = FederatedOptions

    def hooks(self, options: FederatedOptions) -> Hooks:
        """Average the models of a fraction of the devices."""
        return Hooks(choose=options.choose, min_updates=options.min_devices)


class SplitLearningOptions(TransferOptions):
    """Options of `SplitLearning`."""

    former_keys: ClassVar[Mapping[str, str]] = {"split": "split_point"}
    split_point: SplitPoints = Field("best", description=SPLIT_HELP)


class SplitLearning(SplitMethod[SplitLearningOptions]):
    """One device after the other trains the first layers, and the server trains the other layers.

    The server passes the weights of the first layers from one device to the next, since devices have links to the
    server alone. In each round every device has one turn; absent devices are skipped.
    """

    name = "split-learning"
    summary = "split learning: the first layers on one device after the other, the rest on the server"
    Options = SplitLearningOptions
    in_turn = True

    def hooks(self, options: SplitLearningOptions) -> Hooks:
        """Return the defaults: every present device participates in a round, one after the other."""
        return Hooks()

    def plan(
        self, problem: PlanningProblem[SplitLearningOptions]
    ) -> Plan[RoundDetails]:
        """Split the model for each device. Raises `InputError` for impossible splits."""
        return split_plan(
            self.name,
            Participants(problem),
            problem.options.split_point,
            # The devices take turns.
            concurrent_clients=1,
        )


class SplitFederatedOptions(GroupOptions):
    """Options of `SplitFederated`."""

    former_keys: ClassVar[Mapping[str, str]] = {"split": "split_point"}
    split_point: SplitPoints = Field("best", description=SPLIT_HELP)


class SplitFederated(SplitMethod[SplitFederatedOptions]):
    """All devices train the first layers at once, and the server trains the other layers for each device.

    At the end of a round, the server averages the models of the devices.
    """

    name = "split-federated"
    summary = "split-federated learning: the first layers on all devices at once, the rest on the server"
    Options = SplitFederatedOptions

    def hooks(self, options: SplitFederatedOptions) -> Hooks:
        """Average the models of a fraction of the devices."""
        return Hooks(choose=options.choose, min_updates=options.min_devices)

    def plan(
        self, problem: PlanningProblem[SplitFederatedOptions]
    ) -> Plan[RoundDetails]:
        """Split the model for each device. Raises `InputError` for impossible splits."""
        participants = Participants(problem)
        return split_plan(
            self.name,
            participants,
            problem.options.split_point,
            # All devices use the server at once.
            concurrent_clients=len(participants.devices),
        )
