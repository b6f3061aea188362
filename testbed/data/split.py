"""How training samples are shared among devices: by indices, seeded, every sample to exactly one device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from testbed.seeds import derive

Indices = npt.NDArray[np.int64]


def _check(samples: int, devices: int) -> None:
    if not 1 <= devices <= samples:
        raise ValueError(f"{samples} samples cannot be shared among {devices} devices")


def _generator(seed: int, kind: str) -> np.random.Generator:
    return np.random.default_rng(derive(seed, "split", kind))


def iid(labels: Indices, devices: int, seed: int) -> list[Indices]:
    """Share at random; the shares' sizes differ by one at most."""
    _check(len(labels), devices)
    order = _generator(seed, "iid").permutation(len(labels))
    return [np.sort(share) for share in np.array_split(order, devices)]


def balanced(labels: Indices, devices: int, seed: int) -> list[Indices]:
    """Share each class evenly: a class's counts, and the shares' sizes, differ by one at most."""
    _check(len(labels), devices)
    order = _generator(seed, "balanced").permutation(len(labels))
    by_class = order[np.argsort(labels[order], kind="stable")]
    # Dealing the sorted samples out like cards goes on from class to class where the last one stopped.
    return [np.sort(by_class[device::devices]) for device in range(devices)]


def dirichlet(labels: Indices, devices: int, seed: int, alpha: float, least: int = 1) -> list[Indices]:
    """Share each class in proportions drawn from a Dirichlet distribution with concentration ``alpha``.

    A small alpha gives each device few classes, a large one nears `iid`. A device left with fewer than ``least``
    samples is given some of the largest share.
    """
    _check(len(labels), devices)
    if alpha <= 0:
        raise ValueError(f"alpha must be positive, not {alpha}")
    if least * devices > len(labels):
        raise ValueError(f"{len(labels)} samples do not give {devices} devices {least} each")
    generator = _generator(seed, "dirichlet")
    shares: list[list[int]] = [[] for _ in range(devices)]
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        edges = np.cumsum(generator.dirichlet([alpha] * devices))[:-1]
        for share, part in zip(shares, np.split(members, (edges * len(members)).astype(int)), strict=True):
            share.extend(part.tolist())
    for share in shares:
        while len(share) < least:
            share.append(max(shares, key=len).pop())
    return [np.sort(np.array(share, dtype=np.int64)) for share in shares]


def holdout(labels: Indices, fraction: float) -> tuple[Indices, Indices]:
    """Set a fraction of each class aside: (kept, set aside), each in the order of the samples. Always the same."""
    generator = _generator(0, "holdout")
    aside = np.concatenate(
        [
            generator.permutation(members)[: round(fraction * len(members))]
            for members in (np.flatnonzero(labels == label) for label in np.unique(labels))
        ]
    )
    mask = np.zeros(len(labels), dtype=bool)
    mask[aside] = True
    return np.flatnonzero(~mask), np.flatnonzero(mask)
