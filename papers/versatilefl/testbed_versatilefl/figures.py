"""Metrics of VersatileFL, in addition to those of all methods in timeslots."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import itemgetter
from typing import Any

from testbed.ml.slots.figures import DECLARED as SLOTS
from testbed.trace.events import Event, EventType
from testbed.trace.metrics_spec import (
    Column,
    Metric,
    MetricsSpec,
    Row,
    Table,
    TimeSeries,
)
from testbed.trace.record import RunView

_UPDATES = ("fresh", "reused", "idle")
_SHARES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "substituted": (
        "missing",
        ("due",),
        "share of layer inputs in training that were missing and counted as zero",
    ),
    "dropped": (
        "dropped",
        ("batches",),
        "share of the batches at a layer of a device that were dropped there",
    ),
    "gradients_reused": (
        "reused",
        _UPDATES,
        "share of layer updates made with saved gradients",
    ),
    "gradients_fresh": (
        "fresh",
        _UPDATES,
        "share of layer updates made with new gradients",
    ),
}
"""By figure: which counts of ``maintenance`` events, over which."""


def _share(name: str, events: Iterable[Event]) -> float | None:
    part, whole, _ = _SHARES[name]
    counts = [event.fields for event in events]
    total = sum(each.get(key, 0) for each in counts for key in whole)
    return sum(each.get(part, 0) for each in counts) / total if total else None


def _of_run(name: str, record: RunView) -> float | None:
    return _share(name, record.of("maintenance"))


def _reports(record: RunView, *keys: str) -> list[tuple[tuple[int, ...], list[Event]]]:
    """Return the counts of all devices in groups of equal fields, in their order."""
    found: dict[tuple[int, ...], list[Event]] = {}
    for event in record.of("maintenance"):
        found.setdefault(tuple(event.fields[key] for key in keys), []).append(event)
    return sorted(found.items())


def _of_layers(name: str, record: RunView) -> dict[str, float]:
    """Return a share by layer, over the whole run."""
    shares = {
        str(layer): _share(name, events)
        for (layer,), events in _reports(record, "layer")
    }
    return {layer: share for layer, share in shares.items() if share is not None}


def _over_time(name: str, record: RunView) -> list[dict[str, Any]]:
    """Return a share by layer over time, of all devices that reported it in the same step."""
    shares = [
        (each[-1].time, layer, _share(name, each))
        for (_, layer), each in _reports(record, "step", "layer")
    ]
    return [
        {"time": at, "layer": f"layer {layer}", name: share}
        for at, layer, share in shares
        if share is not None
    ]


def _neurons(record: RunView) -> list[dict[str, Any]]:
    """Return how many neurons each device holds, whenever that changes; one that has failed says nothing of it."""
    changes = [
        (event.time, event.device, event.fields["neurons"])
        for event in record.of("arranged")
    ]
    failures = (
        event
        for event in record.of("rearrangement")
        if event.fields["cause"] == "failure"
    )
    changes += [
        (event.time, name, 0) for event in failures for name in event.fields["devices"]
    ]
    return [
        {"time": time, "device": name, "neurons": held}
        for time, name, held in sorted(changes, key=itemgetter(0))
    ]


def _rearrangements(record: RunView) -> list[dict[str, Any]]:
    return [
        {
            **event.fields,
            "time": event.time,
            "devices": ", ".join(event.fields["devices"]),
        }
        for event in record.of("rearrangement")
    ]


def _credibility(record: RunView) -> list[dict[str, Any]]:
    """Return it device by device in their usual order, so that they have the same colours as elsewhere."""
    order = [spec.name for spec in record.experiment.devices]
    return [
        {
            "time": event.time,
            "device": event.fields["of"],
            "credibility": event.fields["value"],
        }
        for event in sorted(
            record.of("credibility"),
            key=lambda event: (event.time, order.index(event.fields["of"])),
        )
    ]


def _changes(cause: str | None, record: RunView) -> int:
    return sum(
        cause in (None, event.fields["cause"]) for event in record.of("rearrangement")
    )


def _anew(record: RunView) -> int:
    return sum(event.fields["anew"] for event in record.of("rearrangement"))


def _least_credible(record: RunView) -> float | None:
    return min(
        (event.fields["value"] for event in record.of("credibility")), default=None
    )


def _risen(record: RunView) -> float | None:
    """Credibility moves neurons all the time: that does not count here."""
    moved = [
        event.time
        for event in record.of("rearrangement")
        if event.fields["cause"] != "credibility"
    ]
    found = record.of("evaluate")
    before = [event for event in found if moved and event.time < moved[-1]]
    return (
        found[-1].fields["accuracy"] - before[-1].fields["accuracy"] if before else None
    )


def _last(
    list_of: Callable[[RunView], list[dict[str, Any]]], name: str, record: RunView
) -> dict[str, float]:
    """Return the last entry of each device in a list."""
    return {each["device"]: each[name] for each in list_of(record)}


def _curve(title: str, note: str, value: str, by: str) -> TimeSeries:
    return TimeSeries(title, note, f"{value}_list", value, "share", by)


DECLARED = MetricsSpec(
    figures=(
        *SLOTS.figures,
        *(
            Metric(
                name,
                "share",
                meaning,
                partial(_of_run, name),
                brief=name in ("substituted", "gradients_reused"),
            )
            for name, (_, _, meaning) in _SHARES.items()
        ),
        *(
            Metric(
                f"layers.<layer>.{name}",
                "share",
                f"{meaning}, of one layer",
                partial(_of_layers, name),
            )
            for name, (_, _, meaning) in _SHARES.items()
        ),
        Metric(
            "devices.<device>.neurons",
            "number",
            "neurons of one device at the end",
            partial(_last, _neurons, "neurons"),
        ),
        Metric(
            "devices.<device>.credibility",
            "share",
            "credibility of one device at the end of its last window",
            partial(_last, _credibility, "credibility"),
        ),
        Metric(
            "rearrangements",
            "number",
            "decisions to move neurons",
            partial(_changes, None),
            compared=True,
        ),
        Metric(
            "failures_found",
            "number",
            "devices that no other device received for a window",
            partial(_changes, "failure"),
        ),
        Metric(
            "joins",
            "number",
            "devices that received neurons after a start or a return",
            partial(_changes, "join"),
        ),
        Metric(
            "neurons_anew",
            "number",
            "neurons that restarted with initial weights",
            _anew,
        ),
        Metric(
            "accuracy_risen",
            "share",
            (
                "last accuracy minus the accuracy before the last failure, retirement "
                "or join"
            ),
            _risen,
        ),
        Metric(
            "least_credibility",
            "share",
            "minimum credibility of any device at the end of any window",
            _least_credible,
        ),
    ),
    lists={
        **{
            f"{name}_list": partial(_over_time, name)
            for name in ("substituted", "dropped", "gradients_reused")
        },
        "neurons_list": _neurons,
        "credibility_list": _credibility,
        "rearrangement_list": _rearrangements,
    },
    events=(
        *SLOTS.events,
        EventType(
            "rearrangement",
            "decision to move neurons, with its cause",
            (),
            ("cause", "devices", "moved", "anew"),
        ),
        EventType(
            "arranged",
            "new assignment of neurons of the device",
            None,
            ("version", "neurons"),
        ),
        EventType(
            "credibility",
            "credibility of a device in a window at the coordinator",
            None,
            ("window", "of", "value"),
        ),
        EventType(
            "maintenance",
            "counters of a layer on a device since the previous event",
            None,
            ("step", "layer"),
        ),
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
        _curve(
            "Substituted",
            "share of a layer's inputs that were missing",
            "substituted",
            "layer",
        ),
        _curve(
            "Dropped", "share of the batches that went no further", "dropped", "layer"
        ),
        _curve(
            "Saved gradients",
            "share of a layer's updates made with them",
            "gradients_reused",
            "layer",
        ),
        _curve(
            "Credibility",
            "of each device, at the end of each window",
            "credibility",
            "device",
        ),
        TimeSeries(
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
