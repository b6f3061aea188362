"""The method: federated learning whose server takes the median of each weight (Yin et al., 2018), not the mean."""

import torch

from testbed.ml.rounds.method import Hooks, RoundMethod


def median(state, trained, memory):
    """Return the new weights: of each value the median of what the devices have sent."""
    return {
        name: torch.stack([each.state[name] for each in trained]).quantile(0.5, dim=0)
        for name in state
    }


class Median(RoundMethod):
    """Federated learning with the median."""

    name = "median"
    summary = "federated learning whose server takes the median of each weight"

    def hooks(self, options):
        """Change what the server makes of the updates."""
        return Hooks(options.choose, merge=median, min_updates=options.min_devices)
