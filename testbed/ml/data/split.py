"""Ownership of training samples: shares of indices as a function of labels, owners and seed alone.

The controller divides the samples before planning. Each way of dividing draws from a generator of its own, seeded by
the scenario's seed and the name of the way.
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
"""Key of a scenario's workload that errors name."""
DRAWS = 1000
"""Maximum number of draws to reach `min_samples`."""


def is_class(labels: npt.NDArray[Any]) -> bool:
    """Return whether labels, (samples, ...), are one class per sample, in contrast to numbers or classes per token."""
    return labels.ndim == 1 and labels.dtype.kind == "i"


def split(
    labels: Indices,
    classes: int,
    owners: Sequence[str],
    how: Split,
    seed: int,
    groups: Indices | None = None,
) -> dict[str, Indices]:
    """Distribute samples among the devices with data; each sample goes to at most one device.

    All samples are distributed, except with `sizes` summing to fewer, and except classes `shards` assigns to no device.

    Args:
        labels: of all training samples, (samples,).
        classes: number of classes, numbered from 0.
        owners: the devices with data.
        how: the part ``workload.data.split``; any value but ``coordinator``, which owns all samples.
        seed: the scenario's seed.
        groups: for each training sample, (samples,), the value of the column named by ``how``; None without a column.

    Returns: By device, the indices of its samples in ascending order, (samples of the device,). Raises InputError for
    a device without samples, and for too few samples or classes.

    >>> labels = np.arange(100) % 10
    >>> shares = split(labels, 10, ["phone", "tablet"], SplitPart(sizes=[70, 30]), seed=1)
    >>> {name: len(indices) for name, indices in shares.items()}
    {'phone': 70, 'tablet': 30}
    """
    if len(owners) > len(labels):
        text = f"{len(labels)} samples are too few for {len(owners)} devices: use more samples or fewer devices"
        raise InputError(text, _KEY)
    # The other ways look at no label.
    by_class = isinstance(how, SplitPart) and bool(how.dirichlet or how.shards)
    if by_class and not is_class(labels):
        raise InputError(
            "distributes classes, but the labels are not classes: use iid, sizes, quantity or column",
            _KEY,
        )
    shares, remedy = _draw_until_large(labels, classes, owners, how, seed, groups)
    by_owner = {}
    for name, share in zip(owners, shares, strict=True):
        if not len(share):
            raise InputError(f"gives {name} no samples: {remedy}", _KEY)
        by_owner[name] = np.sort(share)
    return by_owner


def _draw_until_large(
    labels: Indices,
    classes: int,
    owners: Sequence[str],
    how: Split,
    seed: int,
    groups: Indices | None,
) -> tuple[list[Indices], str]:
    """Return the shares of the first draw with `min_samples` for each device, and a remedy for empty shares."""
    wanted = how.min_samples if isinstance(how, SplitPart) else None
    if not wanted:
        return _draw_shares(labels, classes, owners, how, seed, groups, draw=0)
    most = 0
    for draw in range(DRAWS):
        shares, remedy = _draw_shares(labels, classes, owners, how, seed, groups, draw)
        smallest = min(map(len, shares))
        if smallest >= wanted:
            return shares, remedy
        most = max(most, smallest)
    # With the best draw, the user sees how far the wish is from being possible.
    text = f"{DRAWS:,} draws left a device with fewer than {wanted} samples, the best of them with {most}"
    raise InputError(
        f"{text}: use a smaller value, fewer devices or more samples",
        (*_KEY, "min_samples"),
    )


def _draw_shares(
    labels: Indices,
    classes: int,
    owners: Sequence[str],
    how: Split,
    seed: int,
    groups: Indices | None,
    draw: int,
) -> tuple[list[Indices], str]:
    """Return the shares of a draw, counted from 0, and a remedy for empty shares; arguments as in `split`."""
    devices = len(owners)
    redraw = "use a larger value, fewer devices or another seed, or write min_samples"
    # With `noise` the samples themselves differ, and their distribution is that of `iid`.
    if not isinstance(how, SplitPart) or how.noise is not None:
        return _split_iid(labels, devices, seed), ""
    if how.sizes is not None:
        return _split_by_sizes(labels, owners, how.sizes, seed), ""
    if how.dirichlet is not None:
        generator = _seeded_generator(seed, "dirichlet", draw)
        return _split_dirichlet(labels, devices, how.dirichlet, generator), redraw
    if how.quantity is not None:
        generator = _seeded_generator(seed, "quantity", draw)
        return _split_by_quantity(labels, devices, how.quantity, generator), redraw
    if how.shards is not None:
        shares = _split_by_shards(labels, classes, devices, how.shards, seed)
        return shares, "use more samples or fewer devices"
    if groups is None:
        raise InputError(
            "requires a table, or samples with an input of this name: these data have no columns",
            (*_KEY, "column"),
        )
    remedy = "the column has fewer values than there are devices: use fewer devices"
    return _split_by_column(groups, devices), remedy


def class_counts(
    labels: Indices, shares: Mapping[str, Indices]
) -> dict[str, dict[int, int]]:
    """Return the number of samples by device and class, without zeros.

    >>> class_counts(np.array([0, 0, 1]), {"phone": np.array([0, 1]), "tablet": np.array([2])})
    {'phone': {0: 2}, 'tablet': {1: 1}}
    """
    counts = {}
    for name, share in shares.items():
        classes, numbers = np.unique(labels[share], return_counts=True)
        # Python's integers, which JSON can hold.
        pairs = zip(classes.tolist(), numbers.tolist(), strict=True)
        counts[name] = dict(pairs)
    return counts


def _seeded_generator(seed: int, kind: str, draw: int = 0) -> np.random.Generator:
    """Return the random generator of a draw, seeded by the scenario's seed and the number of the draw."""
    # The first draw has no number: so `min_samples` leaves a split that suffices as it was.
    number = [draw] if draw else []
    return np.random.default_rng(derive(seed, "split", kind, *number))


def _split_iid(labels: Indices, devices: int, seed: int) -> list[Indices]:
    """Distribute samples at random; the sizes of shares differ by at most one."""
    order = _seeded_generator(seed, "iid").permutation(len(labels))
    return np.array_split(order, devices)


def _split_by_sizes(
    labels: Indices,
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
    if sum(sizes) > len(labels):
        raise InputError(
            f"add up to {sum(sizes)} samples, but there are {len(labels)}: use smaller ones",
            key,
        )
    order = _seeded_generator(seed, "sizes").permutation(len(labels))
    # Samples beyond the sum of the sizes are not used.
    used = order[: sum(sizes)]
    ends = np.cumsum(sizes)
    return np.split(used, ends[:-1])


def _split_dirichlet(
    labels: Indices,
    devices: int,
    concentration: float,
    generator: np.random.Generator,
) -> list[Indices]:
    """Distribute each class in proportions drawn from a Dirichlet distribution (Hsu et al., 2019)."""
    shares = _empty_shares(devices)
    for label in np.unique(labels):
        members = _shuffled_members(labels, label, generator)
        proportions = generator.dirichlet([concentration] * devices)
        # The end of the last part is that of the class.
        edges = np.cumsum(proportions)[:-1] * len(members)
        parts = np.split(members, edges.astype(int))
        for share, part in zip(shares, parts, strict=True):
            share.append(part)
    return _join_shares(shares)


def _empty_shares(devices: int) -> list[list[Indices]]:
    """Return an empty list of index arrays for each device."""
    return [[] for _ in range(devices)]


def _join_shares(shares: list[list[Indices]]) -> list[Indices]:
    return [np.concatenate(share) for share in shares]


def _shuffled_members(
    labels: Indices, label: int, generator: np.random.Generator
) -> Indices:
    """Return the indices of the samples of a class in random order, (samples of the class,)."""
    return generator.permutation(np.flatnonzero(labels == label))


def _split_by_quantity(
    labels: Indices,
    devices: int,
    concentration: float,
    generator: np.random.Generator,
) -> list[Indices]:
    """Distribute samples at random in sizes drawn from a Dirichlet distribution ("quantity skew", Li et al., 2022)."""
    proportions = generator.dirichlet([concentration] * devices)
    edges = np.cumsum(proportions)[:-1] * len(labels)
    order = generator.permutation(len(labels))
    return np.split(order, edges.astype(int))


def _split_by_column(groups: Indices, devices: int) -> list[Indices]:
    """Keep samples with one column value together; the largest group goes to the device with fewest samples so far."""
    shares = _empty_shares(devices)
    sizes = [0] * devices
    values, counts = np.unique(groups, return_counts=True)
    # Stable: equally large groups are distributed in the order of their values, on every machine.
    largest_first = np.argsort(-counts, kind="stable")
    for place in largest_first:
        members = np.flatnonzero(groups == values[place])
        smallest = sizes.index(min(sizes))
        shares[smallest].append(members)
        sizes[smallest] += len(members)
    for share in shares:
        # With fewer values than devices a share is empty, and nothing cannot be concatenated.
        share.append(np.empty(0, np.int64))
    return _join_shares(shares)


def _split_by_shards(
    labels: Indices,
    classes: int,
    devices: int,
    count: int,
    seed: int,
) -> list[Indices]:
    """Assign ``count`` classes to each device, all classes about equally often; owners share a class evenly.

    The "quantity-based label imbalance" of Li et al. (Federated learning on non-IID data silos, 2022).
    """
    if count > classes:
        raise InputError(
            f"there are {classes} classes, not {count}: use fewer", (*_KEY, "shards")
        )
    generator = _seeded_generator(seed, "shards")
    hands = _deal_classes(classes, devices, count, generator)
    shares = _empty_shares(devices)
    for label in range(classes):
        holders = []
        for share, hand in zip(shares, hands, strict=True):
            if label in hand:
                holders.append(share)
        # Drawn also for a class without holders: the classes after it do not depend on the hands.
        members = _shuffled_members(labels, label, generator)
        if not holders:
            continue
        parts = np.array_split(members, len(holders))
        for share, part in zip(holders, parts, strict=True):
            share.append(part)
    return _join_shares(shares)


def _deal_classes(
    classes: int,
    devices: int,
    count: int,
    generator: np.random.Generator,
) -> list[list[int]]:
    """Deal ``count`` different classes to each device from decks of all classes, as cards are dealt.

    A class is in a deck once, so all classes are dealt about equally often. Returns the hand of each device.
    """
    deck: list[int] = []
    hands: list[list[int]] = [[] for _ in range(devices)]
    for hand in hands:
        while len(hand) < count:
            allowed = [label for label in deck if label not in hand]
            if not allowed:
                # All that is left in the deck is in this hand: shuffle another deck below it.
                fresh = generator.permutation(classes).tolist()
                deck += fresh
                allowed = [label for label in fresh if label not in hand]
            hand.append(allowed[0])
            deck.remove(allowed[0])
    return hands


def holdout(labels: Indices, fraction: float) -> tuple[Indices, Indices]:
    """Split off a fraction of each class: (kept, split off), each in the order of the samples.

    The result is deterministic.

    >>> kept, tests = holdout(np.array([0, 1] * 5), 0.2)
    >>> len(kept), len(tests)
    (8, 2)
    """
    # A fixed seed: runs of different seeds are tested on the same samples.
    generator = _seeded_generator(0, "holdout")
    is_aside = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = _shuffled_members(labels, label, generator)
        count = round(fraction * len(members))
        is_aside[members[:count]] = True
    return np.flatnonzero(~is_aside), np.flatnonzero(is_aside)
