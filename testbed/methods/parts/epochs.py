"""Numbered epochs of a configuration, changed in two steps: prepared by everybody, then committed by the central node.

An epoch is one partition over certain devices from one state on. Between the two steps a device still serves its units
of the old epoch to those who fetch them, but the old epoch's training is over: nothing of it may be applied any more.
Numbers only rise; a device that starts anew begins with none, so nothing older than its first configuration is ever
meant for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Fate = Literal["take", "keep", "refuse"]


@dataclass(frozen=True)
class Epochs:
    """Where one device stands."""

    committed: int = 0
    """The epoch it trains in, or has last trained in."""
    prepared: int | None = None
    """The epoch whose units it fetches."""

    @property
    def newest(self) -> int:
        """The highest epoch heard of."""
        return self.committed if self.prepared is None else self.prepared

    def prepare(self, epoch: int) -> Epochs | None:
        """Return where it stands once told to prepare an epoch; None where it must not follow: the order is old.

        The same order a second time, or one for a higher epoch while this one is prepared (a worker died meanwhile),
        is followed.
        """
        if epoch <= self.committed or epoch < self.newest:
            return None
        return replace(self, prepared=epoch)

    def commit(self, epoch: int) -> Epochs | None:
        """Return where it stands once an epoch is committed; None where that is not the epoch it has prepared."""
        return Epochs(epoch) if epoch == self.prepared else None

    def fate(self, epoch: int) -> Fate:
        """Say what to do with a training message of an epoch.

        ``take`` one of the epoch that it trains in; ``keep`` until the commit one of an epoch that it prepares or has
        not heard of yet (a neighbour was told earlier); ``refuse`` everything older, also once another is prepared.
        """
        if self.prepared is None and epoch == self.committed and epoch > 0:
            return "take"
        return "keep" if epoch >= self.newest and epoch > self.committed else "refuse"
