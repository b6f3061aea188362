"""One loop carries out any schedule: what it computes, and in which order, for either kind of update."""

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
CUTS = (0, 1, UNITS)
OPTIMIZER = sgd_config(learning_rate=0.1)
WORKLOAD = SimpleNamespace(training=OPTIMIZER.part, numerics="full")
DEVICE = SimpleNamespace(precision="f32")
PROBLEM = SimpleNamespace(
    model=MODEL,
    seed=1,
    training=OPTIMIZER,
    workload=WORKLOAD,
    device=lambda name: DEVICE,
)
NAMES = ("first", "last")
IMAGES = torch.linspace(-1, 1, 32).reshape(8, 1, 2, 2)
LABELS = torch.arange(8) % 3


class Plain:
    """Notes what happens, and updates with the gradients added up."""

    recompute = False
    whole_batches = False

    def __init__(self, stage, ends_at=None):
        self.stage, self.ends_at, self.done, self.loss = stage, ends_at, [], 0.0

    async def arrival(self, number):
        if number == self.ends_at:
            return None
        return await self.stage.mailbox.take(Activation, ("train", 0, number))

    def version(self, batch):
        return None

    def forward_done(self, passage):
        self.done.append(f"F{passage.micro}")
        self.loss += passage.loss

    def backward_done(self, passage, seconds, given):
        assert seconds > 0
        self.done.append(f"B{passage.micro}")

    async def update(self, number):
        self.done.append(f"U{number}")
        self.stage.shard.update(0)


def trained(actions, micros=4, recompute=False, ends_at=None):
    """Train one batch over two stages; return both policies and the states after it."""
    stages = [(name, *CUTS[index : index + 2]) for index, name in enumerate(NAMES)]
    policies, states = {}, {}

    def program(index):
        async def run(device):
            async with Mailbox(device, {}, SYNCHRONOUS_KINDS) as mailbox:
                stage = Stage(
                    mailbox, PROBLEM, StagePosition(0, "first", stages, index, 1)
                )
                policy = policies[index] = Plain(stage, ends_at)
                policy.recompute = recompute
                await stage.prepare()
                if index == 0:
                    mailbox.post("last", Labels(0, 0, LABELS))
                    for micro in range(micros if ends_at is None else ends_at):
                        part = IMAGES[micro * 8 // micros : (micro + 1) * 8 // micros]
                        mailbox.post(
                            "first", Activation(0, "train", 0, micro, micros, 8, part)
                        )
                await run_schedule(stage, policy, actions(index))
                states[index] = stage.shard.state()
                await device.sleep(
                    1 + index
                )  # what was posted is withdrawn when the mailbox closes

        return run

    simulate_programs({name: program(index) for index, name in enumerate(NAMES)})
    return policies, states


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_any_schedule_makes_the_update_of_the_whole_batch(name, recompute):
    policies, states = trained(
        lambda index: [*SCHEDULES[name](2, index, 4), Action("update", 0)],
        recompute=recompute,
    )
    whole = Shard(MODEL, 0, UNITS, 1, OPTIMIZER)
    loss = whole.forward_loss(0, IMAGES, LABELS, 8)
    whole.backward(0)
    whole.update(0)
    assert policies[1].loss == pytest.approx(loss)
    for state in states.values():
        for key, tensor in state.items():
            assert torch.allclose(tensor, whole.state()[key], atol=1e-6), key


def test_actions_are_done_in_the_order_of_the_schedule():
    policies, _ = trained(
        lambda index: [*SCHEDULES["gpipe"](2, index, 4), Action("update", 0)]
    )
    assert policies[0].done == ["F0", "F1", "F2", "F3", "B3", "B2", "B1", "B0", "U0"]


def test_a_schedule_without_an_end_ends_when_no_more_batches_come():
    policies, _ = trained(lambda index: asynchronous_1f1b(2, index), ends_at=3)
    assert policies[0].done == ["F0", "F1", "B0", "U0", "F2", "B1", "U1", "B2", "U2"]
    assert policies[1].done == ["F0", "B0", "U0", "F1", "B1", "U1", "F2", "B2", "U2"]
