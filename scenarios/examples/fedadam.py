"""FedAdam (Reddi et al., 2021, Algorithm 2): the server takes a step of Adam along what the devices have changed."""

from testbed.ml.rounds.method import Hooks, RoundMethod
from testbed.ml.rounds.options import GroupOptions
from testbed.ml.rounds.server import mean

RATE, BETA1, BETA2, TAU = 0.03, 0.9, 0.99, 1e-3


def adam(state, trained, memory):
    """Return the weights after a step; the memory has both moments of the change of each."""
    new = dict(mean(state, trained, memory))
    for name in (name for name, values in state.items() if values.is_floating_point()):
        change = new[name] - state[name]
        m = memory[f"m:{name}"] = (
            BETA1 * memory.get(f"m:{name}", 0) + (1 - BETA1) * change
        )
        v = memory[f"v:{name}"] = (
            BETA2 * memory.get(f"v:{name}", TAU**2) + (1 - BETA2) * change**2
        )
        new[name] = state[name] + RATE * m / (v.sqrt() + TAU)
    return new


class FedAdam(RoundMethod):
    """Federated learning with Adam on the server."""

    name = "fedadam"
    summary = "federated learning with Adam on the server"

    def hooks(self, options: GroupOptions) -> Hooks:
        """Change what the server makes of the updates."""
        return Hooks(options.choose, merge=adam, min_updates=options.min_devices)
