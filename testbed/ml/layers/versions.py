"""State of a module for batches under way: versions of its weights, and pending updates of its statistics.

In asynchronous training several batches are between forward and backward while weights change. PipeDream's weight
stashing needs the weights of a forward again in its backward, so a stage keeps a version for each of these batches.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from testbed.ml.lazy import torch


class Versions:
    """Numbered sets of a module's trained parameters; the module computes with one set at a time.

    Autograd's graph of a forward references the set used in the forward, so the backward needs no module. A kept set is
    never modified; if only the newest set is kept, updates happen in place without copies.

    >>> versions = Versions(torch.nn.Linear(2, 1))
    >>> following = versions.begin_next(oldest_needed=0)
    >>> versions.newest, len(versions)
    (1, 2)
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.newest = 0
        trained = {}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                trained[name] = parameter
        self._sets = {0: trained}
        # Weights that a user shares between two places have two names there, and one here.
        names = {}
        for name, parameter in trained.items():
            names[parameter] = name
        self._places: list[tuple[str, torch.nn.Module, str]] = []
        """Name of a parameter, and a module with the attribute that holds the parameter."""
        for part in module.modules():
            for attribute, weight in part._parameters.items():
                if weight is not None and weight.requires_grad:
                    self._places.append((names[weight], part, attribute))

    def __len__(self) -> int:
        return len(self._sets)

    def __getitem__(self, version: int) -> dict[str, torch.nn.Parameter]:
        """Return the parameters of a kept version."""
        return self._sets[version]

    @property
    def latest(self) -> dict[str, torch.nn.Parameter]:
        """The newest version's parameters."""
        return self._sets[self.newest]

    def use(self, version: int) -> None:
        """Make the module compute with a version."""
        self.put(self._sets[version])

    def put(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Make the module compute with these parameters."""
        for name, part, attribute in self._places:
            part._parameters[attribute] = parameters[name]

    def restart(self, number: int) -> None:
        """Forget all versions but the newest, and give the newest the number ``number``."""
        self._sets = {number: self.latest}
        self.newest = number

    def begin_next(self, oldest_needed: int) -> dict[str, torch.nn.Parameter]:
        """Return the parameters of the next version: a copy of the newest, or the newest itself if no longer needed."""
        following = self.latest
        if self.newest >= oldest_needed:
            following = {}
            for name, value in self.latest.items():
                copied = value.detach().clone()
                following[name] = torch.nn.Parameter(copied)
        self.newest += 1
        self._sets[self.newest] = following
        return following

    def forget(self, oldest_needed: int) -> None:
        """Free the versions before ``oldest_needed``, except the newest."""
        oldest_kept = min(oldest_needed, self.newest)
        for version in list(self._sets):
            if version < oldest_kept:
                del self._sets[version]

    def aggregate(self, count: int) -> None:
        """Replace the newest version by the mean of the last ``count`` versions."""
        last_versions = []
        # From the newest backwards: the order decides how the sums of the mean are rounded.
        for back in range(count):
            last_versions.append(self._sets[self.newest - back])
        means = mean(last_versions)
        with torch.no_grad():
            for name, parameter in self.latest.items():
                parameter.copy_(means[name])


def mean(versions: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the mean of several versions of a stage's trained weights: FTPipeHD's weight aggregation.

    Stage i of n averages its last n - i versions (Section III-C), and `is_aggregation_due` of
    `testbed.ml.schedule.versions` decides when. Only trained weights have versions: momentum and the running statistics
    of batch normalisation exist once and follow every batch, so they are not averaged. Raises ValueError for versions
    of different units.

    >>> mean([{"bias": torch.tensor([1.0])}, {"bias": torch.tensor([2.0])}])
    {'bias': tensor([1.5000])}
    """
    names = list(versions[0])
    if any(list(version) != names for version in versions):
        raise ValueError("versions of different units have no mean")
    means = {}
    for name in names:
        tensors = [version[name] for version in versions]
        means[name] = torch.stack(tensors).mean(0)
    return means


_AVERAGES = ("running_mean", "running_var")
_BUFFERS = (*_AVERAGES, "num_batches_tracked")
"""Running averages of a normalisation, and the number of batches in them."""

Buffers = dict[str, "torch.Tensor | None"]
"""Buffers of a normalisation by name; torch allows None for each."""


class Statistics:
    """Holds back the contribution of a forward to the running statistics until its batch is done.

    A forward normalises by its own batch and only adds to the running averages: r = (1 - m) r + m x, for the momentum m
    and the statistics x of the batch. Here a forward runs on averages of zero, which leaves m x in them, and `apply`
    adds m x to (1 - m) r, in the order of the backwards. Without a momentum, m is one over the number of batches so
    far, which was one in that forward.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        from torch.nn.modules.batchnorm import _NormBase

        self._normalisations: list[_NormBase] = []
        for part in module.modules():
            if isinstance(part, _NormBase) and part.running_mean is not None:
                self._normalisations.append(part)
        self._aside: dict[Hashable, list[Buffers]] = {}
        """The contributions of forwards by key, one for each normalisation in order."""

    @contextmanager
    def set_aside(self, key: Hashable) -> Iterator[None]:
        """Context for a forward: the running statistics stay unchanged, and the contribution is kept under ``key``."""
        lasting = []
        for part in self._normalisations:
            buffers = _buffers_of(part)
            lasting.append(buffers)
            for name, value in buffers.items():
                if value is not None:
                    part._buffers[name] = torch.zeros_like(value)
        yield
        contributions: list[Buffers] = []
        for part, buffers in zip(self._normalisations, lasting, strict=True):
            contributions.append(_buffers_of(part))
            part._buffers.update(buffers)
        self._aside[key] = contributions

    def apply(self, key: Hashable) -> None:
        """Add the contribution of the forward with this key to the running statistics."""
        contributions = self._aside.pop(key)
        for part, added in zip(self._normalisations, contributions, strict=True):
            count = added["num_batches_tracked"]
            assert part.num_batches_tracked is not None
            assert count is not None
            part.num_batches_tracked.add_(count)
            if part.momentum is None:
                # A cumulative average: the forward, a first batch for itself, added the whole of x.
                weight = 1 / int(part.num_batches_tracked)
                keep = 1 - weight
            else:
                # The forward added m x already.
                weight = 1.0
                keep = 1 - part.momentum
            for name in _AVERAGES:
                buffer = part._buffers[name]
                contribution = added[name]
                assert buffer is not None
                assert contribution is not None
                buffer.mul_(keep).add_(contribution, alpha=weight)

    def drop(self, key: Hashable) -> None:
        """Drop the contribution of the forward with a key."""
        del self._aside[key]

    def clear(self) -> None:
        """Drop all pending contributions, because their batches are repeated."""
        self._aside.clear()


def _buffers_of(part: torch.nn.Module) -> Buffers:
    """Return the buffers of a normalisation, without a copy."""
    buffers = {}
    for name in _BUFFERS:
        buffers[name] = part._buffers[name]
    return buffers
