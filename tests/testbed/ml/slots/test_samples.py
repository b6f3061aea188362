"""Micro-batches that make up the batches, and tests that are scored in their order."""

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
def test_micro_batches_are_the_batches_of_training_in_their_order(parts: int) -> None:
    training = Training(DATA, WORKLOAD, 1)
    found = samples.MicroBatches(training, parts)
    assert (found.steps, found.whole) == (3, 10)
    for step in range(3):
        images, labels = training.batch(step)
        numbers = range(step * parts, (step + 1) * parts)
        for own in (range(4), range(1, 3), range(0), (0, 3)):
            seen = torch.cat([found.images(number, own) for number in numbers])
            assert torch.equal(seen, images.flatten(1)[:, list(own)])
        assert torch.equal(
            torch.cat([found.labels(number) for number in numbers]), labels
        )
        sizes = [found.samples(number) for number in numbers]
        assert sizes == [len(found.labels(number)) for number in numbers]
        assert sum(sizes) == 10
        assert max(sizes) - min(sizes) <= 1


def outputs(labels: np.ndarray, right: int) -> torch.Tensor:
    """Return outputs that are sure of the label of the first samples and of another class of all others."""
    said = [
        label if place < right else (label + 1) % 3
        for place, label in enumerate(labels)
    ]
    return 10 * torch.nn.functional.one_hot(torch.tensor(said), 3).float()


def test_each_test_run_scores_all_samples_once() -> None:
    tests = samples.TestRuns(DATA, 4, 2)
    assert len(tests) == 6, "batches of 4, 4 and 2, twice"
    assert [tests.samples(test) for test in range(6)] == [4, 4, 2, 4, 4, 2]
    whole = torch.from_numpy(DATA.test_images).flatten(1)
    assert torch.equal(
        torch.cat([tests.images(test, range(4)) for test in range(3)]), whole
    )
    assert torch.equal(tests.images(4, (0, 2)), tests.images(1, range(4))[:, [0, 2]])
    labels = [DATA.test_labels[:4], DATA.test_labels[4:8], DATA.test_labels[8:]] * 2
    for test, right in enumerate((4, 4, 2, 2, 1, 0)):
        assert list(tests.unscored_batches(test + 1)) == [test]
        tests.score(test, outputs(labels[test], right))
    found = tests.finish()
    assert found["run_accuracies"] == [1.0, 0.3]
    assert found["accuracy"] == pytest.approx(0.65)
    assert (
        found["deviation"] == pytest.approx(pstdev([1.0, 0.3])) == pytest.approx(0.35)
    )
    assert list(tests.unscored_batches(1)) == [0], "it begins again"
