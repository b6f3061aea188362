"""Metrics of VersatileFL, in addition to those of all methods in timeslots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import itemgetter
from typing import Any

from testbed.ml.slots.metrics import DECLARED as SLOT_METRICS
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
"""Counts of a layer's backwards: updates with new gradients, updates with saved gradients, and no update."""
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
"""Metric -> (numerator, denominator, description).

The numerator is a count of ``maintenance`` events, and the denominator the sum of several of their counts.
"""


def _compute_share(name: str, events: Iterable[Event]) -> float | None:
    """Return a metric of `_SHARES` over ``maintenance`` events; None if the denominator is 0."""
    numerator_key, denominator_keys, _ = _SHARES[name]
    numerator = 0
    denominator = 0
    for event in events:
        numerator += event.fields.get(numerator_key, 0)
        for key in denominator_keys:
            denominator += event.fields.get(key, 0)
    return numerator / denominator if denominator else None


def _share_of_run(name: str, record: RunView) -> float | None:
    return _compute_share(name, record.of("maintenance"))


def _grouped_events(
    record: RunView, *keys: str
) -> list[tuple[tuple[int, ...], list[Event]]]:
    """Return the ``maintenance`` events of all devices, grouped and sorted by the fields ``keys``."""
    groups: dict[tuple[int, ...], list[Event]] = {}
    for event in record.of("maintenance"):
        group = tuple(event.fields[key] for key in keys)
        groups.setdefault(group, []).append(event)
    return sorted(groups.items())


def _shares_of_layers(name: str, record: RunView) -> dict[str, float]:
    """Return layer -> share of `_SHARES`, over the whole run."""
    shares = {}
    for (layer,), events in _grouped_events(record, "layer"):
        share = _compute_share(name, events)
        if share is not None:
            shares[str(layer)] = share
    return shares


def _list_shares(name: str, record: RunView) -> list[dict[str, Any]]:
    """Return the shares of each layer over time, each over all devices reporting in the same step."""
    points = []
    for (_, layer), events in _grouped_events(record, "step", "layer"):
        share = _compute_share(name, events)
        if share is not None:
            time = events[-1].time
            points.append({"time": time, "layer": f"layer {layer}", name: share})
    return points


def _list_neurons(record: RunView) -> list[dict[str, Any]]:
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
    # By time alone, so that simultaneous changes of a device keep their order: it gets neurons, then fails.
    changes.sort(key=itemgetter(0))
    rows = []
    for time, name, count in changes:
        rows.append({"time": time, "device": name, "neurons": count})
    return rows


def _list_rearrangements(record: RunView) -> list[dict[str, Any]]:
    rows = []
    for event in record.of("rearrangement"):
        devices = ", ".join(event.fields["devices"])
        row = {**event.fields, "time": event.time, "devices": devices}
        rows.append(row)
    return rows


def _list_credibilities(record: RunView) -> list[dict[str, Any]]:
    """Return credibilities over time; at one time, in the order of the scenario's devices."""
    # In the scenario's order, so that devices have the same colours as in other charts.
    order = [spec.name for spec in record.experiment.devices]

    def position(event: Event) -> tuple[float, int]:
        return event.time, order.index(event.fields["rated_device"])

    points = []
    for event in sorted(record.of("credibility"), key=position):
        point = {
            "time": event.time,
            "device": event.fields["rated_device"],
            "credibility": event.fields["value"],
        }
        points.append(point)
    return points


def _count_rearrangements(cause: str | None, record: RunView) -> int:
    """Return the number of rearrangements with a cause; None counts all."""
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
        # Rearrangements by credibility occur all the time, without a change of the devices.
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
    make_list: Callable[[RunView], list[dict[str, Any]]], name: str, record: RunView
) -> dict[str, float]:
    """Return device -> last value of the field ``name`` in a list over time."""
    values = {}
    for entry in make_list(record):
        # Later entries replace earlier ones.
        values[entry["device"]] = entry[name]
    return values


def _share_metrics() -> Iterator[Metric]:
    """Yield the metrics of all shares: of the run, then of the layers."""
    for name, (_, _, meaning) in _SHARES.items():
        is_brief = name in ("substituted_inputs", "gradients_reused")
        compute = partial(_share_of_run, name)
        yield Metric(name, "share", meaning, compute, brief=is_brief)
    for name, (_, _, meaning) in _SHARES.items():
        meaning_for_layer = f"{meaning}, of one layer"
        compute_by_layer = partial(_shares_of_layers, name)
        yield Metric(
            f"layers.<layer>.{name}", "share", meaning_for_layer, compute_by_layer
        )


def _share_curve(title: str, note: str, value: str, by: str) -> TimeSeries:
    """Return the chart of a share over time, with a line for each layer or device."""
    return TimeSeries(title, note, f"{value}_list", value, "share", by)


DECLARED = MetricsSpec(
    former_metrics={
        **SLOT_METRICS.former_metrics,
        "accuracy_risen": "accuracy_gain",
        "dropped": "dropped_batches",
        "failures_found": "failures_detected",
        "least_credibility": "lowest_credibility",
        "neurons_anew": "neurons_reset",
        "substituted": "substituted_inputs",
    },
    metrics=(
        *SLOT_METRICS.metrics,
        *_share_metrics(),
        Metric(
            "devices.<device>.neurons",
            "number",
            "neurons of one device at the end",
            partial(_last_values, _list_neurons, "neurons"),
        ),
        Metric(
            "devices.<device>.credibility",
            "share",
            "credibility of one device at the end of its last window",
            partial(_last_values, _list_credibilities, "credibility"),
        ),
        Metric(
            "rearrangements",
            "number",
            "decisions to move neurons",
            partial(_count_rearrangements, None),
            compared=True,
        ),
        Metric(
            "failures_detected",
            "number",
            "devices that no other device received for a window",
            partial(_count_rearrangements, "failure"),
        ),
        Metric(
            "joins",
            "number",
            "devices that received neurons after a start or a return",
            partial(_count_rearrangements, "join"),
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
        "substituted_inputs_list": partial(_list_shares, "substituted_inputs"),
        "dropped_batches_list": partial(_list_shares, "dropped_batches"),
        "gradients_reused_list": partial(_list_shares, "gradients_reused"),
        "neurons_list": _list_neurons,
        "credibility_list": _list_credibilities,
        "rearrangement_list": _list_rearrangements,
    },
    events=(
        *SLOT_METRICS.events,
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
