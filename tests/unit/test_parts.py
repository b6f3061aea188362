"""The small parts that methods are made of."""

import asyncio

import pytest
import torch

from testbed.methods.parts.background import Background
from testbed.methods.parts.checkpoint import Collector
from testbed.methods.parts.feed import Requests, Training
from testbed.methods.parts.mailbox import Mailbox
from testbed.methods.parts.outbox import transfer_time
from testbed.methods.parts.score import Score
from testbed.network.link import Link
from testbed.workload import WorkloadPart


def test_checkpoint_is_complete_with_its_last_unit():
    collector = Collector(2)
    early, late = {"0.w": torch.tensor(1.0)}, {"1.w": torch.tensor(2.0)}
    assert collector.add(4, 1, late) is None
    assert collector.add(8, 1, late) is None
    assert collector.add(4, 1, late) is None
    done = collector.add(4, 0, early)
    assert done is not None
    assert done.step == 4
    assert done.state == early | late
    collector.clear()
    assert collector.add(8, 0, early) is None


def test_older_checkpoint_is_dropped_when_a_newer_one_is_complete():
    collector = Collector(2)
    collector.add(4, 0, {})
    collector.add(8, 0, {})
    assert collector.add(8, 1, {}).step == 8
    assert collector.add(4, 1, {}) is None


def test_mailbox_gives_each_thing_once_whoever_is_first():
    async def exchange():
        box = Mailbox()
        waiting = asyncio.create_task(box.take("a"))
        await asyncio.sleep(0)
        box.put("b", 2)
        box.put("a", 1)
        box.put("a", "repetition")
        assert await waiting == 1
        assert await box.take("b") == 2
        late = asyncio.create_task(box.take("b"))
        await asyncio.sleep(0)
        assert not late.done()
        late.cancel()

    asyncio.run(exchange())


def test_background_failure_ends_the_program_with_what_went_wrong():
    ended = []

    async def patient():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("patient")

    async def failing():
        await asyncio.sleep(0)
        raise KeyError("lost")

    async def program():
        background = Background()
        background.start(patient())
        background.start(failing())
        await background.run(asyncio.sleep(60))

    with pytest.raises(KeyError, match="lost"):
        asyncio.run(program())
    assert ended == ["patient"]


def test_background_ends_with_its_program():
    async def program():
        background = Background()
        left = background.start(asyncio.sleep(60))
        assert await background.run(asyncio.sleep(0, "result")) == "result"
        assert left.cancelled()

    asyncio.run(program())


def workload(**keys):
    tree = {"model": {"name": "mlp"}, "method": {"name": "single"}, "batch_size": 4, **keys}
    return WorkloadPart.model_validate(tree)


def test_training_is_as_long_as_the_workload_says(dataset):
    assert Training(dataset, workload(epochs=3), 1).steps == 3 * 2  # 10 samples, whole batches of 4
    training = Training(dataset, workload(steps=5), 1)
    assert training.steps == 5
    images, labels = training.batch(4)
    assert images.shape == (4, 1, 2, 2)
    assert torch.equal(images[:, 0, 0, 0].long(), labels)
    assert torch.equal(training.batch(4)[0], images)


def test_requests_go_round_the_test_part(dataset):
    requests = Requests(dataset, 4)
    assert [len(requests.labels(index)) for index in range(len(requests))] == [4, 2]
    again = Requests(dataset, 4, 5)
    assert len(again) == 5
    # Each as large as the scenario says, though the test part ends within the second.
    assert [again.labels(index).tolist() for index in range(3)] == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]
    assert again.images(4).shape == (4, 1, 2, 2)
    assert Requests(dataset, 7, 1).samples(0) == [0, 1, 2, 3, 4, 5, 0]


@pytest.fixture
def dataset():
    import numpy as np

    from testbed.data import Dataset

    labels = np.arange(10)
    images = np.broadcast_to(labels[:, None, None, None], (10, 1, 2, 2)).astype(np.float32)
    return Dataset("tiny", 10, images, labels, images[:6].copy(), labels[:6])


def test_score_over_pieces_of_uneven_size():
    outputs = torch.eye(3)[[0, 1, 2, 0, 1]] * 5
    labels = torch.tensor([0, 1, 0, 0, 2])
    score = Score()
    score.add(outputs[:2], labels[:2].numpy())
    score.add(outputs[2:], labels[2:].numpy())
    assert score.accuracy == 3 / 5
    assert score.loss == pytest.approx(float(torch.nn.functional.cross_entropy(outputs, labels)))


def test_transfer_time_is_there_and_back():
    links = {("a", "b"): Link(8e6, 0.01), ("b", "a"): Link(1e6, 0.02)}
    assert transfer_time(links, "a", "b", 1000) == pytest.approx(1000 / 1e6 + 0.03)
    assert transfer_time(links, "a", "c", 1000) == 0
