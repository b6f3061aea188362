"""A method: federated learning whose server takes the median of each weight (Yin et al., 2018) instead of the mean."""

import torch

from testbed.ml.rounds.method import Hooks, RoundMethod


def median(state, trained, memory):
    """Return the median of the devices' values for each weight."""
    merged = {}
    for name in state:
        values = torch.stack([update.state[name] for update in trained])
        merged[name] = values.quantile(0.5, dim=0)
    return merged


class Median(RoundMethod):
    """Federated learning with the median."""

    name = "median"
    summary = "federated learning whose server takes the median of each weight"

    def hooks(self, options):
        """Replace the mean of federated averaging by the median."""
        return Hooks(options.choose, merge=median, min_updates=options.min_devices)
