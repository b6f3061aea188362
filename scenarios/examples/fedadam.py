"""FedAdam (Reddi et al., 2021, Algorithm 2): the server runs Adam on the mean change of the devices' weights."""

from testbed.ml.rounds.method import Hooks, RoundMethod
from testbed.ml.rounds.options import GroupOptions
from testbed.ml.rounds.server import mean

LEARNING_RATE = 0.03
BETA1 = 0.9
BETA2 = 0.99
TAU = 1e-3
"""Degree of adaptivity: the paper adds this to the root of the second moment."""


def adam(state, trained, memory):
    """Merge a round: one step of Adam from ``state``, with the mean change of the weights as the gradient.

    ``memory`` is kept between rounds with the model; both moments of every tensor are stored there.
    """
    new = dict(mean(state, trained, memory))
    for name, weights in state.items():
        if not weights.is_floating_point():
            # A counter of batch normalisation has no gradient: its mean is kept.
            continue
        change = new[name] - weights
        momentum = BETA1 * memory.get(f"m:{name}", 0) + (1 - BETA1) * change
        # The second moment starts at TAU squared, the lower bound in the paper's initialisation.
        before = memory.get(f"v:{name}", TAU**2)
        variance = BETA2 * before + (1 - BETA2) * change**2
        memory[f"m:{name}"] = momentum
        memory[f"v:{name}"] = variance
        new[name] = weights + LEARNING_RATE * momentum / (variance.sqrt() + TAU)
    return new


class FedAdam(RoundMethod):
    """Federated learning with Adam on the server."""

    name = "fedadam"
    summary = "federated learning with Adam on the server"

    def hooks(self, options: GroupOptions) -> Hooks:
        """Replace the merge of federated averaging."""
        return Hooks(options.choose, merge=adam, min_updates=options.min_devices)
