"""The events of a run: what both runtimes and every method write, and everything later is computed from.

One event is one line of ``events.jsonl``: ``time`` (seconds since the workload started, one clock for the whole
run), ``device`` (or "testbed" for what the testbed itself did), ``event`` and further fields:

=========== ========================================================================= ====================
``start`` is a ``time``; all durations are seconds. For compute, ``busy`` is what the host really needed, ``deficit``
by how much that exceeded the charged time (0 when the pacing could hide it), ``late`` by how much the host made the
work late in all: the deficit, and what it began or woke up too late. For host, ``waited`` is how long threads of the
device, but for the one that computes, were ready and had no processor, in the last ``interval``. For send, ``queued``
is the wait behind earlier messages to that peer, ``duration`` runs from the call to the acknowledgement; for receive,
from the first to the last byte. A cast's ``start`` is when the device's casts before it had left; ``duration`` holds
the wait for a shared channel. ``number`` counts a device's casts since it booted; ``cast`` is that of the one
received. Boxes are in shares of the network's input, from its upper left corner.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from testbed.network.link import Link

TESTBED = "testbed"
"""The ``device`` of events that no device wrote."""


def link_fields(source: str, destination: str, link: Link) -> dict[str, Any]:
    """Return the fields of a ``link`` event: those that any link has, and what else there is to say of this one."""
    plain = {"rate": link.rate, "delay": link.delay, "loss": link.loss, "up": link.up}
    others = {name: value for name, value in link.to_json().items() if value != getattr(Link, name)}
    return {"source": source, "destination": destination, **plain, **others}


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the run's log."""

    time: float
    device: str
    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the line, without its end."""
        return json.dumps({"time": round(self.time, 9), "device": self.device, "event": self.event, **self.fields})

    @staticmethod
    def from_json(line: str) -> Event:
        """Read a line that `to_json` wrote."""
        fields = json.loads(line)
        return Event(fields.pop("time"), fields.pop("device"), fields.pop("event"), fields)
