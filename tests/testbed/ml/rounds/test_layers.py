"""Tests of the samples of a device, and of the number of iterations in a round."""

import numpy as np
import pytest

from testbed.ml.data.dataset import Dataset
from testbed.ml.rounds.layers import LocalDataset
from testbed.ml.rounds.options import RoundLength


def numbered_dataset(samples: int) -> Dataset:
    """Return samples of one pixel each, whose value is the number of the sample."""
    images = np.arange(samples, dtype=np.float32).reshape(-1, 1, 1, 1)
    labels = np.zeros(samples, np.int64)
    return Dataset("synthetic", 2, images, labels, images[:0], labels[:0])


def test_rounds_are_epochs_or_iterations_and_last_round_may_be_shorter() -> None:
    epochs = RoundLength(counts_epochs=True, per_round=2, total=5)
    steps = RoundLength(counts_epochs=False, per_round=4, total=10)
    assert epochs.rounds == 3
    assert steps.rounds == 3
    # With 7 iterations in an epoch.
    of_epochs = [epochs.iterations(number, 7) for number in range(3)]
    assert of_epochs == [range(14), range(14, 28), range(28, 35)]
    of_steps = [steps.iterations(number, 7) for number in range(3)]
    assert of_steps == [range(4), range(4, 8), range(8, 10)]


def test_epoch_has_whole_iterations_of_equal_mini_batches() -> None:
    local = LocalDataset(numbered_dataset(50), 20, 3, seed=1)
    # Mini-batches of 20 // 3 samples, so that iterations have 18 and two of them fit in 50.
    assert local.mini_batch == 6
    assert local.per_epoch == 2
    samples = []
    for step in range(2):
        for images, _ in local.iteration(step):
            samples += images.flatten().tolist()
    assert len(samples) == 36
    assert len(set(samples)) == 36
    assert [len(labels) for _, labels in local.iteration(0)] == [6, 6, 6]


def test_all_iterations_share_tensors_if_values_are_not_needed() -> None:
    local = LocalDataset(numbered_dataset(50), 20, 2, seed=1)
    blank = local.iteration(3, needs_values=False)
    assert blank is local.iteration(0, needs_values=False)
    full = local.iteration(3, needs_values=True)
    for mini_batches in (full, blank):
        shapes = [images.shape for images, _ in mini_batches]
        assert shapes == [(10, 1, 1, 1)] * 2


def test_dataset_smaller_than_batch_is_one_iteration() -> None:
    local = LocalDataset(numbered_dataset(7), 20, 2, seed=1)
    assert local.mini_batch == 3
    assert local.per_epoch == 1


def test_fewer_samples_than_mini_batches_are_rejected() -> None:
    with pytest.raises(
        ValueError, match="3 mini-batches need at least as many samples"
    ):
        LocalDataset(numbered_dataset(2), 20, 3, seed=1)
