"""Batches of an epoch, micro-batches, and held-out test samples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.ml.data.batches import batch, cut_batch, steps_per_epoch
from testbed.ml.data.split import holdout


def test_holdout_takes_equal_share_of_each_class() -> None:
    labels = np.repeat(np.arange(5), [40, 30, 20, 7, 3])
    kept, held_out = holdout(labels, 0.2)
    # 1.4 and 0.6 samples of the last two classes are rounded to one.
    assert np.bincount(labels[held_out]).tolist() == [8, 6, 4, 1, 1]
    assert sorted([*kept, *held_out]) == list(range(100))


@given(
    samples=st.integers(1, 60),
    size=st.integers(1, 70),
    seed=st.integers(0, 9),
    epoch=st.integers(0, 3),
)
def test_epoch_contains_each_sample_at_most_once(
    samples: int, size: int, seed: int, epoch: int
) -> None:
    steps = steps_per_epoch(samples, size)
    first = epoch * steps
    batches = []
    for step in range(first, first + steps):
        indices = batch(samples, size, seed, step)
        assert len(indices) == min(size, samples)
        batches.append(indices)
    shown = np.concatenate(batches)
    assert len(set(shown.tolist())) == len(shown)
    # Only an incomplete last batch is dropped.
    assert samples - len(shown) < size


def test_batch_depends_on_seed_and_step_only() -> None:
    indices = batch(100, 10, seed=1, step=25)
    # A draw for another step must not move a shared generator.
    batch(100, 10, seed=2, step=3)
    assert np.array_equal(batch(100, 10, seed=1, step=25), indices)
    assert not np.array_equal(batch(100, 10, seed=2, step=25), indices)
    assert not np.array_equal(batch(100, 10, seed=1, step=15), indices)


def test_batches_without_samples_are_rejected() -> None:
    with pytest.raises(ValueError, match="a batch of 4 of 0 samples is impossible"):
        steps_per_epoch(0, 4)


def test_micro_batches_differ_by_at_most_one_sample() -> None:
    slices = cut_batch(10, 4)
    assert [piece.stop - piece.start for piece in slices] == [3, 3, 2, 2]
    samples = list(range(10))
    assert samples[slices[1]] == [3, 4, 5]
    assert samples[slices[2]] == [6, 7]
    assert cut_batch(3, 1) == (slice(0, 3),)


def test_more_micro_batches_than_samples_are_rejected() -> None:
    message = "a batch of 3 cannot be cut into 4 micro-batches: take 1 to 3"
    with pytest.raises(ValueError, match=message):
        cut_batch(3, 4)
