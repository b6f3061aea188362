"""Batches that go into a model, and the score of what comes out."""

import pytest
import torch

from testbed.ml.layers.feed import Requests, Score, Training
from testbed.ml.workload import LearningPart


def workload(**keys):
    tree = {
        "model": {"name": "mlp"},
        "method": {"name": "single"},
        "batch_size": 4,
        **keys,
    }
    return LearningPart.model_validate(tree)


def test_number_of_training_steps_follows_the_workload(dataset):
    assert (
        Training(dataset, workload(epochs=3), 1).steps == 3 * 2
    )  # 10 samples, whole batches of 4
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
    assert [again.labels(index).tolist() for index in range(3)] == [
        [0, 1, 2, 3],
        [4, 5, 0, 1],
        [2, 3, 4, 5],
    ]
    assert again.images(4).shape == (4, 1, 2, 2)
    assert Requests(dataset, 7, 1).samples(0) == [0, 1, 2, 3, 4, 5, 0]


@pytest.fixture
def dataset():
    import numpy as np

    from testbed.ml.data import Dataset

    labels = np.arange(10)
    images = np.broadcast_to(labels[:, None, None, None], (10, 1, 2, 2)).astype(
        np.float32
    )
    return Dataset("tiny", 10, images, labels, images[:6].copy(), labels[:6])


def test_score_over_pieces_of_uneven_size():
    outputs = torch.eye(3)[[0, 1, 2, 0, 1]] * 5
    labels = torch.tensor([0, 1, 0, 0, 2])
    score = Score()
    score.add(outputs[:2], labels[:2].numpy())
    score.add(outputs[2:], labels[2:].numpy())
    assert score.accuracy == 3 / 5
    assert score.loss == pytest.approx(
        float(torch.nn.functional.cross_entropy(outputs, labels))
    )
