"""Batches and requests from a data set, and the score of outputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from testbed.ml.data import Dataset
from testbed.ml.layers.feed import Requests, Score, Training
from testbed.ml.workload import LearningPart


def make_workload(**keys: object) -> LearningPart:
    workload = {
        "model": {"name": "mlp"},
        "method": {"name": "single"},
        "batch_size": 4,
        **keys,
    }
    return LearningPart.model_validate(workload)


@pytest.fixture
def dataset() -> Dataset:
    """Ten training and six test samples, where each pixel has the value of the label."""
    labels = np.arange(10)
    pixels = np.broadcast_to(labels[:, None, None, None], (10, 1, 2, 2))
    images = pixels.astype(np.float32)
    return Dataset("tiny", 10, images, labels, images[:6].copy(), labels[:6])


def test_training_steps_follow_from_epochs_or_steps(dataset: Dataset) -> None:
    # Ten samples are two whole batches of four.
    assert Training(dataset, make_workload(epochs=3), seed=1).steps == 3 * 2
    assert Training(dataset, make_workload(steps=5), seed=1).steps == 5


def test_batch_has_images_and_labels_of_same_samples(dataset: Dataset) -> None:
    training = Training(dataset, make_workload(steps=5), seed=1)
    images, labels = training.batch(4)
    assert images.shape == (4, 1, 2, 2)
    assert torch.equal(images[:, 0, 0, 0].long(), labels)
    repeated_images, _ = training.batch(4)
    assert torch.equal(repeated_images, images)


def test_requests_cover_test_samples_once_by_default(dataset: Dataset) -> None:
    requests = Requests(dataset, batch_size=4)
    sizes = [len(requests.labels(index)) for index in range(len(requests))]
    # The last request has the remaining two of six samples.
    assert sizes == [4, 2]


def test_given_number_of_requests_repeats_test_samples(dataset: Dataset) -> None:
    requests = Requests(dataset, batch_size=4, count=5)
    assert len(requests) == 5
    # All have the batch size: the second request continues with the first sample.
    labels = [requests.labels(index).tolist() for index in range(3)]
    assert labels == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]
    assert requests.images(4).shape == (4, 1, 2, 2)
    # A request may be larger than the data set.
    assert Requests(dataset, batch_size=7, count=1).samples(0) == [0, 1, 2, 3, 4, 5, 0]


def test_score_weights_batches_by_their_samples() -> None:
    outputs = torch.eye(3)[[0, 1, 2, 0, 1]] * 5
    labels = torch.tensor([0, 1, 0, 0, 2])
    score = Score()
    score.add(outputs[:2], labels[:2].numpy())
    score.add(outputs[2:], labels[2:].numpy())
    # The third and the fifth answer are wrong.
    assert score.accuracy == 3 / 5
    expected = float(torch.nn.functional.cross_entropy(outputs, labels))
    assert score.loss == pytest.approx(expected)
