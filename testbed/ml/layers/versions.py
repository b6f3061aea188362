"""State of a module in asynchronous training: versions of its weights, and pending updates of its running statistics.

In asynchronous training several batches are between forward and backward while weights change. PipeDream's weight
stashing needs the weights of a forward again in its backward, so a stage keeps a version for each of these batches.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from testbed.ml.lazy import torch


class Versions:
    """Numbered sets of a module's trained parameters (versions); the module computes with one set at a time.

    Autograd's graph of a forward references the parameters used in the forward, so a backward does not depend on the
    set that the module uses by then. A stored version is never modified; if only the newest version is needed, updates
    happen in place without copies.

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
        # A weight shared by two submodules is an attribute of both, with one name here.
        names = {}
        for name, parameter in trained.items():
            names[parameter] = name
        self._attributes: list[tuple[str, torch.nn.Module, str]] = []
        """Name of a parameter, a submodule that holds the parameter, and its attribute there."""
        for submodule in module.modules():
            for attribute, weight in submodule._parameters.items():
                if weight is not None and weight.requires_grad:
                    self._attributes.append((names[weight], submodule, attribute))

    def __len__(self) -> int:
        return len(self._sets)

    def __getitem__(self, version: int) -> dict[str, torch.nn.Parameter]:
        """Return the parameters of a stored version; raises KeyError for a freed one."""
        return self._sets[version]

    @property
    def newest_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters of the newest version, by name."""
        return self._sets[self.newest]

    def use(self, version: int) -> None:
        """Make the module compute with a stored version."""
        self.use_parameters(self._sets[version])

    def use_parameters(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Make the module compute with parameters that may belong to no version, such as moving averages."""
        for name, submodule, attribute in self._attributes:
            submodule._parameters[attribute] = parameters[name]

    def restart(self, number: int) -> None:
        """Free all versions but the newest, and renumber the newest as ``number``."""
        self._sets = {number: self.newest_parameters}
        self.newest = number

    def begin_next(self, oldest_needed: int) -> dict[str, torch.nn.Parameter]:
        """Add the next version and return its parameters, for an update in place.

        They are a copy of the newest version's if versions from ``oldest_needed`` on include it, otherwise the same
        objects.
        """
        next_parameters = self.newest_parameters
        if self.newest >= oldest_needed:
            next_parameters = {}
            for name, parameter in self.newest_parameters.items():
                copied = parameter.detach().clone()
                next_parameters[name] = torch.nn.Parameter(copied)
        self.newest += 1
        self._sets[self.newest] = next_parameters
        return next_parameters

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
            for name, parameter in self.newest_parameters.items():
                parameter.copy_(means[name])


def mean(versions: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the mean of several versions of a stage's trained weights: FTPipeHD's weight aggregation.

    Stage i of n averages its last n - i versions (FTPipeHD, Section III-C), and `is_aggregation_due` of
    `testbed.ml.schedule.versions` decides when. Only trained weights have versions: momentum and the running statistics
    of batch normalisation exist once and include every batch, so they are not averaged. Raises ValueError for versions
    of different units.

    >>> mean([{"bias": torch.tensor([1.0])}, {"bias": torch.tensor([2.0])}])
    {'bias': tensor([1.5000])}
    """
    names = list(versions[0])
    if any(list(version) != names for version in versions):
        raise ValueError("versions to be averaged must have the same units")
    means = {}
    for name in names:
        tensors = [version[name] for version in versions]
        means[name] = torch.stack(tensors).mean(0)
    return means


_AVERAGES = ("running_mean", "running_var")
"""Running averages of a normalisation."""
_BUFFERS = (*_AVERAGES, "num_batches_tracked")
"""All running statistics of a normalisation: the averages, and the number of batches in them."""

Buffers = dict[str, "torch.Tensor | None"]
"""Buffers of a normalisation by name; torch allows None for each."""


class Statistics:
    """Delays the contribution of each forward to the running statistics until the backward of the same batch is done.

    In training, a forward normalises by the statistics x of its own batch. It only writes the running averages r,
    r = (1 - m) r + m x for the momentum m, and does not read them. Here a forward therefore runs with r = 0, so that
    m x remains in its buffers, and `apply` later adds m x to (1 - m) r, in the order of the backwards. Without a
    momentum, m is one over the number of batches so far; with the counter at zero as well, this is 1 in every forward.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        from torch.nn.modules.batchnorm import _NormBase

        self._normalisations: list[_NormBase] = []
        for submodule in module.modules():
            if isinstance(submodule, _NormBase) and submodule.running_mean is not None:
                self._normalisations.append(submodule)
        self._contributions: dict[Hashable, list[Buffers]] = {}
        """The pending contributions of forwards by key, one for each normalisation in order."""

    @contextmanager
    def set_aside(self, key: Hashable) -> Iterator[None]:
        """Context for a forward: the running statistics stay unchanged, and the contribution is stored by ``key``."""
        statistics = []
        for normalisation in self._normalisations:
            buffers = _buffers_of(normalisation)
            statistics.append(buffers)
            for name, value in buffers.items():
                if value is not None:
                    normalisation._buffers[name] = torch.zeros_like(value)
        yield
        contributions: list[Buffers] = []
        for normalisation, buffers in zip(
            self._normalisations, statistics, strict=True
        ):
            contributions.append(_buffers_of(normalisation))
            normalisation._buffers.update(buffers)
        self._contributions[key] = contributions

    def apply(self, key: Hashable) -> None:
        """Add the contribution of the forward with this key to the running statistics."""
        contributions = self._contributions.pop(key)
        for normalisation, contribution in zip(
            self._normalisations, contributions, strict=True
        ):
            _add_contribution(normalisation, contribution)

    def drop(self, key: Hashable) -> None:
        """Drop the contribution of the forward with this key."""
        del self._contributions[key]

    def clear(self) -> None:
        """Drop all pending contributions, because their batches are repeated."""
        self._contributions.clear()


def _buffers_of(normalisation: torch.nn.Module) -> Buffers:
    """Return the running statistics of a normalisation, without a copy."""
    buffers = {}
    for name in _BUFFERS:
        buffers[name] = normalisation._buffers[name]
    return buffers


def _add_contribution(normalisation: Any, contribution: Buffers) -> None:
    """Add m x of a forward to the running averages r, as `Statistics` describes."""
    batches = contribution["num_batches_tracked"]
    assert batches is not None
    normalisation.num_batches_tracked.add_(batches)
    if normalisation.momentum is None:
        # A cumulative average: the contribution is x itself, since m was 1 in the forward.
        weight = 1 / int(normalisation.num_batches_tracked)
        share_of_old = 1 - weight
    else:
        # The contribution contains the factor m already.
        weight = 1.0
        share_of_old = 1 - normalisation.momentum
    for name in _AVERAGES:
        average = normalisation._buffers[name]
        added = contribution[name]
        average.mul_(share_of_old).add_(added, alpha=weight)
