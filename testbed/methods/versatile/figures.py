"""What VersatileFL tells of its runs beside what EdgePipe does."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from testbed.methods.edgepipe.figures import DECLARED as EDGEPIPE
from testbed.trace.events import EventType
from testbed.trace.figures import Column, Curve, Declared, Figure, Row, Table
from testbed.trace.record import Record


def _counts(record: Record) -> list[dict[str, Any]]:
    """Return what devices counted of a layer, as shares, each with its time and layer."""
    found = []
    for event in record.of("maintenance"):
        counts = event.fields
        updates = counts.get("fresh", 0) + counts.get("reused", 0) + counts.get("idle", 0)
        shares = {
            "substituted": (counts.get("missing", 0), counts.get("due", 0)),
            "dropped": (counts.get("dropped", 0), counts.get("batches", 0)),
            "reused": (counts.get("reused", 0), updates),
        }
        known = {name: part / whole for name, (part, whole) in shares.items() if whole}
        found.append({"time": event.time, "device": event.device, "layer": f"layer {counts['layer']}", **known})
    return found


def _by_layer(record: Record, share: str) -> list[dict[str, Any]]:
    """Return a share by layer over time, the mean over the devices that reported it in the same step."""
    sums: dict[tuple[int, str], list[float]] = {}
    times: dict[tuple[int, str], float] = {}
    for event, counted in zip(record.of("maintenance"), _counts(record), strict=True):
        if share in counted:
            key = (event.fields["step"], counted["layer"])
            sums.setdefault(key, []).append(counted[share])
            times[key] = event.time
    return [{"time": times[key], "layer": key[1], share: sum(values) / len(values)} for key, values in sums.items()]


def _share(record: Record, part: tuple[str, ...], whole: tuple[str, ...]) -> float | None:
    events = [event.fields for event in record.of("maintenance")]
    total = sum(fields.get(name, 0) for fields in events for name in whole)
    return sum(fields.get(name, 0) for fields in events for name in part) / total if total else None


def _neurons(record: Record) -> list[dict[str, Any]]:
    """Return how many neurons each device holds, whenever that changes; one that has failed says nothing of it."""
    told = [(event.time, event.device, event.fields["neurons"]) for event in record.of("arranged")]
    failures = (event for event in record.of("rearrangement") if event.fields["cause"] == "failure")
    told += [(event.time, name, 0) for event in failures for name in event.fields["devices"]]
    return [{"time": time, "device": name, "neurons": held} for time, name, held in sorted(told, key=itemgetter(0))]


def _rearrangements(record: Record) -> list[dict[str, Any]]:
    return [
        {**event.fields, "time": event.time, "devices": ", ".join(event.fields["devices"])}
        for event in record.of("rearrangement")
    ]


def _credibility(record: Record) -> list[dict[str, Any]]:
    return [
        {"time": event.time, "device": event.fields["of"], "credibility": event.fields["value"]}
        for event in record.of("credibility")
    ]


def _changes(cause: str | None = None) -> Any:
    def count(record: Record) -> int | None:
        found = record.of("rearrangement")
        return sum(cause in (None, event.fields["cause"]) for event in found)

    return count


def _anew(record: Record) -> int:
    return sum(event.fields["anew"] for event in record.of("rearrangement"))


def _least_credible(record: Record) -> float | None:
    return min((event.fields["value"] for event in record.of("credibility")), default=None)


def _risen(record: Record) -> float | None:
    """Credibility moves neurons all the time: that does not count here."""
    moved = [event.time for event in record.of("rearrangement") if event.fields["cause"] != "credibility"]
    found = record.of("evaluate")
    before = [event for event in found if moved and event.time < moved[-1]]
    return found[-1].fields["accuracy"] - before[-1].fields["accuracy"] if before else None


def _curve(title: str, note: str, value: str, by: str) -> Curve:
    return Curve(title, note, f"{value}_list", value, "share", by)


_UPDATES = ("fresh", "reused", "idle")

DECLARED = Declared(
    figures=(
        *(figure for figure in EDGEPIPE.figures if figure.name != "learned"),
        Figure(
            "substituted",
            "share",
            "of the inputs of layers in training, those that were missing and counted as zero",
            lambda record: _share(record, ("missing",), ("due",)),
            brief=True,
        ),
        Figure(
            "dropped",
            "share",
            "of the batches that reached a layer of a device, those that went no further",
            lambda record: _share(record, ("dropped",), ("batches",)),
        ),
        Figure(
            "gradients_reused",
            "share",
            "of the updates of layers that were due, those made with saved gradients",
            lambda record: _share(record, ("reused",), _UPDATES),
            brief=True,
        ),
        Figure(
            "gradients_fresh",
            "share",
            "of the updates of layers that were due, those made with new gradients",
            lambda record: _share(record, ("fresh",), _UPDATES),
        ),
        Figure("rearrangements", "number", "decisions to move neurons, whatever the cause", _changes(), compared=True),
        Figure("failures_found", "number", "devices that nobody heard for a window", _changes("failure")),
        Figure("joins", "number", "devices that were given neurons after they had booted", _changes("join")),
        Figure("neurons_anew", "number", "neurons that began again with first weights", _anew),
        Figure(
            "accuracy_risen",
            "share",
            "by which the last accuracy is above that before a device last failed, retired or joined",
            _risen,
        ),
        Figure("least_credibility", "share", "of any device at the end of any window", _least_credible),
    ),
    lists={
        "substituted_list": lambda record: _by_layer(record, "substituted"),
        "dropped_list": lambda record: _by_layer(record, "dropped"),
        "reused_list": lambda record: _by_layer(record, "reused"),
        "neurons_list": _neurons,
        "credibility_list": _credibility,
        "rearrangement_list": _rearrangements,
    },
    events=(
        *EDGEPIPE.events,
        EventType("rearrangement", "neurons are to move, and why", (), ("cause", "devices", "moved", "anew")),
        EventType("arranged", "the neurons that the device holds from now on", None, ("version", "neurons")),
        EventType(
            "credibility", "of a device in a window, as the coordinator knows it", None, ("window", "of", "value")
        ),
        EventType("maintenance", "what a device counted of a layer since it last did", None, ("step", "layer")),
    ),
    rows=(
        Row(
            "Maintenance",
            "{substituted} substituted",
            "{dropped} of batches dropped, {gradients_reused} of updates with saved gradients",
        ),
        Row("Rearrangements", "{rearrangements}", "{neurons_anew} neurons began anew"),
    ),
    tables=(
        Table(
            "Rearrangements",
            "when neurons moved to other devices, and why",
            "rearrangement_list",
            (
                Column("At", "moment", "time"),
                Column("Cause", "text", "cause"),
                Column("Devices", "text", "devices"),
                Column("Moved", "number", "moved"),
                Column("Anew", "number", "anew"),
            ),
        ),
    ),
    curves=(
        _curve("Substituted", "share of a layer's inputs that were missing", "substituted", "layer"),
        _curve("Dropped", "share of the batches that went no further", "dropped", "layer"),
        _curve("Saved gradients", "share of a layer's updates made with them", "reused", "layer"),
        _curve("Credibility", "of each device, at the end of each window", "credibility", "device"),
        Curve(
            "Neurons",
            "held by each device; dotted: they are rearranged",
            "neurons_list",
            "neurons",
            "number",
            "device",
            stacked=True,
            marks="rearrangement_list",
        ),
    ),
)
