"""Tests of forwarding batches through the stages: batches under way, evaluation, and requests of a lost stage."""

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

DEVICES = ("coordinator", "stage")
DATA = Dataset(
    name="ten",
    classes=2,
    train_images=np.zeros((0, 1, 1, 2), np.float32),
    train_labels=np.zeros(0, np.int64),
    test_images=np.ones((10, 1, 1, 2), np.float32),
    test_labels=np.zeros(10, np.int64),
)


def run_forwarding(coordinate, faults=()):
    """Run ``coordinate`` with a supervisor of one stage, which takes 0.1 s for a batch.

    Return the world, and the largest number of batches at the stage at once.
    """
    peak = 0

    async def coordinator(device):
        async with Mailbox(device, {}, FORWARD_KINDS) as mailbox:
            presence = Presence(
                mailbox, "coordinator", lambda: Status(mailbox.configuration)
            )
            devices = [SimpleNamespace(name=name) for name in DEVICES]
            problem = SimpleNamespace(devices=devices)
            timeouts = Timeouts(
                stall_timeout=1, rejoin_timeout=2, standstill=3, startup=1
            )
            supervisor = Supervisor(
                mailbox, presence, problem, timeouts, lambda part: 0
            )
            supervisor.start([Assignment(device="stage", start=0, stop=1, memory=0)])
            await coordinate(supervisor)

    async def stage(device):
        nonlocal peak
        async with Mailbox(device, {}, FORWARD_KINDS) as mailbox:
            mailbox.open(1)
            while True:
                activation = await mailbox.take(Activation)
                await device.sleep(0.1)
                # The stage outputs its inputs; meanwhile further batches may have arrived.
                present = 1
                for batch in range(10):
                    present += mailbox.holds(Activation, (activation.work, batch, 0))
                peak = max(peak, present)
                output = Output(
                    activation.configuration,
                    activation.work,
                    activation.batch,
                    activation.tensor.flatten(1),
                )
                mailbox.post("coordinator", output)

    programs = {"coordinator": coordinator, "stage": stage}
    world = simulate_programs(programs, faults=faults)
    return world, peak


def test_number_of_batches_under_way_is_limited():
    async def coordinate(supervisor):
        images = Requests(DATA, 2, 5).images
        indices = []
        async for index, _ in forward_all(supervisor, "infer", range(5), 3, images):
            indices.append(index)
        assert indices == list(range(5))
        assert supervisor.progress == 5

    _, peak = run_forwarding(coordinate)
    assert peak == 3


def test_evaluation_records_accuracy_with_step():
    async def coordinate(supervisor):
        await evaluate(supervisor, 7, Requests(DATA, 4), sgd_config())

    world, _ = run_forwarding(coordinate)
    (event,) = world.events.of("evaluate")
    assert event.fields["step"] == 7
    # All outputs are equal: the first one counts as the largest, and all labels are 0.
    assert event.fields["accuracy"] == 1.0


def requests_of(world, name):
    """Return the numbers of requests in events of a name."""
    return [event.fields["request"] for event in world.events.of(name)]


@pytest.mark.parametrize("gives_up", [False, True])
def test_requests_at_lost_stage_are_repeated_or_given_up(gives_up):
    next_requests = []

    async def coordinate(supervisor):
        problem = SimpleNamespace(
            workload=SimpleNamespace(batch_size=2, requests=4),
            model=SimpleNamespace(detector=None),
            training=sgd_config(),
        )
        context = SimpleNamespace(dataset=DATA, problem=problem)
        serving = Serving(supervisor, context, 2, gives_up=gives_up)
        assert serving.start == 0
        with pytest.raises(Lost, match="stage"):
            await serving.run()
        next_requests.append(serving.start)

    world, _ = run_forwarding(coordinate, faults=[{"kill": "stage", "at": "300ms"}])
    answered = len(requests_of(world, "request"))
    assert answered
    # Two requests are under way when the stage is lost.
    failed = requests_of(world, "failed")
    assert failed == ([answered, answered + 1] if gives_up else [])
    assert next_requests == [answered + len(failed)]


def test_stage_receives_only_its_units_of_given_state():
    supervisor = SimpleNamespace(
        mailbox=SimpleNamespace(configuration=3), stages=[("a", 0, 1), ("b", 1, 3)]
    )
    part = Assignment(device="b", start=1, stop=3, memory=0)
    state = {f"{unit}.weight": torch.zeros(1) for unit in range(3)}
    resumed = configure_stage(supervisor, 9, part, state)
    assert resumed.configuration == 3
    assert resumed.steps == 9
    assert resumed.given is True
    assert sorted(resumed.state) == ["1.weight", "2.weight"]
    # Without a state the stage draws its weights from the seed.
    fresh = configure_stage(supervisor, 9, part, None)
    assert fresh.given is False
    assert fresh.state == {}
