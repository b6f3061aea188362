import numpy as np
import pytest

from testbed.ml.data.dataset import Dataset
from testbed.ml.rounds.layers import LocalDataset
from testbed.ml.rounds.options import Length


def data(samples: int) -> Dataset:
    images = np.arange(samples, dtype=np.float32).reshape(-1, 1, 1, 1)
    return Dataset(
        "synthetic",
        2,
        images,
        np.zeros(samples, np.int64),
        images[:0],
        np.zeros(0, np.int64),
    )


def test_rounds_are_epochs_or_iterations_and_the_last_may_be_shorter() -> None:
    epochs, steps = Length(True, each=2, total=5), Length(False, each=4, total=10)
    assert (epochs.rounds, steps.rounds) == (3, 3)
    assert [epochs.iterations(number, 7) for number in range(3)] == [
        range(14),
        range(14, 28),
        range(28, 35),
    ]
    assert [steps.iterations(number, 7) for number in range(3)] == [
        range(4),
        range(4, 8),
        range(8, 10),
    ]


def test_an_epoch_is_of_whole_iterations_of_equal_mini_batches() -> None:
    share = LocalDataset(data(50), 20, 3, seed=1)
    assert (share.mini_batch, share.per_epoch) == (6, 2)
    seen = [
        image.item()
        for step in range(2)
        for images, _ in share.iteration(step)
        for image in images
    ]
    assert len(seen) == len(set(seen)) == 36
    assert [len(labels) for _, labels in share.iteration(0)] == [6, 6, 6]


def test_without_numbers_every_iteration_is_the_first_read_once() -> None:
    share = LocalDataset(data(50), 20, 2, seed=1)
    assert share.iteration(3, needs_values=False) is share.iteration(
        0, needs_values=False
    )
    shapes = [
        [images.shape for images, _ in share.iteration(3, needs_values=needed)]
        for needed in (True, False)
    ]
    assert shapes[0] == shapes[1] == [(10, 1, 1, 1)] * 2


def test_few_samples_are_one_iteration() -> None:
    share = LocalDataset(data(7), 20, 2, seed=1)
    assert (share.mini_batch, share.per_epoch) == (3, 1)
    with pytest.raises(ValueError, match="2 samples do not make 3 mini-batches"):
        LocalDataset(data(2), 20, 3, seed=1)
