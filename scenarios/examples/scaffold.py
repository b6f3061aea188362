"""SCAFFOLD (Karimireddy et al., 2020, option II): control variates correct the drift of devices with unlike data."""

from testbed.ml.rounds.client import LocalRound, train_whole
from testbed.ml.rounds.method import Hooks, RoundMethod
from testbed.ml.rounds.options import GroupOptions
from testbed.ml.rounds.server import average


async def train(local: LocalRound) -> float:
    """Train along corrected gradients, g - c_i + c; then renew the device's variate c_i and send its change."""
    shared, own = local.extra, local.own
    corrections = {name: variate - own.get(name, 0) for name, variate in shared.items()}
    loss = await train_whole(
        local, lambda name, _, gradient: gradient.add_(corrections.get(name, 0))
    )
    for name, trained in local.layers.weights().items():
        change = (local.start[name] - trained) / (
            len(local.steps) * local.rate
        ) - shared.get(name, 0)
        own[name] = own.get(name, 0) + change
        local.sends[name] = change / local.devices
    return loss


def merge(state, trained, memory):
    """Average the models with equal weights; add the changes of the devices' variates to the server's, c."""
    for name in state:
        memory[name] = memory.get(name, 0) + sum(each.extra[name] for each in trained)
    return average([each.state for each in trained], [1] * len(trained))


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
