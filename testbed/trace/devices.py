"""What each device spent its time on.

``compute``, ``send`` and ``receive`` are each a union of intervals and may overlap one another; ``communicate`` is
sending or receiving while not computing; ``idle`` is what none of them and no outage covers, so compute + communicate +
down + idle is the duration.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from statistics import fmean
from typing import Any

from testbed.common.formats import FigureKind
from testbed.trace.events import Event
from testbed.trace.figures import Figure
from testbed.trace.gantt import Bar
from testbed.trace.host import deficit, late, waited
from testbed.trace.intervals import Interval, clip, subtract, total, union
from testbed.trace.record import Record

_SPENT = ("compute", "send", "receive", "communicate", "down", "idle")
OF_DEVICES: dict[str, FigureKind] = {
    **dict.fromkeys([*_SPENT, "busy", "deficit"], "seconds"),
    **dict.fromkeys([*(f"{name}_share" for name in _SPENT), "deficit_share", "waited_share"], "share"),
    **dict.fromkeys(["bytes_sent", "bytes_received", "weights", "activations"], "bytes"),
    **dict.fromkeys(["messages_sent", "messages_received", "flops", "energy"], "number"),
}
"""The figures of one device, named as ``devices.<device>.<figure>``."""


def devices(record: Record) -> dict[str, dict[str, Any]]:
    """Return one row per device of the experiment, by name.

    ``<activity>`` in seconds and ``<activity>_share`` of the duration, traffic, ``flops``, ``busy`` and ``deficit`` of
    the host; ``deficit_share`` and ``waited_share`` of the steady phase; bytes of ``weights`` and most ``activations``
    where the method says.
    """
    own: dict[str, list[Event]] = defaultdict(list)
    for event in record.outcome.events:
        own[event.device].append(event)
    table = {}
    for spec in record.experiment.devices:
        row: dict[str, Any] = {"profile": spec.profile, "speed": spec.speed}
        if held := record.plan.of(spec.name):
            row["units"] = [end for piece in held for end in (piece.first, piece.last)]
        row |= _activity(record.bars.get(spec.name, ()), record.end)
        row |= _work(own[spec.name])
        if (energy := spec.joules(record.end - row["down"], row["compute"])) is not None:
            row["energy"] = energy
        # A processor that is late is so beside others that are not.
        row["deficit_share"] = _share(deficit(own[spec.name], record.phase) / spec.processors, record.phase)
        row["waited_share"] = _share(waited(own[spec.name], record.phase), record.phase)
        table[spec.name] = row
    return table


def _intervals(charted: Iterable[Bar], kind: str, end: float) -> list[Interval]:
    return union(clip(((bar.start, bar.end) for bar in charted if bar.kind == kind), 0.0, end))


def _activity(charted: Collection[Bar], end: float) -> dict[str, float]:
    compute, send, receive, down = (_intervals(charted, kind, end) for kind in ("compute", "send", "receive", "down"))
    # What a dead device was said to do (a send that was retried meanwhile, say) is not activity.
    compute, send, receive = (subtract(part, down) for part in (compute, send, receive))
    communicate = subtract([*send, *receive], compute)
    idle = subtract([(0.0, end)], [*compute, *send, *receive, *down])
    parts = {"compute": compute, "send": send, "receive": receive, "communicate": communicate, "down": down}
    seconds = {name: total(part) for name, part in {**parts, "idle": idle}.items()}
    shares = {f"{name}_share": value / end if end > 0 else 0.0 for name, value in seconds.items()}
    return seconds | shares


def _work(own: Sequence[Event]) -> dict[str, Any]:
    computed = [event.fields for event in own if event.event == "compute"]
    sent = [event.fields for event in own if event.event in ("send", "cast")]
    received = [event.fields for event in own if event.event == "receive"]
    resident = [event.fields for event in own if event.event == "memory"][-1:]
    return {
        **{name: fields[name] for fields in resident for name in ("weights", "activations")},
        "messages_sent": len(sent),
        "bytes_sent": sum(fields.get("bytes", 0) for fields in sent),
        "messages_received": len(received),
        "bytes_received": sum(fields.get("bytes", 0) for fields in received),
        "flops": sum(fields.get("flops", 0.0) for fields in computed),
        "busy": sum(fields.get("busy", 0.0) for fields in computed),
        "deficit": sum(late(fields) for fields in computed),
    }


def _share(seconds: float, phase: Sequence[Interval]) -> float:
    return seconds / total(phase) if total(phase) > 0 else 0.0


def _mean(key: str, record: Record) -> float | None:
    used = [row[key] for name, row in record.once(devices).items() if name in record.plan.devices]
    return fmean(used) if used else None


def _energy(record: Record) -> float | None:
    rows = record.once(devices).values()
    found = [row["energy"] for row in rows if "energy" in row]
    return sum(found) if len(found) == len(rows) else None


FIGURES = (
    Figure(
        "energy",
        "number",
        "joules of all devices: idle watts x time up + (busy - idle watts) x time computing; where all have watts",
        _energy,
        compared=True,
    ),
    Figure(
        "compute_share",
        "share",
        "of the duration, mean over the devices of the plan",
        lambda record: _mean("compute_share", record),
        compared=True,
    ),
    Figure(
        "idle_share",
        "share",
        "of the duration, mean over the devices of the plan",
        lambda record: _mean("idle_share", record),
        compared=True,
    ),
    Figure(
        "compute_deficit",
        "seconds",
        "by which the host made computations late, over all devices",
        lambda record: sum(row["deficit"] for row in record.once(devices).values()),
    ),
    Figure(
        "deficit_share",
        "share",
        "of the undisturbed steps' time, of the worst device",
        lambda record: max((row["deficit_share"] for row in record.once(devices).values()), default=0.0),
    ),
)
