"""Gossip learning (Ormandi et al., 2013): no server; each device averages its model with those its neighbours send."""

import random
from dataclasses import dataclass

from testbed.common.seeds import derive
from testbed.messaging.mailbox import Mailbox
from testbed.messaging.typed_messages import TypedMessage
from testbed.ml.layers.shard import State
from testbed.ml.rounds.consensus import CONSENSUS, Consensus, Snapshot
from testbed.ml.rounds.method import Hooks, RoundMethod, local_training
from testbed.ml.rounds.options import PeerOptions
from testbed.ml.rounds.planner import Participants, whole_plan
from testbed.ml.rounds.server import average


@dataclass(frozen=True)
class Weights(TypedMessage, kind="weights"):
    """To a neighbour: the sender's weights after a round."""

    state: State


class GossipOptions(PeerOptions):
    """Options of `Gossip`."""

    stall_timeout: float = 10.0
    """Seconds for which the first device waits for the weights of the others when it evaluates them."""


class Gossip(RoundMethod[GossipOptions]):
    """Every device has data; in a round each one trains and sends its weights to a random neighbour."""

    name = "gossip"
    summary = "learning without a server: devices average with random neighbours"
    Options = GossipOptions
    declared = CONSENSUS
    supports = RoundMethod.supports - {"initial_weights"}

    def hooks(self, options):
        """Train as in federated averaging."""
        return Hooks()

    def data_owners(self, problem):
        """Return the names of all devices."""
        return Participants(problem, serverless=True).names

    def plan(self, problem):
        """Give each device the whole model. Raises `InputError` if the memory of a device is too small."""
        return whole_plan(self.name, Participants(problem, serverless=True))

    async def program(self, device, context):
        """Train, send and average round by round; the first device evaluates the weights of all."""
        problem = context.problem
        options = problem.options
        # A generator for each device: one for all would depend on the order in which devices run.
        draw = random.Random(derive(problem.seed, "gossip", device.name))
        neighbours = [
            target for source, target in problem.links if source == device.name
        ]
        codecs = options.codecs(problem.codes)
        messages = (Weights, Snapshot)
        async with Mailbox(device, problem.links, messages, codecs=codecs) as mailbox:
            training = local_training(device, context)
            consensus = Consensus(mailbox, context, options.stall_timeout)
            rounds = training.length.rounds
            state = training.layers.weights()
            for number in range(rounds):
                loss, state = await training.train(number, state)
                samples = training.samples(number)
                device.record("step", step=number, samples=samples, loss=loss)
                mailbox.post(draw.choice(neighbours), Weights(state))
                state = self.average_with_arrived(mailbox, state)
                done = number + 1
                if done % options.evaluate_every == 0 or done == rounds:
                    await consensus.report(done, state)
            device.expose(lambda: state)
            await consensus.finish()

    def average_with_arrived(self, mailbox, state):
        """Return the mean of the device's weights and of all weights that have arrived."""
        models = [state]
        while True:
            arrived = mailbox.pop(Weights)
            if arrived is None:
                return average(models, [1] * len(models))
            models.append(arrived.state)
