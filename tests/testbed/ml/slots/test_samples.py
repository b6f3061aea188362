"""Tests of micro-batches of training batches, and of the scores of test runs."""

from __future__ import annotations

from statistics import pstdev

import numpy as np
import pytest
import torch

from testbed.ml.data.synthetic import make
from testbed.ml.layers.feed import Training
from testbed.ml.slots import samples
from testbed.ml.workload import LearningPart

DATA = make("synthetic-1x2x2-3", 40, 10)
WORKLOAD = LearningPart.model_validate(
    {
        "model": {"name": "mlp"},
        "method": {"name": "edgepipe"},
        "steps": 3,
        "batch_size": 10,
    }
)


@pytest.mark.parametrize("parts", [1, 3, 4])
def test_micro_batches_joined_are_batches_of_training(parts: int) -> None:
    training = Training(DATA, WORKLOAD, 1)
    micro_batches = samples.MicroBatches(training, parts)
    assert micro_batches.batch_size == 10
    for step in range(3):
        images, labels = training.batch(step)
        numbers = range(step * parts, (step + 1) * parts)
        for own in (range(4), range(1, 3), range(0), (0, 3)):
            joined = torch.cat(
                [micro_batches.images(number, own) for number in numbers]
            )
            assert torch.equal(joined, images.flatten(1)[:, list(own)])
        labels_of = [micro_batches.labels(number) for number in numbers]
        assert torch.equal(torch.cat(labels_of), labels)
        sizes = [len(part) for part in labels_of]
        for number, size in zip(numbers, sizes, strict=True):
            assert micro_batches.samples(number) == size
        assert sum(sizes) == 10
        assert max(sizes) - min(sizes) <= 1


def make_outputs(labels: np.ndarray, correct: int) -> torch.Tensor:
    """Return outputs with the largest value at the label of the first samples, and at another class for the others."""
    predictions = []
    for place, label in enumerate(labels):
        predictions.append(label if place < correct else (label + 1) % 3)
    return 10 * torch.nn.functional.one_hot(torch.tensor(predictions), 3).float()


def test_test_runs_have_all_samples_in_batches() -> None:
    tests = samples.TestRuns(DATA, batch_size=4, runs=2)
    # Ten samples in batches of 4, 4 and 2, twice.
    assert len(tests) == 6
    for test, size in enumerate((4, 4, 2, 4, 4, 2)):
        assert tests.samples(test) == size
    all_images = torch.from_numpy(DATA.test_images).flatten(1)
    first_run = torch.cat([tests.images(test, range(4)) for test in range(3)])
    assert torch.equal(first_run, all_images)
    same_batch = tests.images(1, range(4))
    assert torch.equal(tests.images(4, (0, 2)), same_batch[:, [0, 2]])


def test_test_runs_report_mean_and_deviation_of_run_accuracies() -> None:
    tests = samples.TestRuns(DATA, batch_size=4, runs=2)
    labels = DATA.test_labels
    labels_of_batches = [labels[:4], labels[4:8], labels[8:]] * 2
    # All ten results of the first run are correct, and three of the second.
    for test, correct in enumerate((4, 4, 2, 2, 1, 0)):
        assert list(tests.unscored_batches(test + 1)) == [test]
        tests.score(test, make_outputs(labels_of_batches[test], correct))
    scores = tests.finish()
    assert scores["run_accuracies"] == [1.0, 0.3]
    assert scores["accuracy"] == pytest.approx(0.65)
    assert scores["deviation"] == pytest.approx(pstdev([1.0, 0.3]))
    assert scores["deviation"] == pytest.approx(0.35)
    # `finish` resets the scores for the next evaluation.
    assert list(tests.unscored_batches(1)) == [0]
