"""Distribution of training samples among the devices that own data, by the rule `workload.data.split`.

The controller distributes the samples before planning. A device's share is an array of sample indices, and depends only
on the labels, the owning devices, the rule and the scenario's seed. Every kind of rule has random numbers of its own.

The rules `dirichlet` and `quantity` draw the sizes of the shares at random, so a share may be too small. With
`min_samples`, the shares are drawn again until every device has this number of samples.

The module also splits off test samples, for data without a test set (`holdout`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from testbed.common.errors import InputError, Key
from testbed.common.lazy import np, npt
from testbed.common.seeds import derive
from testbed.ml.data.batches import Indices
from testbed.ml.workload import Split, SplitPart

_KEY: Key = ("data", "split")
"""Key of the rule, relative to ``workload``, as errors name it."""
_MAX_DRAWS = 1000
"""Maximum number of draws for `min_samples`: with the 60,000 samples of MNIST they take a few seconds."""


def is_class(labels: npt.NDArray[Any]) -> bool:
    """Return whether labels, (samples, ...), are one class per sample, in contrast to numbers or classes per token."""
    return labels.ndim == 1 and labels.dtype.kind == "i"


def split_samples(
    labels: npt.NDArray[Any],
    classes: int,
    owners: Sequence[str],
    rule: Split,
    seed: int,
    groups: Indices | None = None,
) -> dict[str, Indices]:
    """Distribute samples among the owning devices; each sample goes to at most one device.

    Samples without an owner remain if `sizes` sum to fewer samples, or if `shards` assigns a class to no device.

    Args:
        labels: labels of all training samples, (samples, ...); classes, (samples,), for `dirichlet` and `shards`.
        classes: number of classes, numbered from 0.
        owners: names of the devices that own data.
        rule: the part ``workload.data.split``; any value but ``coordinator``, which owns all samples.
        seed: the scenario's seed.
        groups: the number of each sample's group, (samples,): samples with one value of `column` are a group. None for
            other rules, and for data without columns.

    Returns: By device, the indices of its samples in ascending order, (samples of the device,). Raises InputError for
    a device without samples, and for too few samples or classes.

    >>> labels = np.arange(100) % 10
    >>> rule = SplitPart(sizes=[70, 30])
    >>> shares = split_samples(labels, 10, ["phone", "tablet"], rule, seed=1)
    >>> {device: len(indices) for device, indices in shares.items()}
    {'phone': 70, 'tablet': 30}
    """
    if len(owners) > len(labels):
        text = f"{len(labels)} samples are too few for {len(owners)} devices: use more samples or fewer devices"
        raise InputError(text, _KEY)
    # Only these two rules read the labels.
    by_class = isinstance(rule, SplitPart) and bool(rule.dirichlet or rule.shards)
    if by_class and not is_class(labels):
        raise InputError(
            "distributes classes, but the labels are not classes: use iid, sizes, quantity or column",
            _KEY,
        )
    min_samples = rule.min_samples if isinstance(rule, SplitPart) else None
    largest_minimum = 0
    for draw in range(_MAX_DRAWS):
        shares = _draw_shares(labels, classes, owners, rule, seed, groups, draw)
        smallest = min(len(share) for share in shares)
        if min_samples is None or smallest >= min_samples:
            return _shares_by_device(owners, shares, rule)
        largest_minimum = max(largest_minimum, smallest)
    # The best draw shows the user how far `min_samples` is from being possible.
    raise InputError(
        f"{_MAX_DRAWS:,} draws left a device with fewer than {min_samples} samples, the best of them with "
        f"{largest_minimum}: use a smaller value, fewer devices or more samples",
        (*_KEY, "min_samples"),
    )


def _shares_by_device(
    owners: Sequence[str], shares: Sequence[Indices], rule: Split
) -> dict[str, Indices]:
    """Return the sorted shares by device; raises `InputError` for an empty share."""
    by_owner = {}
    for device, share in zip(owners, shares, strict=True):
        if not len(share):
            remedy = _empty_share_remedy(rule)
            raise InputError(f"gives {device} no samples: {remedy}", _KEY)
        by_owner[device] = np.sort(share)
    return by_owner


def _empty_share_remedy(rule: Split) -> str:
    """Return the advice for a rule leaving a device without samples."""
    if isinstance(rule, SplitPart) and rule.column is not None:
        return "the column has fewer values than there are devices: use fewer devices"
    if isinstance(rule, SplitPart) and rule.shards is not None:
        return "use more samples or fewer devices"
    # `dirichlet` and `quantity`: all other rules give each device a sample.
    return "use a larger value, fewer devices or another seed, or write min_samples"


def _draw_shares(
    labels: npt.NDArray[Any],
    classes: int,
    owners: Sequence[str],
    rule: Split,
    seed: int,
    groups: Indices | None,
    draw: int,
) -> list[Indices]:
    """Return the unsorted shares of a draw; for the other arguments, see `split_samples`.

    Draws are counted from 0, and only `dirichlet` and `quantity` depend on the number.
    """
    samples = len(labels)
    devices = len(owners)
    # `noise` changes the values of the samples; the samples themselves are distributed as by `iid`.
    if not isinstance(rule, SplitPart) or rule.noise is not None:
        return _split_iid(samples, devices, seed)
    if rule.sizes is not None:
        return _split_by_sizes(samples, owners, rule.sizes, seed)
    if rule.dirichlet is not None:
        generator = _seeded_generator(seed, "dirichlet", draw)
        return _split_dirichlet(labels, devices, rule.dirichlet, generator)
    if rule.quantity is not None:
        generator = _seeded_generator(seed, "quantity", draw)
        return _split_by_quantity(samples, devices, rule.quantity, generator)
    if rule.shards is not None:
        return _split_by_shards(labels, classes, devices, rule.shards, seed)
    if groups is None:
        raise InputError(
            "requires a table, or samples with an input of this name: these data have no columns",
            (*_KEY, "column"),
        )
    return _split_by_column(groups, devices)


def class_counts(
    labels: npt.NDArray[Any], shares: Mapping[str, Indices]
) -> dict[str, dict[int, int]]:
    """Return the number of samples by device and class, without zeros.

    >>> class_counts(np.array([0, 0, 1]), {"phone": np.array([0, 1]), "tablet": np.array([2])})
    {'phone': {0: 2}, 'tablet': {1: 1}}
    """
    counts = {}
    for device, share in shares.items():
        classes, samples = np.unique(labels[share], return_counts=True)
        # JSON accepts Python's integers, but not numpy's.
        pairs = zip(classes.tolist(), samples.tolist(), strict=True)
        counts[device] = dict(pairs)
    return counts


def _seeded_generator(seed: int, kind: str, draw: int = 0) -> np.random.Generator:
    """Return the random generator for a draw; ``kind`` is the kind of rule."""
    # Seeds of earlier versions had no draw number. The first draw still has none, so that all splits stay the same.
    draw_number = [draw] if draw else []
    return np.random.default_rng(derive(seed, "split", kind, *draw_number))


def _split_iid(samples: int, devices: int, seed: int) -> list[Indices]:
    """Distribute samples at random; the sizes of shares differ by at most one."""
    order = _seeded_generator(seed, "iid").permutation(samples)
    return np.array_split(order, devices)


def _split_by_sizes(
    samples: int,
    owners: Sequence[str],
    sizes: Sequence[int],
    seed: int,
) -> list[Indices]:
    """Distribute samples at random in the given sizes."""
    key = (*_KEY, "sizes")
    if len(sizes) != len(owners):
        raise InputError(
            f"names {len(sizes)} sizes, but {len(owners)} devices own data: {', '.join(owners)}",
            key,
        )
    total = sum(sizes)
    if total > samples:
        raise InputError(
            f"add up to {total} samples, but there are {samples}: use smaller ones",
            key,
        )
    order = _seeded_generator(seed, "sizes").permutation(samples)
    # Samples beyond the sum of the sizes have no owner.
    owned = order[:total]
    ends = np.cumsum(sizes)
    # `np.split` takes the positions between the shares: all ends but the last.
    return np.split(owned, ends[:-1])


def _split_dirichlet(
    labels: npt.NDArray[Any],
    devices: int,
    concentration: float,
    generator: np.random.Generator,
) -> list[Indices]:
    """Distribute each class in proportions drawn from a Dirichlet distribution (Hsu et al., 2019)."""
    shares = _empty_shares(devices)
    for label in np.unique(labels):
        members = _shuffled_members(labels, label, generator)
        proportions = generator.dirichlet([concentration] * devices)
        # `np.split` takes the positions between the parts: all ends but the last.
        edges = np.cumsum(proportions)[:-1] * len(members)
        parts = np.split(members, edges.astype(int))
        for share, part in zip(shares, parts, strict=True):
            share.append(part)
    return _join_shares(shares)


def _empty_shares(devices: int) -> list[list[Indices]]:
    """Return a list for each device, to which index arrays are appended for `_join_shares`."""
    return [[] for _ in range(devices)]


def _join_shares(shares: list[list[Indices]]) -> list[Indices]:
    return [np.concatenate(share) for share in shares]


def _shuffled_members(
    labels: npt.NDArray[Any], label: int, generator: np.random.Generator
) -> Indices:
    """Return the indices of a class's samples in random order, (samples of the class,)."""
    return generator.permutation(np.flatnonzero(labels == label))


def _split_by_quantity(
    samples: int,
    devices: int,
    concentration: float,
    generator: np.random.Generator,
) -> list[Indices]:
    """Distribute samples at random in sizes drawn from a Dirichlet distribution ("quantity skew", Li et al., 2022)."""
    proportions = generator.dirichlet([concentration] * devices)
    edges = np.cumsum(proportions)[:-1] * samples
    order = generator.permutation(samples)
    return np.split(order, edges.astype(int))


def _split_by_column(groups: Indices, devices: int) -> list[Indices]:
    """Give each group, largest first, as a whole to the device with the fewest samples so far."""
    shares = _empty_shares(devices)
    sizes = [0] * devices
    group_numbers, group_sizes = np.unique(groups, return_counts=True)
    # A stable sort distributes equally large groups in the order of their numbers, on every machine.
    largest_first = np.argsort(-group_sizes, kind="stable")
    for group in group_numbers[largest_first]:
        members = np.flatnonzero(groups == group)
        smallest = sizes.index(min(sizes))
        shares[smallest].append(members)
        sizes[smallest] += len(members)
    for share in shares:
        # With fewer groups than devices some lists have no array, and numpy refuses to concatenate zero arrays.
        share.append(np.empty(0, np.int64))
    return _join_shares(shares)


def _split_by_shards(
    labels: npt.NDArray[Any],
    classes: int,
    devices: int,
    classes_per_device: int,
    seed: int,
) -> list[Indices]:
    """Assign some classes to each device, all classes about equally often; the owners of a class get equal parts.

    The "quantity-based label imbalance" of Li et al. (Federated learning on non-IID data silos, 2022).
    """
    if classes_per_device > classes:
        raise InputError(
            f"there are {classes} classes, not {classes_per_device}: use fewer",
            (*_KEY, "shards"),
        )
    generator = _seeded_generator(seed, "shards")
    classes_of_devices = _deal_classes(classes, devices, classes_per_device, generator)
    shares = _empty_shares(devices)
    for label in range(classes):
        shares_with_class = []
        for share, dealt in zip(shares, classes_of_devices, strict=True):
            if label in dealt:
                shares_with_class.append(share)
        # Shuffled even for a class without an owner, so that the random numbers of later classes do not depend on it.
        members = _shuffled_members(labels, label, generator)
        if not shares_with_class:
            continue
        parts = np.array_split(members, len(shares_with_class))
        for share, part in zip(shares_with_class, parts, strict=True):
            share.append(part)
    return _join_shares(shares)


def _deal_classes(
    classes: int,
    devices: int,
    classes_per_device: int,
    generator: np.random.Generator,
) -> list[list[int]]:
    """Return different classes for each device, dealt like cards: each device's classes are a hand.

    A deck has each class once, and a new deck follows when no class remains for a hand, so all classes are dealt about
    equally often.
    """
    deck: list[int] = []
    hands: list[list[int]] = [[] for _ in range(devices)]
    for hand in hands:
        while len(hand) < classes_per_device:
            candidates = [label for label in deck if label not in hand]
            if not candidates:
                # The hand has all classes that remain in the deck: put a new shuffled deck below them.
                new_deck = generator.permutation(classes).tolist()
                deck += new_deck
                candidates = [label for label in new_deck if label not in hand]
            dealt = candidates[0]
            hand.append(dealt)
            deck.remove(dealt)
    return hands


def holdout(labels: npt.NDArray[Any], fraction: float) -> tuple[Indices, Indices]:
    """Split off a fraction of each class as test samples.

    Returns: The ascending indices of the training samples and of the test samples, which depend on the labels alone.

    >>> train, test = holdout(np.array([0, 1] * 5), 0.2)
    >>> len(train), len(test)
    (8, 2)
    """
    # A constant seed: runs with different seeds are evaluated on the same test samples.
    generator = _seeded_generator(0, "holdout")
    is_test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = _shuffled_members(labels, label, generator)
        test_count = round(fraction * len(members))
        is_test[members[:test_count]] = True
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)
