"""SCAFFOLD (Karimireddy et al., 2020, option II): control variates correct the drift of devices with unlike data."""

from testbed.ml.rounds.client import LocalRound, train_whole
from testbed.ml.rounds.method import Hooks, RoundMethod
from testbed.ml.rounds.options import GroupOptions
from testbed.ml.rounds.server import average


async def train(local: LocalRound) -> float:
    """Train along the corrected gradients g - c_i + c; return the mean loss.

    Afterwards the device's variate c_i is renewed, and its change is sent to the server.
    """
    shared = local.extra
    own = local.own
    corrections = {name: variate - own.get(name, 0) for name, variate in shared.items()}

    def correct(name, weight, gradient):
        gradient.add_(corrections.get(name, 0))

    loss = await train_whole(local, correct)
    steps = len(local.steps)
    for name, trained in local.layers.weights().items():
        # Option II: c_i+ = c_i - c + (x - y_i) / (K * rate), from the weights alone, without another gradient.
        gradient = (local.start[name] - trained) / (steps * local.rate)
        change = gradient - shared.get(name, 0)
        own[name] = own.get(name, 0) + change
        # Divided by all N devices, not by those of this round: the paper scales the mean change by |S| / N.
        local.sends[name] = change / local.devices
    return loss


def merge(state, trained, memory):
    """Average the models with equal weights; add the changes of the devices' variates to the server's, c."""
    for name in state:
        memory[name] = memory.get(name, 0) + sum(
            update.extra[name] for update in trained
        )
    return average([update.state for update in trained], [1] * len(trained))


class Scaffold(RoundMethod):
    """Federated averaging with control variates; for plain SGD and networks without batch normalisation."""

    name = "scaffold"
    summary = "federated averaging with control variates against drift"
    supports = RoundMethod.supports - {"stacked"}

    def hooks(self, options: GroupOptions) -> Hooks:
        """Send the server's variate, which is its memory, beside the weights."""
        return Hooks(
            options.choose,
            train,
            merge=merge,
            extra=dict,
            min_updates=options.min_devices,
        )
