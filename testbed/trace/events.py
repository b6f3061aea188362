"""The events of a run, written by both runtimes and by methods, and the basis of all metrics.

One event is one line of ``events.jsonl``: ``time`` (seconds since the workload started, one clock for the whole run),
``device`` (or "testbed" for actions of the testbed itself), ``event`` and further fields. `EVENTS` lists the events
with a meaning in every run; a method can define further events.

The fields of some events need an explanation. ``start`` is a time like ``time``; all durations are seconds.

- compute: ``busy`` is the time that the host needed, ``deficit`` its excess over the charged time (0 if pacing hides
  it), ``late`` the total lateness caused by the host: the deficit, and late starts and wake-ups.
- host: ``waited`` is the time for which threads of the device, except the computing one, were ready without a
  processor, within the last ``interval``.
- send: ``queued`` is the wait behind earlier messages to the peer, ``duration`` the time from the call to the
  acknowledgement. receive: ``duration`` is the time from the first to the last byte.
- cast: ``start`` is the time when the device's earlier casts had left; ``duration`` includes the wait for a shared
  channel. ``number`` counts a device's casts since its boot. ``cast`` of a receive event is the number of the cast.
- objects: boxes are in shares of the network's input, from its upper left corner.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple

from testbed.network.link import Link

TESTBED = "testbed"
"""The ``device`` of events written by the testbed itself."""


@dataclass(frozen=True)
class EventType:
    """A type of event."""

    name: str
    meaning: str
    keys: tuple[str, ...] | None = ()
    """Keys among ``batch`` and ``micro`` that a fault's ``when`` can match (``step`` and ``request`` count as batch);
    None for events that no fault can wait for."""
    fields: tuple[str, ...] = ()
    """Fields that an event may have in addition to ``time``, ``device`` and ``event``."""
    pause: bool = False
    """Whether work paused before the event, for as long as its field ``seconds``; affected steps are not steady."""


EVENTS = (
    EventType(
        "begin",
        "start of a computation",
        ("batch", "micro"),
        ("span", "batch", "micro"),
    ),
    EventType(
        "compute",
        "end of a computation",
        ("batch", "micro"),
        (
            "span",
            "batch",
            "micro",
            "start",
            "duration",
            "flops",
            "busy",
            "deficit",
            "late",
        ),
    ),
    EventType(
        "send",
        "acknowledgement of a sent message",
        (),
        ("peer", "message", "bytes", "start", "duration", "queued", "encode"),
    ),
    EventType(
        "receive",
        "complete arrival of a message",
        (),
        ("peer", "message", "bytes", "start", "duration", "decode", "cast"),
    ),
    EventType(
        "cast",
        "end of the transmission of a broadcast",
        (),
        ("peers", "message", "bytes", "start", "duration", "number"),
    ),
    EventType(
        "state",
        "state of the program: ready, started, finished, failed or stopped",
        (),
        ("state", "error"),
    ),
    EventType(
        "step", "end of a training step", ("batch",), ("step", "loss", "samples")
    ),
    EventType(
        "left_out",
        "training samples that do not fill a batch of an epoch, and all samples",
        None,
        ("samples", "of"),
    ),
    EventType(
        "evaluate",
        "evaluation on the test data",
        ("batch",),
        ("step", "accuracy", "loss", "metrics"),
    ),
    EventType(
        "diverged",
        "loss or weights of a device (`target`) are not finite",
        ("batch",),
        ("step", "target"),
    ),
    EventType(
        "request", "end of an inference request", ("batch",), ("request", "latency")
    ),
    EventType(
        "failed",
        "failure of an inference request",
        ("batch",),
        ("request", "error", "after"),
    ),
    EventType(
        "objects",
        "objects detected in a sample",
        ("batch",),
        ("request", "sample", "boxes"),
    ),
    EventType("weights", "the program loaded its initial weights"),
    EventType(
        "memory", "new peak memory use, in bytes", (), ("weights", "activations")
    ),
    EventType(
        "recovery",
        (
            "detection of a fault, or resumption after it; methods may record "
            "further phases"
        ),
        ("batch",),
        ("phase", "step", "missing", "partition"),
    ),
    EventType("log", "log message", (), ("text",)),
    EventType(
        "host",
        (
            "time for which the host kept threads of the device waiting, and their "
            "processor time"
        ),
        None,
        ("waited", "interval", "processor", "computing"),
    ),
    EventType(
        "fault",
        ("a fault was injected or reverted; `began` if the device needed time for it"),
        None,
        ("action", "target", "phase", "intended", "began", "detail"),
    ),
    EventType(
        "link",
        "new properties of a link",
        None,
        ("source", "destination", "rate", "delay", "loss", "up"),
    ),
    EventType("speed", "new speed of a device", None, ("target", "factor", "speed")),
    EventType("trace", "change by a link trace", None, ("what", "value", "intended")),
)
"""Event types with a meaning independent of the method. The testbed itself writes those from ``fault`` on."""
_FIELDS_OF_EVENT = {event.name: event.fields for event in EVENTS}

# A field has the same kind of value in all of `EVENTS`. A field that is missing here may have any value.
_NUMBERS = (
    "start duration queued encode decode latency bytes number flops busy deficit late "
    "waited interval processor computing intended began factor delay of weights "
    "activations"
)
# A line has null for a number that is not finite, and a link without a limit has the rate null.
_NUMBERS_OR_NULL = (
    "step request batch micro sample samples cast loss accuracy rate speed after"
)
_TEXTS = "span message peer source destination target state phase action what"
_KINDS_OF_FIELDS: Mapping[str, tuple[str, tuple[type, ...]]] = {
    **dict.fromkeys(_NUMBERS.split(), ("a number", (int, float))),
    **dict.fromkeys(
        _NUMBERS_OR_NULL.split(), ("a number or null", (int, float, NoneType))
    ),
    **dict.fromkeys(_TEXTS.split(), ("a text", (str,))),
    "up": ("true or false", (bool,)),
    "peers": ("a list", (list,)),
    "boxes": ("a list", (list,)),
}
"""Field -> description of its values, and their types after a line has been parsed."""


def find_invalid_field(
    event: str, names: Iterable[str], types: Iterable[type]
) -> str | None:
    """Return an error text for the first field of a parsed event whose value has a wrong type; None if all are valid.

    Only fields that `EVENTS` lists for the event are checked.

    >>> find_invalid_field("step", ["step", "loss"], [int, str])
    "field 'loss' must be a number or null"
    """
    fields = _FIELDS_OF_EVENT.get(event, ())
    for name, actual_type in zip(names, types, strict=True):
        if name not in fields or name not in _KINDS_OF_FIELDS:
            continue
        description, expected_types = _KINDS_OF_FIELDS[name]
        # A boolean counts as a number here, as in Python's arithmetic.
        if not issubclass(actual_type, expected_types):
            return f"field '{name}' must be {description}"
    return None


def link_fields(source: str, destination: str, link: Link) -> dict[str, Any]:
    """Return the fields of a ``link`` event: the fields in `EVENTS`, and other properties with non-default values."""
    fields: dict[str, Any] = {
        "source": source,
        "destination": destination,
        "rate": link.rate,
        "delay": link.delay,
        "loss": link.loss,
        "up": link.up,
    }
    for name, value in link.to_json().items():
        if value != getattr(Link, name):
            fields[name] = value
    return fields


DIGITS = 9
"""Decimal places of an event's seconds in a file, so a file resolves nanoseconds."""
LEADING = ("time", "device", "event")
"""Leading keys of every line in a file."""


def finite(value: Any) -> Any:
    """Return a value with non-finite numbers replaced by None, because JSON lacks infinities and NaN.

    >>> finite({"loss": math.nan, "steps": (1, 2)})
    {'loss': None, 'steps': [1, 2]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def restore_loss(fields: dict[str, Any]) -> None:
    """Restore a NaN loss after JSON has turned NaN into null."""
    if fields.get("loss", 0.0) is None:
        fields["loss"] = math.nan


class _LineEncoder(json.JSONEncoder):
    """JSON encoder writing null for non-finite numbers, which are invalid in JSON."""

    def encode(self, o: Any) -> str:
        # Non-finite numbers are rare, and a search for them in each event would take longer than the encoding.
        try:
            return super().encode(o)
        except ValueError:
            return super().encode(finite(o))


LINES = _LineEncoder(check_circular=False, allow_nan=False)
"""Encoder of event lines."""
_NO_FIELDS: Mapping[str, Any] = {}


# A named tuple, which is created faster than a dataclass: a long run has millions.
class Event(NamedTuple):
    """One line of the run's log.

    >>> Event(1.5, "worker1", "step", {"step": 3, "loss": 0.25}).to_json()
    '{"time": 1.5, "device": "worker1", "event": "step", "step": 3, "loss": 0.25}'
    """

    time: float
    device: str
    event: str
    fields: Mapping[str, Any] = _NO_FIELDS

    def to_json(self) -> str:
        """Return the event as a line without a line end."""
        written = {
            "time": round(self.time, DIGITS),
            "device": self.device,
            "event": self.event,
            **self.fields,
        }
        return LINES.encode(written)

    @staticmethod
    def from_json(line: str) -> Event:
        """Parse a line written by `to_json`."""
        return Event.from_fields(json.loads(line))

    @staticmethod
    def from_fields(fields: dict[str, Any]) -> Event:
        """Build an event from all fields of a line; the mapping is changed and becomes part of the event.

        Raises KeyError, TypeError or AttributeError for invalid fields.
        """
        restore_loss(fields)
        return Event(
            fields.pop("time"), fields.pop("device"), fields.pop("event"), fields
        )
