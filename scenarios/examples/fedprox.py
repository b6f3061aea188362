"""FedProx (Li et al., 2020): federated averaging whose devices stay near the global model."""

from testbed.ml.rounds.client import LocalRound, train_whole
from testbed.ml.rounds.method import Hooks, RoundMethod
from testbed.ml.rounds.options import GroupOptions


class FedProxOptions(GroupOptions):
    """Options of `FedProx`."""

    mu: float = 0.1
    """Weight of the proximal term."""


async def train_near(local: LocalRound, mu: float) -> float:
    """Train with mu/2 times the squared distance from the weights that the round began with added to the loss."""
    return await train_whole(
        local,
        lambda name, weight, gradient: gradient.add_(
            weight - local.start[name], alpha=mu
        ),
    )


class FedProx(RoundMethod[FedProxOptions]):
    """Federated averaging with a proximal term."""

    name = "fedprox"
    summary = "federated averaging whose devices stay near the global model"
    Options = FedProxOptions

    def hooks(self, options: FedProxOptions) -> Hooks:
        """Change how devices train."""
        return Hooks(
            options.choose,
            lambda local: train_near(local, options.mu),
            min_updates=options.min_devices,
        )
