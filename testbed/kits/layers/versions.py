"""The trained weights of a module after each of the last updates, as long as they are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from testbed.common.lazy import torch


class Versions:
    """Numbered sets of a module's parameters; the module computes with one of them at a time.

    What a forward has computed holds on to the set that it used, so its backward needs no module. A set that is kept is
    never written to; where only the newest is kept, updates happen in place and nothing is copied.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.newest = 0
        self._sets = {0: dict(module.named_parameters())}
        # Weights that a user shares between two places have two names there, and one here.
        names = {parameter: name for name, parameter in self._sets[0].items()}
        self._places = [
            (names[parameter], part, attribute)
            for part in module.modules()
            for attribute, parameter in part._parameters.items()
            if parameter is not None
        ]

    def __len__(self) -> int:
        return len(self._sets)

    def __getitem__(self, version: int) -> dict[str, torch.nn.Parameter]:
        """Return the parameters of a version that is kept."""
        return self._sets[version]

    @property
    def latest(self) -> dict[str, torch.nn.Parameter]:
        """The newest version's parameters."""
        return self._sets[self.newest]

    def use(self, version: int) -> None:
        """Let the module compute with a version from now on."""
        self.put(self._sets[version])

    def put(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Let the module compute with these."""
        for name, part, attribute in self._places:
            part._parameters[attribute] = parameters[name]

    def restart(self, number: int) -> None:
        """Forget all versions but the newest, and call it by this number."""
        self._sets = {number: self.latest}
        self.newest = number

    def begin_next(self, oldest_needed: int) -> dict[str, torch.nn.Parameter]:
        """Return the next version's parameters, equal to the newest's and to be changed in place.

        Where the newest is needed no more, they are the same ones.
        """
        before = self.latest
        if self.newest >= oldest_needed:
            following = {name: torch.nn.Parameter(value.detach().clone()) for name, value in before.items()}
        else:
            following = before
        self.newest += 1
        self._sets[self.newest] = following
        return following

    def forget(self, oldest_needed: int) -> None:
        """Free the versions before this one; the newest stays."""
        for version in [number for number in self._sets if number < min(oldest_needed, self.newest)]:
            del self._sets[version]

    def aggregate(self, count: int) -> None:
        """Put the mean of the last ``count`` versions in the newest one's place."""
        means = mean([self._sets[self.newest - back] for back in range(count)])
        with torch.no_grad():
            for name, parameter in self.latest.items():
                parameter.copy_(means[name])


def mean(versions: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the mean of the last n - i versions of a stage's trained weights: what replaces the newest.

    Only trained weights have versions. Momentum and the running statistics of batch normalisation are one for all and
    follow every batch, so there is nothing to average in them. See `testbed.schedule.versions.aggregates` for when.
    Raises ValueError for versions of different units.
    """
    names = list(versions[0])
    if any(list(version) != names for version in versions):
        raise ValueError("versions of different units have no mean")
    return {name: torch.stack([version[name] for version in versions]).mean(0) for name in names}
