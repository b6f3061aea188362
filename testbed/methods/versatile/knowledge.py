"""What one device knows of the others, and what it tells along with its casts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from testbed.kits.slots.exchange import Sent
from testbed.kits.slots.messages import Losses, Outputs
from testbed.methods.versatile.arrangement import Arrangement
from testbed.methods.versatile.credibility import Reception
from testbed.methods.versatile.forward import Rates
from testbed.models.slices import Channels
from testbed.network.link import Pair

Record = dict[str, tuple[float, float]]
"""By sender: the share received at the end of a window, and the credibility there."""


@dataclass
class Knowledge:
    """Of one device; it grows with every note that is heard."""

    device: str
    layers: int
    """How many there are, the input layer too."""
    arrangement: Arrangement | None = None
    """The newest; None: it has booted, and waits to be told."""
    stage: int = 0
    """Of the thresholds."""
    rates: dict[tuple[int, int], Rates] = field(default_factory=dict)
    """By layer and number of a batch that was forwarded here: of its way up to that layer."""
    records: dict[str, tuple[int, Record]] = field(default_factory=dict)
    """By receiver: the newest window of which its record is known, and that record."""
    past: dict[int, Arrangement] = field(default_factory=dict)
    """Arrangements by version, for what is still under way."""

    def arrange(self, arrangement: Arrangement) -> None:
        """Take over a newer arrangement."""
        self.arrangement = self.past[arrangement.version] = arrangement

    @property
    def now(self) -> Arrangement:
        """The arrangement, where there is one. Raises ValueError otherwise."""
        if self.arrangement is None:
            raise ValueError(f"{self.device} waits to be told who holds what")
        return self.arrangement

    def holders(self, layer: int) -> Sequence[str]:
        """Return the devices that have neurons of a layer (as a `Placement`)."""
        return tuple(self.now.layers[layer])

    def of(self, device: str, layer: int) -> Channels:
        """Return a device's neurons of a layer (as a `Placement`)."""
        return self.now.of(device, layer)

    def neurons(self, layer: int) -> int:
        """Return how many neurons a layer has (as a `Placement`)."""
        return self.now.sizes[layer]

    def latest(self, window: int) -> dict[Pair, float]:
        """Return the shares received at the end of a window, by sender and receiver, as far as they are known."""
        return {pair: latest for pair, (latest, _) in self._of(window).items()}

    def credibility(self, window: int) -> dict[Pair, float]:
        """Return the credibility at the end of a window, by sender and receiver, as far as it is known."""
        return {pair: value for pair, (_, value) in self._of(window).items()}

    def _of(self, window: int) -> dict[Pair, tuple[float, float]]:
        return {
            (sender, receiver): values
            for receiver, (at, shares) in self.records.items()
            if at == window
            for sender, values in shares.items()
        }


class Telling:
    """The notes of one device's casts (`kits.slots.exchange.Notes`): what it knows."""

    def __init__(self, knowledge: Knowledge, reception: Reception) -> None:
        self._knowledge = knowledge
        self._reception = reception

    def tell(self, layer: int, message: Sent) -> Sent:
        """Return a message with its note."""
        known = self._knowledge
        note: dict[str, Any] = {
            "version": known.now.version,
            "stage": known.stage,
            "records": {name: [window, shares] for name, (window, shares) in known.records.items()},
        }
        if isinstance(message, Outputs):
            note["rates"] = known.rates.pop((message.layer, message.batch), ())
        return replace(message, note=note)

    def hear(self, message: Outputs | Losses) -> Channels | None:
        """Take the note of a message; None where it is of an arrangement that is not known here, or no more."""
        note, known = message.note or {}, self._knowledge
        if message.sender != known.device:
            self._reception.note(message.sender, received=True)
            known.stage = max(known.stage, note["stage"])
            self._learn(note["records"])
        arrangement = known.past.get(note["version"])
        return None if arrangement is None else arrangement.of(message.sender, message.layer)

    def miss(self, sender: str) -> None:
        """Note that a message of a device has not arrived in time."""
        if sender != self._knowledge.device:
            self._reception.note(sender, received=False)

    def _learn(self, records: Mapping[str, Sequence[Any]]) -> None:
        for receiver, (window, shares) in records.items():
            if window > self._knowledge.records.get(receiver, (-1, {}))[0]:
                self._knowledge.records[receiver] = (window, {name: tuple(pair) for name, pair in shares.items()})
