"""Splits of training samples among devices: sizes, class distributions, seeds, and impossible splits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.common.errors import InputError
from testbed.ml.data.split import class_counts, split_samples
from testbed.ml.workload import Split, SplitPart

SAMPLES_PER_CLASS = 120
LABELS = np.repeat(np.arange(10), SAMPLES_PER_CLASS)
SPLITS: dict[str, Split] = {
    "iid": "iid",
    "sizes": SplitPart(sizes=(100, 200, 300, 400)),
    "dirichlet": SplitPart(dirichlet=0.5),
    "shards": SplitPart(shards=3),
}
OWNERS = ["a", "b", "c", "d"]


def split_labels(rule: Split, seed: int) -> dict[str, np.ndarray]:
    return split_samples(LABELS, 10, OWNERS, rule, seed)


def split_error(
    labels: np.ndarray, owners: Sequence[str], rule: Split, seed: int
) -> InputError:
    with pytest.raises(InputError) as caught:
        split_samples(labels, 10, owners, rule, seed)
    return caught.value


def are_equal(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(first[name], second[name]) for name in OWNERS)


def smallest_share(shares: dict[str, np.ndarray]) -> int:
    return min(len(share) for share in shares.values())


@pytest.mark.parametrize("name", SPLITS)
@given(seed=st.integers(0, 99))
def test_each_sample_has_one_owner(name: str, seed: int) -> None:
    shares = split_labels(SPLITS[name], seed)
    assert list(shares) == OWNERS
    distributed = np.concatenate(list(shares.values()))
    assert len(set(distributed.tolist())) == len(distributed)
    # The sizes sum to 1000 of 1200 samples.
    assert len(distributed) == (1000 if name == "sizes" else len(LABELS))
    for share in shares.values():
        is_ascending = (np.diff(share) > 0).all()
        assert is_ascending


@pytest.mark.parametrize("name", SPLITS)
@given(seed=st.integers(0, 99))
def test_shares_follow_from_seed(name: str, seed: int) -> None:
    rule = SPLITS[name]
    shares = split_labels(rule, seed)
    assert are_equal(shares, split_labels(rule, seed))
    assert not are_equal(shares, split_labels(rule, seed + 1))


@given(samples=st.integers(1, 200), devices=st.integers(1, 12), seed=st.integers(0, 9))
def test_iid_shares_have_equal_sizes(samples: int, devices: int, seed: int) -> None:
    labels = np.arange(samples) % 10
    owners = [f"d{index}" for index in range(devices)]
    if devices > samples:
        error = split_error(labels, owners, "iid", seed)
        assert error.key == ("data", "split")
        expected = f"{samples} samples are too few for {devices} devices"
        assert error.text.startswith(expected)
        return
    shares = split_samples(labels, 10, owners, "iid", seed)
    sizes = [len(share) for share in shares.values()]
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes) == samples


def test_shares_have_requested_sizes() -> None:
    shares = split_labels(SPLITS["sizes"], 7)
    assert [len(share) for share in shares.values()] == [100, 200, 300, 400]
    # Of 100 random samples, some have each of the ten classes.
    counts = class_counts(LABELS, shares)
    assert min(len(classes) for classes in counts.values()) == 10


@given(
    classes_per_device=st.integers(1, 10),
    devices=st.integers(1, 15),
    seed=st.integers(0, 20),
)
def test_shards_give_each_device_requested_number_of_classes(
    classes_per_device: int, devices: int, seed: int
) -> None:
    owners = [f"d{index}" for index in range(devices)]
    rule = SplitPart(shards=classes_per_device)
    counts = class_counts(LABELS, split_samples(LABELS, 10, owners, rule, seed))
    owned_classes = []
    for classes in counts.values():
        assert len(classes) == classes_per_device
        owned_classes.extend(classes)
    owners_per_class = np.bincount(owned_classes, minlength=10)
    assert owners_per_class.max() - owners_per_class.min() <= 2
    # The owners of a class share its samples evenly.
    for label in range(10):
        parts = [classes[label] for classes in counts.values() if label in classes]
        if parts:
            assert sum(parts) == SAMPLES_PER_CLASS
            assert max(parts) - min(parts) <= 1


def test_small_dirichlet_concentration_skews_classes() -> None:
    def mean_share_of_largest_class(concentration: float) -> float:
        shares = split_labels(SplitPart(dirichlet=concentration), 1)
        largest = []
        for classes in class_counts(LABELS, shares).values():
            largest.append(max(classes.values()) / sum(classes.values()))
        return float(np.mean(largest))

    # Ten equal classes would have a share of 0.1 each.
    assert mean_share_of_largest_class(0.1) > 0.3
    assert mean_share_of_largest_class(1000.0) < 0.15


@pytest.mark.parametrize(
    ("labels", "rule", "key", "text"),
    [
        (
            LABELS,
            SplitPart(sizes=(1, 2)),
            "sizes",
            "names 2 sizes, but 4 devices own data: a, b, c, d",
        ),
        (
            LABELS,
            SplitPart(sizes=(400, 400, 400, 1)),
            "sizes",
            "add up to 1201 samples, but there are 1200",
        ),
        (
            LABELS,
            SplitPart(shards=11),
            "shards",
            "there are 10 classes, not 11: use fewer",
        ),
        (
            LABELS[:240],
            SplitPart(dirichlet=1e-9),
            None,
            "no samples: use a larger value, fewer devices or",
        ),
        (
            np.arange(4),
            SplitPart(shards=1),
            None,
            "no samples: use more samples or fewer devices",
        ),
        (np.arange(3), "iid", None, "3 samples are too few for 4 devices"),
    ],
    ids=[
        "too-few-sizes",
        "too-large-sizes",
        "too-many-shards",
        "too-small-concentration",
        "empty-shard",
        "too-few-samples",
    ],
)
def test_impossible_split_is_rejected_with_key(
    labels: np.ndarray, rule: Split, key: str | None, text: str
) -> None:
    error = split_error(labels, OWNERS, rule, 4)
    expected_key = ("data", "split", key) if key else ("data", "split")
    assert error.key == expected_key
    assert text in error.text


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("key", ["dirichlet", "quantity"])
def test_first_draw_is_kept_if_shares_are_large_enough(key: str, seed: int) -> None:
    first = split_labels(SplitPart(**{key: 5.0}), seed)
    rule = SplitPart(**{key: 5.0}, min_samples=smallest_share(first))
    assert are_equal(first, split_labels(rule, seed))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("key", ["dirichlet", "quantity"])
def test_shares_are_redrawn_until_large_enough(key: str, seed: int) -> None:
    rule = SplitPart(**{key: 0.3}, min_samples=150)
    shares = split_labels(rule, seed)
    assert smallest_share(shares) >= 150
    assert are_equal(shares, split_labels(rule, seed))


def test_unreachable_min_samples_is_rejected_with_best_draw() -> None:
    rule = SplitPart(quantity=0.05, min_samples=300)
    error = split_error(LABELS, OWNERS, rule, 1)
    assert error.key == ("data", "split", "min_samples")
    assert "1,000 draws left a device with fewer than 300 samples" in error.text


def test_min_samples_requires_random_split() -> None:
    message = "'min_samples' requires 'dirichlet' or 'quantity'"
    with pytest.raises(ValueError, match=message):
        SplitPart(shards=2, min_samples=5)
