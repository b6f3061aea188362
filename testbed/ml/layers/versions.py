"""State of a module for batches under way: versions of its weights, and pending updates of its statistics."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from testbed.ml.lazy import torch


class Versions:
    """Numbered sets of a module's trained parameters; the module computes with one set at a time.

    A forward's graph references the set it used, so its backward needs no module. A kept set is never modified; if only
    the newest set is kept, updates happen in place without copies.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.newest = 0
        trained = {}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                trained[name] = parameter
        self._sets = {0: trained}
        # Weights that a user shares between two places have two names there, and one here.
        names = {parameter: name for name, parameter in trained.items()}
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
        """Forget all versions but the newest, and give the newest this number."""
        self._sets = {number: self.latest}
        self.newest = number

    def begin_next(self, oldest_needed: int) -> dict[str, torch.nn.Parameter]:
        """Return the parameters of the next version: a copy of the newest, or the newest itself if no longer needed."""
        following = self.latest
        if self.newest >= oldest_needed:
            following = {}
            for name, value in self.latest.items():
                following[name] = torch.nn.Parameter(value.detach().clone())
        self.newest += 1
        self._sets[self.newest] = following
        return following

    def forget(self, oldest_needed: int) -> None:
        """Free the versions before this one, except the newest."""
        for version in list(self._sets):
            if version < min(oldest_needed, self.newest):
                del self._sets[version]

    def aggregate(self, count: int) -> None:
        """Replace the newest version by the mean of the last ``count`` versions."""
        last_versions = [self._sets[self.newest - back] for back in range(count)]
        means = mean(last_versions)
        with torch.no_grad():
            for name, parameter in self.latest.items():
                parameter.copy_(means[name])


def mean(versions: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the mean of the last n - i versions of a stage's trained weights, the replacement of the newest.

    Only trained weights have versions. Momentum and the running statistics of batch normalisation exist once and follow
    every batch, so they are not averaged. `testbed.ml.schedule.versions.is_aggregation_due` decides when.
    Raises ValueError for versions of different units.

    >>> mean([{"bias": torch.tensor([1.0])}, {"bias": torch.tensor([2.0])}])
    {'bias': tensor([1.5000])}
    """
    names = list(versions[0])
    if any(list(version) != names for version in versions):
        raise ValueError("versions of different units have no mean")
    means = {}
    for name in names:
        stacked = torch.stack([version[name] for version in versions])
        means[name] = stacked.mean(0)
    return means


_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class Statistics:
    """Holds back a forward's contribution to the running statistics until its batch is done.

    A forward normalises by its own batch and only adds to the running averages, r = (1 - m) r + m x. The forward runs
    on averages of zero, which leaves m x in them; `apply` adds the rest, in the order of the backwards. Without a
    momentum, m is one over the number of batches so far, which was one in that forward.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        from torch.nn.modules.batchnorm import _NormBase

        self._normalisations: list[_NormBase] = []
        for part in module.modules():
            if isinstance(part, _NormBase) and part.running_mean is not None:
                self._normalisations.append(part)
        self._aside: dict[Hashable, list[dict[str, torch.Tensor]]] = {}
        """The contributions of forwards, for each normalisation in order."""

    @contextmanager
    def set_aside(self, key: Hashable) -> Iterator[None]:
        """Context for the forward of this key."""
        lasting = []
        for part in self._normalisations:
            buffers = {name: part._buffers[name] for name in _BUFFERS}
            lasting.append(buffers)
            for name, value in buffers.items():
                if value is not None:
                    part._buffers[name] = torch.zeros_like(value)
        yield
        contributions: list[dict[str, torch.Tensor]] = []
        for part, buffers in zip(self._normalisations, lasting, strict=True):
            contributions.append({name: part._buffers[name] for name in _BUFFERS})  # type: ignore[misc]
            part._buffers.update(buffers)
        self._aside[key] = contributions

    def apply(self, key: Hashable) -> None:
        """Apply the contribution of this key's forward."""
        for part, added in zip(self._normalisations, self._aside.pop(key), strict=True):
            assert part.num_batches_tracked is not None
            part.num_batches_tracked.add_(added["num_batches_tracked"])
            if part.momentum is None:
                # A cumulative average: the forward, a first batch for itself, added the whole of x.
                weight = 1 / int(part.num_batches_tracked)
                keep = 1 - weight
            else:
                # The forward added m x already.
                weight = 1.0
                keep = 1 - part.momentum
            for name in ("running_mean", "running_var"):
                buffer = part._buffers[name]
                assert buffer is not None
                buffer.mul_(keep).add_(added[name], alpha=weight)

    def drop(self, key: Hashable) -> None:
        """Drop the contribution of this key's forward."""
        del self._aside[key]

    def clear(self) -> None:
        """Drop all pending contributions, because their batches are repeated."""
        self._aside.clear()
