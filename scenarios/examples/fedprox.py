"""FedProx (Li et al., 2020): federated averaging whose devices stay near the global model."""

from testbed.ml.rounds.client import LocalRound, train_whole
from testbed.ml.rounds.method import Hooks, RoundMethod
from testbed.ml.rounds.options import GroupOptions


class FedProxOptions(GroupOptions):
    """Options of `FedProx`."""

    mu: float = 0.1
    """Weight of the proximal term."""


async def train_near(local: LocalRound, mu: float) -> float:
    """Train with mu/2 times the squared distance from the global weights added to the loss; return the mean loss."""

    def add_proximal_term(name, weight, gradient):
        # The gradient of mu/2 * ||w - w_t||^2 is mu * (w - w_t).
        gradient.add_(weight - local.start[name], alpha=mu)

    return await train_whole(local, add_proximal_term)


class FedProx(RoundMethod[FedProxOptions]):
    """Federated averaging with a proximal term."""

    name = "fedprox"
    summary = "federated averaging whose devices stay near the global model"
    Options = FedProxOptions

    def hooks(self, options: FedProxOptions) -> Hooks:
        """Replace the local training of federated averaging."""

        async def train_local(local: LocalRound) -> float:
            return await train_near(local, options.mu)

        return Hooks(options.choose, train_local, min_updates=options.min_devices)
