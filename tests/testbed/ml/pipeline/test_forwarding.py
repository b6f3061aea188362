"""Batches go forward through the stages, so many at a time, and each request is answered once."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from testbed.messaging.mailbox import Mailbox
from testbed.messaging.membership import Presence, Status
from testbed.messaging.supervision import Lost, Supervisor, Timeouts
from testbed.ml.data.dataset import Dataset
from testbed.ml.layers.feed import Requests
from testbed.ml.pipeline.forwarding import Serving, evaluate, forward_all
from testbed.ml.pipeline.messages import FORWARD_KINDS, Activation, Output
from testbed.ml.pipeline.program import configure_stage
from testbed.plan import Assignment
from tests.helpers.simulated_programs import simulate_programs
from tests.helpers.training import sgd_config

DEVICES = ("lead", "stage")
DATA = Dataset(
    name="ten",
    classes=2,
    train_images=np.zeros((0, 1, 1, 2), np.float32),
    train_labels=np.zeros(0, np.int64),
    test_images=np.ones((10, 1, 1, 2), np.float32),
    test_labels=np.zeros(10, np.int64),
)


def forwarded(lead, faults=()):
    """Run ``lead`` with a supervisor of one stage, 0.1 s a batch; return the world and the most under way."""
    most = [0]

    async def coordinate(device):
        async with Mailbox(device, {}, FORWARD_KINDS) as mailbox:
            presence = Presence(mailbox, "lead", lambda: Status(mailbox.configuration))
            problem = SimpleNamespace(
                devices=[SimpleNamespace(name=name) for name in DEVICES]
            )
            supervisor = Supervisor(
                mailbox, presence, problem, Timeouts(1, 2, 3, 1), lambda part: 0
            )
            supervisor.start([Assignment(device="stage", start=0, stop=1, memory=0)])
            await lead(supervisor)

    async def answer(device):
        async with Mailbox(device, {}, FORWARD_KINDS) as mailbox:
            mailbox.open(1)
            while True:
                given = await mailbox.take(Activation)
                await device.sleep(0.1)
                behind = sum(
                    mailbox.holds(Activation, (given.work, batch, 0))
                    for batch in range(10)
                )
                most[0] = max(most[0], 1 + behind)
                outputs = given.tensor.flatten(1)
                mailbox.post(
                    "lead",
                    Output(given.configuration, given.work, given.batch, outputs),
                )

    return simulate_programs(
        dict(zip(DEVICES, (coordinate, answer), strict=True)), faults=faults
    ), most[0]


def test_no_more_batches_are_under_way_than_asked():
    async def lead(supervisor):
        images = Requests(DATA, 2, 5).images
        found = [
            index
            async for index, _ in forward_all(supervisor, "infer", range(5), 3, images)
        ]
        assert found == list(range(5))
        assert supervisor.progress == 5

    assert forwarded(lead)[1] == 3


def test_the_score_of_an_evaluation_is_recorded():
    async def lead(supervisor):
        await evaluate(supervisor, 7, Requests(DATA, 4), sgd_config())

    world, _ = forwarded(lead)
    (found,) = (event.fields for event in world.events if event.event == "evaluate")
    assert found["step"] == 7
    assert found["accuracy"] == 1.0  # of equal outputs the first is the largest


@pytest.mark.parametrize("gives_up", [False, True])
def test_requests_of_a_lost_stage_are_left_or_given_up(gives_up):
    left = []

    async def lead(supervisor):
        workload = SimpleNamespace(batch_size=2, requests=4)
        problem = SimpleNamespace(
            workload=workload,
            model=SimpleNamespace(detector=None),
            training=sgd_config(),
        )
        serving = Serving(
            supervisor,
            SimpleNamespace(dataset=DATA, problem=problem),
            2,
            gives_up=gives_up,
        )
        assert serving.start == 0
        with pytest.raises(Lost, match="stage"):
            await serving.run()
        left.append(serving.start)

    world, _ = forwarded(lead, faults=[{"kill": "stage", "at": "300ms"}])
    answered = [
        event.fields["request"] for event in world.events if event.event == "request"
    ]
    failed = [
        event.fields["request"] for event in world.events if event.event == "failed"
    ]
    assert answered
    assert failed == ([len(answered), len(answered) + 1] if gives_up else [])
    assert left == [len(answered) + len(failed)]


def test_a_stage_is_told_its_units_of_a_state_and_nothing_of_the_seeds():
    supervisor = SimpleNamespace(
        mailbox=SimpleNamespace(configuration=3), stages=[("a", 0, 1), ("b", 1, 3)]
    )
    part = Assignment(device="b", start=1, stop=3, memory=0)
    state = {f"{unit}.weight": torch.zeros(1) for unit in range(3)}
    told = configure_stage(supervisor, 9, part, state)
    assert (told.configuration, told.steps, told.given, sorted(told.state)) == (
        3,
        9,
        True,
        ["1.weight", "2.weight"],
    )
    fresh = configure_stage(supervisor, 9, part, None)
    assert (fresh.given, fresh.state) == (False, {})
