"""Metrics of VersatileFL, in addition to those of all methods in timeslots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import itemgetter
from typing import Any

from testbed.ml.slots.metrics import DECLARED as SLOTS
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
"""Counts of layer updates: with new gradients, with saved ones, and none."""
_SHARES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "substituted_inputs": (
        "missing",
        ("expected",),
        "share of layer inputs in training that were missing and counted as zero",
    ),
    "dropped_batches": (
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
"""Metric -> count of ``maintenance`` events, the counts by whose sum the count is divided, and the description."""


def _share(name: str, events: Iterable[Event]) -> float | None:
    """Return a metric of `_SHARES` over some events; None without anything to count."""
    counter, total_counters, _ = _SHARES[name]
    counted = total = 0
    for event in events:
        counted += event.fields.get(counter, 0)
        for key in total_counters:
            total += event.fields.get(key, 0)
    return counted / total if total else None


def _of_run(name: str, record: RunView) -> float | None:
    return _share(name, record.of("maintenance"))


def _grouped_events(
    record: RunView, *keys: str
) -> list[tuple[tuple[int, ...], list[Event]]]:
    """Return the counts of all devices in groups with equal fields, sorted by these."""
    groups: dict[tuple[int, ...], list[Event]] = {}
    for event in record.of("maintenance"):
        group = tuple(event.fields[key] for key in keys)
        groups.setdefault(group, []).append(event)
    return sorted(groups.items())


def _of_layers(name: str, record: RunView) -> dict[str, float]:
    """Return a share by layer, over the whole run."""
    shares = {}
    for (layer,), events in _grouped_events(record, "layer"):
        share = _share(name, events)
        if share is not None:
            shares[str(layer)] = share
    return shares


def _over_time(name: str, record: RunView) -> list[dict[str, Any]]:
    """Return a share by layer over time, added up over the devices reporting in the same step."""
    points = []
    for (_, layer), events in _grouped_events(record, "step", "layer"):
        share = _share(name, events)
        if share is not None:
            time = events[-1].time
            points.append({"time": time, "layer": f"layer {layer}", name: share})
    return points


def _neurons(record: RunView) -> list[dict[str, Any]]:
    """Return the number of neurons of each device at each change; 0 for a failed device."""
    changes = []
    for event in record.of("arrangement"):
        neurons = event.fields["neurons"]
        changes.append((event.time, event.device, neurons))
    for event in record.of("rearrangement"):
        # A failed device cannot record its own change.
        if event.fields["cause"] == "failure":
            for name in event.fields["devices"]:
                changes.append((event.time, name, 0))
    # By time alone: a device that gets neurons and fails at once keeps this order.
    changes.sort(key=itemgetter(0))
    rows = []
    for time, name, count in changes:
        rows.append({"time": time, "device": name, "neurons": count})
    return rows


def _rearrangements(record: RunView) -> list[dict[str, Any]]:
    rows = []
    for event in record.of("rearrangement"):
        devices = ", ".join(event.fields["devices"])
        row = {**event.fields, "time": event.time, "devices": devices}
        rows.append(row)
    return rows


def _credibility(record: RunView) -> list[dict[str, Any]]:
    """Return credibilities over time; at one time, in the order of the scenario's devices."""
    # In this order, devices have the same colours as in other plots.
    order = [spec.name for spec in record.experiment.devices]

    def position(event: Event) -> tuple[float, int]:
        return event.time, order.index(event.fields["rated_device"])

    points = []
    for event in sorted(record.of("credibility"), key=position):
        name, value = event.fields["rated_device"], event.fields["value"]
        points.append({"time": event.time, "device": name, "credibility": value})
    return points


def _count_changes(cause: str | None, record: RunView) -> int:
    causes = [event.fields["cause"] for event in record.of("rearrangement")]
    return len(causes) if cause is None else causes.count(cause)


def _count_reset_neurons(record: RunView) -> int:
    return sum(event.fields["reset"] for event in record.of("rearrangement"))


def _lowest_credibility(record: RunView) -> float | None:
    values = [event.fields["value"] for event in record.of("credibility")]
    return min(values, default=None)


def _accuracy_gain(record: RunView) -> float | None:
    """Return the gain of accuracy since the last failure, retirement or join; None without one of these."""
    last_change = None
    for event in record.of("rearrangement"):
        # Credibility moves neurons all the time.
        if event.fields["cause"] != "credibility":
            last_change = event.time
    if last_change is None:
        return None
    accuracies = []
    before_change = None
    for event in record.of("evaluate"):
        accuracies.append(event.fields["accuracy"])
        if event.time < last_change:
            before_change = accuracies[-1]
    if before_change is None:
        return None
    gain: float = accuracies[-1] - before_change
    return gain


def _last_values(
    list_of: Callable[[RunView], list[dict[str, Any]]], name: str, record: RunView
) -> dict[str, float]:
    """Return the last entry of each device in a list."""
    values = {}
    for entry in list_of(record):
        # Later entries replace earlier ones.
        values[entry["device"]] = entry[name]
    return values


def _share_metrics() -> Iterator[Metric]:
    """Yield the metrics of all shares: of the run, then of its layers."""
    for name, (_, _, meaning) in _SHARES.items():
        is_brief = name in ("substituted_inputs", "gradients_reused")
        yield Metric(name, "share", meaning, partial(_of_run, name), brief=is_brief)
    for name, (_, _, meaning) in _SHARES.items():
        of_layer = f"{meaning}, of one layer"
        yield Metric(
            f"layers.<layer>.{name}", "share", of_layer, partial(_of_layers, name)
        )


def _share_curve(title: str, note: str, value: str, by: str) -> TimeSeries:
    """Return the chart of a share over time, with a line for each layer or device."""
    return TimeSeries(title, note, f"{value}_list", value, "share", by)


DECLARED = MetricsSpec(
    former_metrics={
        **SLOTS.former_metrics,
        "accuracy_risen": "accuracy_gain",
        "dropped": "dropped_batches",
        "failures_found": "failures_detected",
        "least_credibility": "lowest_credibility",
        "neurons_anew": "neurons_reset",
        "substituted": "substituted_inputs",
    },
    metrics=(
        *SLOTS.metrics,
        *_share_metrics(),
        Metric(
            "devices.<device>.neurons",
            "number",
            "neurons of one device at the end",
            partial(_last_values, _neurons, "neurons"),
        ),
        Metric(
            "devices.<device>.credibility",
            "share",
            "credibility of one device at the end of its last window",
            partial(_last_values, _credibility, "credibility"),
        ),
        Metric(
            "rearrangements",
            "number",
            "decisions to move neurons",
            partial(_count_changes, None),
            compared=True,
        ),
        Metric(
            "failures_detected",
            "number",
            "devices that no other device received for a window",
            partial(_count_changes, "failure"),
        ),
        Metric(
            "joins",
            "number",
            "devices that received neurons after a start or a return",
            partial(_count_changes, "join"),
        ),
        Metric(
            "neurons_reset",
            "number",
            "neurons that restarted with initial weights",
            _count_reset_neurons,
        ),
        Metric(
            "accuracy_gain",
            "share",
            (
                "last accuracy minus the accuracy before the last failure, retirement "
                "or join"
            ),
            _accuracy_gain,
        ),
        Metric(
            "lowest_credibility",
            "share",
            "minimum credibility of any device at the end of any window",
            _lowest_credibility,
        ),
    ),
    lists={
        "substituted_inputs_list": partial(_over_time, "substituted_inputs"),
        "dropped_batches_list": partial(_over_time, "dropped_batches"),
        "gradients_reused_list": partial(_over_time, "gradients_reused"),
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
            ("cause", "devices", "moved", "reset"),
        ),
        EventType(
            "arrangement",
            "new assignment of neurons of the device",
            None,
            ("version", "neurons"),
        ),
        EventType(
            "credibility",
            "credibility of a device in a window at the coordinator",
            None,
            ("window", "rated_device", "value"),
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
            "{substituted_inputs} substituted",
            "{dropped_batches} of batches dropped, {gradients_reused} of updates with saved gradients",
        ),
        Row("Rearrangements", "{rearrangements}", "{neurons_reset} neurons reset"),
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
                Column("Reset", "number", "reset"),
            ),
        ),
    ),
    curves=(
        _share_curve(
            "Substituted",
            "share of a layer's inputs that were missing",
            "substituted_inputs",
            "layer",
        ),
        _share_curve(
            "Dropped",
            "share of the batches that a device forwarded no further",
            "dropped_batches",
            "layer",
        ),
        _share_curve(
            "Saved gradients",
            "share of a layer's updates made with saved gradients",
            "gradients_reused",
            "layer",
        ),
        _share_curve(
            "Credibility",
            "credibility of each device at the end of each window",
            "credibility",
            "device",
        ),
        TimeSeries(
            "Neurons",
            "neurons of each device; dotted lines mark rearrangements",
            "neurons_list",
            "neurons",
            "number",
            "device",
            stacked=True,
            marks="rearrangement_list",
        ),
    ),
)
