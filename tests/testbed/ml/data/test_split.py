"""Training samples shared among devices: disjoint, seeded, as uneven as asked; nobody is left without any."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.common.errors import InputError
from testbed.ml.data.split import class_counts, split
from testbed.ml.workload import Split, SplitPart

LABELS = np.repeat(np.arange(10), 120)
WAYS: dict[str, Split] = {
    "iid": "iid",
    "sizes": SplitPart(sizes=(100, 200, 300, 400)),
    "dirichlet": SplitPart(dirichlet=0.5),
    "shards": SplitPart(shards=3),
}
OWNERS = ["a", "b", "c", "d"]


def refusal(*arguments) -> InputError:
    with pytest.raises(InputError) as caught:
        split(*arguments)
    return caught.value


@pytest.mark.parametrize("way", WAYS)
@given(seed=st.integers(0, 99))
def test_each_sample_has_one_owner_drawn_from_the_seed(way: str, seed: int) -> None:
    shares = split(LABELS, 10, OWNERS, WAYS[way], seed)
    assert list(shares) == OWNERS
    together = np.concatenate(list(shares.values()))
    assert len(set(together.tolist())) == len(together)
    assert len(together) == (1000 if way == "sizes" else len(LABELS))
    assert all((np.diff(share) > 0).all() for share in shares.values())
    again, other = (
        split(LABELS, 10, OWNERS, WAYS[way], seed),
        split(LABELS, 10, OWNERS, WAYS[way], seed + 1),
    )
    assert all(np.array_equal(shares[name], again[name]) for name in OWNERS)
    assert not all(np.array_equal(shares[name], other[name]) for name in OWNERS)


@given(samples=st.integers(1, 200), devices=st.integers(1, 12), seed=st.integers(0, 9))
def test_iid_gives_each_as_many(samples: int, devices: int, seed: int) -> None:
    labels, owners = np.arange(samples) % 10, [f"d{index}" for index in range(devices)]
    if devices > samples:
        error = refusal(labels, 10, owners, "iid", seed)
        assert error.key == ("data", "split")
        assert error.text.startswith(
            f"{samples} samples are too few for {devices} devices"
        )
        return
    sizes = [len(share) for share in split(labels, 10, owners, "iid", seed).values()]
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes) == samples


def test_shares_have_the_requested_sizes() -> None:
    shares = split(LABELS, 10, OWNERS, WAYS["sizes"], 7)
    assert [len(share) for share in shares.values()] == [100, 200, 300, 400]
    assert min(len(counts) for counts in class_counts(LABELS, shares).values()) == 10


@given(each=st.integers(1, 10), devices=st.integers(1, 15), seed=st.integers(0, 20))
def test_shards_give_each_device_the_requested_number_of_classes(
    each: int, devices: int, seed: int
) -> None:
    owners = [f"d{index}" for index in range(devices)]
    counts = class_counts(
        LABELS, split(LABELS, 10, owners, SplitPart(shards=each), seed)
    )
    assert all(len(of) == each for of in counts.values())
    holders = np.bincount(
        [label for of in counts.values() for label in of], minlength=10
    )
    assert holders.max() - holders.min() <= 2
    # Who has a class shares it evenly with the others who have it.
    for label in range(10):
        parts = [of[label] for of in counts.values() if label in of]
        assert sum(parts) in (0, 120)
        assert not parts or max(parts) - min(parts) <= 1


def test_a_small_concentration_skews_and_a_large_one_does_not() -> None:
    def largest_class(concentration: float) -> float:
        counts = class_counts(
            LABELS, split(LABELS, 10, OWNERS, SplitPart(dirichlet=concentration), 1)
        )
        return float(
            np.mean([max(of.values()) / sum(of.values()) for of in counts.values()])
        )

    assert largest_class(0.1) > 0.3
    assert largest_class(1000.0) < 0.15


@pytest.mark.parametrize(
    ("labels", "how", "key", "text"),
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
            "without samples: use a larger value, fewer devices or",
        ),
        (
            np.arange(4),
            SplitPart(shards=1),
            None,
            "without samples: use more samples or fewer devices",
        ),
        (np.arange(3), "iid", None, "3 samples are too few for 4 devices"),
    ],
)
def test_impossible_splits_name_the_key(labels, how, key, text) -> None:
    error = refusal(labels, 10, OWNERS, how, 4)
    assert error.key == ("data", "split") + ((key,) if key else ())
    assert text in error.text


@pytest.mark.parametrize("way", ["dirichlet", "quantity"])
def test_shares_are_drawn_again_until_each_device_has_enough(way: str) -> None:
    skewed = {way: 0.3}
    for seed in range(5):
        once = split(LABELS, 10, OWNERS, SplitPart(**{way: 5.0}), seed)
        enough = split(
            LABELS,
            10,
            OWNERS,
            SplitPart(**{way: 5.0}, min_samples=min(map(len, once.values()))),
            seed,
        )
        assert all(
            np.array_equal(once[name], enough[name]) for name in OWNERS
        )  # the first draw is good
        drawn = [
            split(LABELS, 10, OWNERS, SplitPart(**skewed, min_samples=150), seed)
            for _ in range(2)
        ]
        assert min(map(len, drawn[0].values())) >= 150
        assert all(np.array_equal(drawn[0][name], drawn[1][name]) for name in OWNERS)


def test_unreachable_min_samples_is_rejected_with_the_best_draw() -> None:
    error = refusal(LABELS, 10, OWNERS, SplitPart(quantity=0.05, min_samples=300), 1)
    assert error.key == ("data", "split", "min_samples")
    assert "1,000 draws left a device with fewer than 300 samples" in error.text


def test_min_samples_requires_a_random_split() -> None:
    with pytest.raises(
        ValueError, match="'min_samples' requires 'dirichlet' or 'quantity'"
    ):
        SplitPart(shards=2, min_samples=5)
