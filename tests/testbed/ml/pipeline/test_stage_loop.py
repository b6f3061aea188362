"""Tests of the loop that runs any schedule of a stage: order of actions, and weights after the update."""

from types import SimpleNamespace

import pytest
import torch

from testbed.messaging.mailbox import Mailbox
from testbed.ml.layers.shard import Shard
from testbed.ml.models import create
from testbed.ml.pipeline.messages import SYNCHRONOUS_KINDS, Activation, Labels
from testbed.ml.pipeline.stage import Stage, StagePosition, run_schedule
from testbed.ml.schedule import SCHEDULES, Action, asynchronous_1f1b
from tests.helpers.simulated_programs import simulate_programs
from tests.helpers.training import sgd_config

MODEL = create("mlp", {"hidden": [6, 5]}, (1, 2, 2), 3)
UNITS = len(MODEL.units)
NAMES = ("first", "last")
STAGES = [("first", 0, 1), ("last", 1, UNITS)]
TRAINING = sgd_config(learning_rate=0.1)
DEVICE = SimpleNamespace(precision="f32")
PROBLEM = SimpleNamespace(
    model=MODEL,
    seed=1,
    training=TRAINING,
    workload=SimpleNamespace(training=TRAINING.part, numerics="full"),
    device=lambda name: DEVICE,
)
IMAGES = torch.linspace(-1, 1, 32).reshape(8, 1, 2, 2)
LABELS = torch.arange(8) % 3


class RecordingPolicy:
    """Records the actions, and updates with the sum of gradients; batches end before number ``last``."""

    whole_batches = False

    def __init__(self, stage, *, last, recompute):
        self.stage = stage
        self.last = last
        self.recompute = recompute
        self.actions = []
        self.loss = 0.0

    async def take_input(self, number):
        if number == self.last:
            return None
        return await self.stage.mailbox.take(Activation, ("train", 0, number))

    def version(self, batch):
        # The newest weights: micro-batches of one step all use the same.
        return None

    def forward_done(self, passage):
        self.actions.append(f"F{passage.micro}")
        self.loss += passage.loss

    def backward_done(self, passage, seconds, message):
        # The duration is that of the device, from which its capacity is estimated.
        assert seconds > 0
        self.actions.append(f"B{passage.micro}")

    async def update(self, number):
        self.actions.append(f"U{number}")
        self.stage.shard.update(0)


def post_batch(mailbox, micro_batches):
    """Post the labels, and the first of four micro-batches, to the stages."""
    mailbox.post("last", Labels(configuration=0, batch=0, tensor=LABELS))
    for micro in range(micro_batches):
        part = IMAGES[micro * 2 : (micro + 1) * 2]
        activation = Activation(
            configuration=0,
            work="train",
            batch=0,
            micro=micro,
            micros=4,
            samples=8,
            tensor=part,
        )
        mailbox.post("first", activation)


def train(actions_of, *, recompute=False, last=None):
    """Train one batch over two stages; return the policy and the new state of each stage."""
    policies = {}
    states = {}

    def program(index):
        async def run(device):
            async with Mailbox(device, {}, SYNCHRONOUS_KINDS) as mailbox:
                position = StagePosition(
                    configuration=0,
                    coordinator="first",
                    stages=STAGES,
                    index=index,
                    steps=1,
                )
                stage = Stage(mailbox, PROBLEM, position)
                policy = RecordingPolicy(stage, last=last, recompute=recompute)
                policies[index] = policy
                await stage.prepare()
                if index == 0:
                    post_batch(mailbox, 4 if last is None else last)
                await run_schedule(stage, policy, actions_of(index))
                states[index] = stage.shard.state()
                # A mailbox withdraws its unsent messages when it closes.
                await device.sleep(1 + index)

        return run

    simulate_programs({name: program(index) for index, name in enumerate(NAMES)})
    return policies, states


def synchronous_actions(name):
    """Return a function from a stage to the stage's actions: a schedule, then one update."""
    return lambda index: [*SCHEDULES[name](2, index, 4), Action("update", 0)]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_each_schedule_updates_weights_as_undivided_batch(name, recompute):
    policies, states = train(synchronous_actions(name), recompute=recompute)
    # A shard of all units trains the same batch at once.
    undivided = Shard(MODEL, 0, UNITS, 1, TRAINING)
    loss = undivided.forward_loss(0, IMAGES, LABELS, 8)
    undivided.backward(0)
    undivided.update(0)
    expected = undivided.state()
    assert policies[1].loss == pytest.approx(loss)
    for state in states.values():
        for key, tensor in state.items():
            assert torch.allclose(tensor, expected[key], atol=1e-6), key


def test_actions_are_done_in_order_of_schedule():
    policies, _ = train(synchronous_actions("gpipe"))
    assert policies[0].actions == ["F0", "F1", "F2", "F3", "B3", "B2", "B1", "B0", "U0"]


def test_infinite_schedule_ends_when_no_more_batches_arrive():
    policies, _ = train(lambda index: asynchronous_1f1b(2, index), last=3)
    assert policies[0].actions == ["F0", "F1", "B0", "U0", "F2", "B1", "U1", "B2", "U2"]
    assert policies[1].actions == ["F0", "B0", "U0", "F1", "B1", "U1", "F2", "B2", "U2"]
