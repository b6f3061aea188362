"""Gossip learning (Ormandi et al., 2013): no server; each device trains, and averages with what neighbours send it."""

import random
from dataclasses import dataclass

from testbed.common.seeds import derive
from testbed.messaging.mailbox import Mailbox
from testbed.messaging.typed import Typed
from testbed.ml.layers.shard import State
from testbed.ml.rounds.consensus import CONSENSUS, Consensus, Snapshot
from testbed.ml.rounds.method import Hooks, RoundMethod, local_training
from testbed.ml.rounds.options import PeerOptions
from testbed.ml.rounds.planner import Participants, whole_plan
from testbed.ml.rounds.server import average


@dataclass(frozen=True)
class Weights(Typed, kind="weights"):
    """To a neighbour."""

    state: State


class GossipOptions(PeerOptions):
    """Options of `Gossip`."""

    patience: float = 10.0
    """Seconds for which the first device waits for others' weights when it scores them."""


class Gossip(RoundMethod[GossipOptions]):
    """All devices have data; in a round each trains, and sends its weights to a neighbour drawn at random."""

    name = "gossip"
    summary = "learning without a server: devices average with random neighbours"
    Options = GossipOptions
    declared = CONSENSUS
    supports = RoundMethod.supports - {"initial_weights"}

    def hooks(self, options):
        """Train as in federated averaging."""
        return Hooks()

    def data_owners(self, problem):
        """Return all devices."""
        return Participants(problem, serverless=True).names

    def plan(self, problem):
        """Give the whole model to each device. Raises `InputError` where it does not fit."""
        return whole_plan(self.name, Participants(problem, serverless=True))

    async def program(self, device, job):
        """Train a round, send, average with what has come; let the first device score everyone's weights."""
        problem, draw = (
            job.problem,
            random.Random(derive(job.problem.seed, "gossip", device.name)),
        )
        neighbours = [to for one, to in problem.links if one == device.name]
        codecs = problem.options.codecs(problem.codes)
        async with Mailbox(
            device, problem.links, (Weights, Snapshot), codecs=codecs
        ) as mailbox:
            training, consensus = (
                local_training(device, job),
                Consensus(mailbox, job, problem.options.patience),
            )
            state = training.layers.weights()
            for number in range(training.length.rounds):
                loss, state = await training.train(number, state)
                device.record(
                    "step", step=number, samples=training.samples(number), loss=loss
                )
                mailbox.post(draw.choice(neighbours), Weights(state))
                heard = iter(lambda: mailbox.pop(Weights), None)
                models = [state, *(weights.state for weights in heard)]
                state = average(models, [1] * len(models))
                if (
                    (number + 1) % problem.options.evaluate_every == 0
                    or number + 1 == training.length.rounds
                ):
                    await consensus.report(number + 1, state)
            device.expose(lambda: state)
            await consensus.finish()
