"""Federated learning with federated averaging (McMahan et al., 2017)."""

from __future__ import annotations

from testbed.kits.rounds.method import Hooks, RoundMethod
from testbed.kits.rounds.options import GroupOptions


class FederatedOptions(GroupOptions):
    """Options of `Federated`."""


class Federated(RoundMethod[FederatedOptions]):
    """Each device trains the whole model on its own data; the server averages what they send, by their samples."""

    name = "federated"
    summary = "federated learning: devices train the whole model on their data, the server averages"
    Options = FederatedOptions

    def hooks(self, options: FederatedOptions) -> Hooks:
        """Average the models of a fraction of the devices."""
        return Hooks(choose=options.choose, min_updates=options.min_devices)
