"""The events of a run: what both runtimes and every method write, and everything later is computed from.

One event is one line of ``events.jsonl``: ``time`` (seconds since the workload started, one clock for the whole
run), ``device`` (or "testbed" for what the testbed itself did), ``event`` and further fields.
`EVENTS` lists those that mean something in every run; a method declares its own.

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
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from testbed.network.link import Link

TESTBED = "testbed"
"""The ``device`` of events that no device wrote."""


@dataclass(frozen=True)
class EventType:
    """An event that runs have."""

    name: str
    meaning: str
    keys: tuple[str, ...] | None = ()
    """Those of ``batch`` and ``micro`` that a fault's ``when`` can match, an event's ``step`` or ``request`` being its
    batch; None: no fault can wait for it."""
    fields: tuple[str, ...] = ()
    """Those that it may have."""
    pause: bool = False
    """Whether work stood still for the event's ``seconds`` until then: such steps are not steady."""


EVENTS = (
    EventType("begin", "a computation starts", ("batch", "micro"), ("span", "batch", "micro")),
    EventType(
        "compute",
        "a computation has ended",
        ("batch", "micro"),
        ("span", "batch", "micro", "start", "duration", "flops", "busy", "deficit", "late"),
    ),
    EventType(
        "send",
        "a message was acknowledged",
        (),
        ("peer", "message", "bytes", "start", "duration", "queued", "encode"),
    ),
    EventType(
        "receive",
        "a message is fully there",
        (),
        ("peer", "message", "bytes", "start", "duration", "decode", "cast"),
    ),
    EventType("cast", "a cast has left", (), ("peers", "message", "bytes", "start", "duration", "number")),
    EventType("state", "the program is up, started, finished, failed or stopped", (), ("state", "error")),
    EventType("step", "a training step is done", ("batch",), ("step", "loss", "samples")),
    EventType("left_out", "training samples, of all, that make no whole batch of an epoch", None, ("samples", "of")),
    EventType("evaluate", "the model was tried on the test data", ("batch",), ("step", "accuracy", "loss", "metrics")),
    EventType(
        "diverged",
        "the loss or the weights that a device (`target`) sent are not finite numbers",
        ("batch",),
        ("step", "target"),
    ),
    EventType("request", "an inference is done", ("batch",), ("request", "latency")),
    EventType("failed", "an inference was given up", ("batch",), ("request", "error", "after")),
    EventType("objects", "objects were found in a sample", ("batch",), ("request", "sample", "boxes")),
    EventType("weights", "the program took the weights that it was given to begin with"),
    EventType("memory", "the device holds more than ever before, in bytes", (), ("weights", "activations")),
    EventType(
        "recovery",
        "a fault was detected, or work resumed after it; a method may record further phases",
        ("batch",),
        ("phase", "step", "missing", "partition"),
    ),
    EventType("log", "somebody has something to say", (), ("text",)),
    EventType(
        "host",
        "for how long the host kept the device's threads waiting, and the processor time that these took",
        None,
        ("waited", "interval", "processor", "computing"),
    ),
    EventType(
        "fault",
        "a fault struck or was undone; `began` where the device took its time for it",
        None,
        ("action", "target", "phase", "intended", "began", "detail"),
    ),
    EventType("link", "a link has other figures", None, ("source", "destination", "rate", "delay", "loss", "up")),
    EventType("speed", "a device has another speed", None, ("target", "factor", "speed")),
    EventType("trace", "a trace changed something", None, ("what", "value", "intended")),
)
"""Events with a meaning whatever the method. The last ones are the testbed's own."""


def link_fields(source: str, destination: str, link: Link) -> dict[str, Any]:
    """Return the fields of a ``link`` event: those that any link has, and what else there is to say of this one."""
    plain = {"rate": link.rate, "delay": link.delay, "loss": link.loss, "up": link.up}
    others = {name: value for name, value in link.to_json().items() if value != getattr(Link, name)}
    return {"source": source, "destination": destination, **plain, **others}


DIGITS = 9
"""Decimal places of an event's seconds in a file."""
LEADING = ("time", "device", "event")
"""Keys that every line of a file begins with."""


def finite(value: Any) -> Any:
    """Return the same value with None for numbers that JSON does not know: a diverged loss is no number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def restore_loss(fields: dict[str, Any]) -> None:
    """Make the loss of a line that was read NaN where it is null: the line could not hold it."""
    if fields.get("loss", 0.0) is None:
        fields["loss"] = math.nan


class _LineEncoder(json.JSONEncoder):
    """Writes null for numbers that are not finite: every line is valid JSON."""

    def encode(self, o: Any) -> str:
        try:
            return super().encode(o)
        except ValueError:
            return super().encode(finite(o))


LINES = _LineEncoder(check_circular=False, allow_nan=False)
"""Writes what stands in a line."""
_NONE: Mapping[str, Any] = {}


class Event(NamedTuple):  # of which a long run has millions: made faster than a dataclass
    """One line of the run's log."""

    time: float
    device: str
    event: str
    fields: Mapping[str, Any] = _NONE

    def to_json(self) -> str:
        """Return the line, without its end."""
        written = {"time": round(self.time, DIGITS), "device": self.device, "event": self.event, **self.fields}
        return LINES.encode(written)

    @staticmethod
    def from_json(line: str) -> Event:
        """Read a line that `to_json` wrote."""
        return Event.from_fields(json.loads(line))

    @staticmethod
    def from_fields(fields: dict[str, Any]) -> Event:
        """Return the event of a line that was read; ``fields`` are left without what is not the event's own.

        Raises KeyError, TypeError or AttributeError for what is no event.
        """
        restore_loss(fields)
        return Event(fields.pop("time"), fields.pop("device"), fields.pop("event"), fields)
