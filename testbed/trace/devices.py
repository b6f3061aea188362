"""Metrics of each device: time by activity, bytes, memory and energy.

``compute``, ``send`` and ``receive`` are each a union of intervals and may overlap one another. ``communicate`` is the
time of sending or receiving without computing, and ``idle`` the remaining time in which the device is up, so compute +
communicate + down + idle is the duration of the run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from testbed.common.formats import MetricKind
from testbed.common.lazy import np
from testbed.trace.gantt import BarKind
from testbed.trace.host import deficits, lateness, waited
from testbed.trace.intervals import Intervals, subtract, total, union
from testbed.trace.log import EventLog
from testbed.trace.metrics_spec import Metric
from testbed.trace.record import RunView

_SPENT = ("compute", "send", "receive", "communicate", "down", "idle")
"""Activities whose seconds and share are metrics of a device; the module's docstring defines them."""
_COUNTED = (
    "messages_sent",
    "bytes_sent",
    "messages_received",
    "bytes_received",
    "flops",
    "busy",
    "deficit",
)
"""Metrics of a device that are sums over its events; 0 for a device without such events."""
_GROUP_BARS = 1 << 17
"""Approximate number of bars after which a group of devices is processed; those of all devices would fill memory."""
KINDS: tuple[BarKind, ...] = ("compute", "send", "receive", "down")
"""Kinds of bars (activities of one device in `testbed.trace.gantt`) from which the times of all activities follow."""


class DeviceMetric(NamedTuple):
    """A metric of one device."""

    kind: MetricKind
    meaning: str


def _device_metrics() -> dict[str, DeviceMetric]:
    activities = {
        "compute": "the device computes",
        "send": "it sends; may overlap its computing",
        "receive": "it receives; may overlap its computing",
        "communicate": "it sends or receives without computing",
        "down": "it is off",
        "idle": "it is up, and neither computes nor communicates",
    }
    metrics = {}
    for name, meaning in activities.items():
        metrics[name] = DeviceMetric("seconds", f"time in which {meaning}")
        share = f"share of the duration in which {meaning}"
        metrics[f"{name}_share"] = DeviceMetric("share", share)
    return metrics


OF_DEVICES: dict[str, DeviceMetric] = {
    **_device_metrics(),
    "busy": DeviceMetric("seconds", "processor time of its computations"),
    "deficit": DeviceMetric("seconds", "time by which the host delayed computations"),
    "deficit_share": DeviceMetric(
        "share", "these delays as a share of the undisturbed steps"
    ),
    "waited_share": DeviceMetric(
        "share", "share of the undisturbed steps in which its threads waited for a core"
    ),
    "bytes_sent": DeviceMetric("bytes", "bytes of its messages"),
    "bytes_received": DeviceMetric("bytes", "bytes of the messages that it received"),
    "weights": DeviceMetric("bytes", "weights that it holds, if the method reports it"),
    "activations": DeviceMetric(
        "bytes", "maximum size of stored activations, if the method reports it"
    ),
    "messages_sent": DeviceMetric("number", "messages; a broadcast counts once"),
    "messages_received": DeviceMetric("number", "messages that it received"),
    "flops": DeviceMetric("number", "operations of its computations"),
    "energy": DeviceMetric("joules", "energy, if its watts are given"),
}
"""The metrics of one device, named as ``devices.<device>.<metric>``."""


def devices(record: RunView) -> dict[str, dict[str, Any]]:
    """Return one row per device of the experiment, by name.

    A row has ``<activity>`` in seconds and ``<activity>_share`` of the duration; traffic, ``flops``, ``busy`` and
    ``deficit`` of the host; ``deficit_share`` and ``waited_share`` of the steady phase; and, if the method records
    them, bytes of ``weights`` and the maximum of ``activations``.
    """
    table = {}
    work = _work_by_device(record.log)
    late = deficits(record.log, record.steady_phase)
    waiting = waited(record.log, record.steady_phase)
    activity = _activity_by_device(record)
    for spec in record.experiment.devices:
        row: dict[str, Any] = {"profile": spec.profile, "speed": spec.speed}
        # Start and stop of each assignment, one after the other.
        units = []
        for assignment in record.plan.assignments_of(spec.name):
            units += [assignment.start, assignment.stop]
        if units:
            row["units"] = units
        row |= activity[spec.name]
        row |= work.get(spec.name, dict.fromkeys(_COUNTED, 0))
        energy = spec.joules(record.end - row["down"], row["compute"])
        if energy is not None:
            row["energy"] = energy
        # The mean over processors, since a late processor delays only its share of the device's work.
        deficit = late.get(spec.name, 0.0) / spec.processors
        wait = waiting.get(spec.name, 0.0)
        row["deficit_share"] = _share_of(deficit, record.steady_phase)
        row["waited_share"] = _share_of(wait, record.steady_phase)
        table[spec.name] = row
    return table


def _activity_by_device(record: RunView) -> dict[str, dict[str, float]]:
    """Return the seconds and the shares of each activity (`_SPENT`), by device."""
    activity: dict[str, dict[str, float]] = {}
    group: dict[str, list[Intervals]] = {}
    bars = 0
    for spec in record.experiment.devices:
        group[spec.name] = [record.spans(spec.name, kind) for kind in KINDS]
        bars += sum(map(len, group[spec.name]))
        if bars >= _GROUP_BARS:
            activity |= _activity_of_group(group, record.end)
            group, bars = {}, 0
    if group:
        activity |= _activity_of_group(group, record.end)
    return activity


def _activity_of_group(
    group: Mapping[str, Sequence[Intervals]], end: float
) -> dict[str, dict[str, float]]:
    """Return the result of `_activity_by_device` for a group of devices, given their intervals of each of `KINDS`.

    All devices are computed in a few array operations: their intervals are placed on one axis, device after device. A
    position on this axis is the index of an instant in `instants`, plus an offset for the device, so the intervals of
    different devices cannot overlap.
    """
    # For each kind, the intervals of every device.
    by_kind = list(zip(*group.values(), strict=True))
    times_by_kind = [np.concatenate(each).clip(0.0, end) for each in by_kind]
    instants = np.unique(
        np.concatenate([(0.0, end), *(times.ravel() for times in times_by_kind)])
    )
    device_offsets = np.arange(len(group))[:, None] * len(instants)

    def to_axis(times: Intervals, offsets: Any) -> Intervals:
        return np.asarray(np.searchsorted(instants, times) + offsets, dtype=float)

    def seconds_by_device(positions: Intervals) -> list[float]:
        devices, indices = np.divmod(positions.astype(int), len(instants))
        lengths = instants[indices[:, 1]] - instants[indices[:, 0]]
        sums = np.bincount(devices[:, 0], lengths, len(group))
        return sums.astype(float).tolist()  # type: ignore[no-any-return]

    unions = []
    for times, intervals_by_device in zip(times_by_kind, by_kind, strict=True):
        counts = list(map(len, intervals_by_device))
        offsets = np.repeat(device_offsets, counts, axis=0)
        unions.append(union(to_axis(times, offsets)))
    *active, down = unions
    # A message that was retried while its sender was down is not activity of the sender.
    compute, send, receive = (subtract(each, down) for each in active)
    communicate = subtract(np.concatenate((send, receive)), compute)
    whole_run = to_axis(np.array([(0.0, end)]), device_offsets)
    idle = subtract(whole_run, np.concatenate((compute, send, receive, down)))
    # In the order of `_SPENT`.
    activities = (compute, send, receive, communicate, down, idle)
    columns = map(seconds_by_device, activities)
    rows = {}
    for device, *values in zip(group, *columns, strict=True):
        row = dict(zip(_SPENT, values, strict=True))
        for name, seconds in zip(_SPENT, values, strict=True):
            row[f"{name}_share"] = seconds / end if end > 0 else 0.0
        rows[device] = row
    return rows


def _work_by_device(log: EventLog) -> dict[str, dict[str, Any]]:
    """Return, by device, sent and received bytes, computations, and peak memory in bytes."""
    work: defaultdict[str, dict[str, Any]] = defaultdict(
        lambda: dict.fromkeys(_COUNTED, 0)
    )
    messages = log.of("send", "cast", "receive")
    for event, (devices, sizes) in messages.columns("device", "bytes"):
        direction = "received" if event == "receive" else "sent"
        # Equal messages are counted first, since a run has millions of messages of few sizes.
        counts = Counter(zip(devices, sizes, strict=False))
        for (device, size), count in counts.items():
            work[device][f"messages_{direction}"] += count
            work[device][f"bytes_{direction}"] += count * (size or 0)
    rows = log.of("compute").rows("device", "flops", "busy", "late", "deficit")
    for device, flops, busy, late, deficit in rows:
        row = work[device]
        row["flops"] += flops or 0.0
        row["busy"] += busy or 0.0
        row["deficit"] += lateness(late, deficit)
    memory = log.of("memory")
    for device, weights, activations in memory.rows("device", "weights", "activations"):
        # Each event reports a new maximum, so the last event has the overall maximum.
        work[device] |= {"weights": weights, "activations": activations}
    return work


def _share_of(seconds: float, phase: Intervals) -> float:
    duration = total(phase)
    return seconds / duration if duration > 0 else 0.0


def _mean_of(key: str, record: RunView) -> float | None:
    """Return the mean of a device metric over the devices of the plan."""
    planned_devices = set(record.plan.devices)
    values = []
    for name, row in record.cached(devices).items():
        if name in planned_devices:
            values.append(row[key])
    return fmean(values) if values else None


def _total_energy(record: RunView) -> float | None:
    rows = record.cached(devices).values()
    energies = [row["energy"] for row in rows if "energy" in row]
    # A sum without some devices would look like a saving.
    return sum(energies) if len(energies) == len(rows) else None


METRICS = (
    Metric(
        "energy",
        "joules",
        (
            "energy of all devices: idle watts x time up + (busy - idle watts) x "
            "computing time; if all devices have watts"
        ),
        _total_energy,
        compared=True,
    ),
    Metric(
        "compute_share",
        "share",
        "share of the duration, mean over the devices of the plan",
        lambda record: _mean_of("compute_share", record),
        compared=True,
    ),
    Metric(
        "idle_share",
        "share",
        "share of the duration, mean over the devices of the plan",
        lambda record: _mean_of("idle_share", record),
        compared=True,
    ),
    Metric(
        "compute_deficit",
        "seconds",
        "time by which the host delayed computations, of all devices",
        lambda record: sum(row["deficit"] for row in record.cached(devices).values()),
    ),
    Metric(
        "deficit_share",
        "share",
        (
            "delay of computations as a share of the undisturbed steps, of the "
            "worst device"
        ),
        lambda record: max(
            (row["deficit_share"] for row in record.cached(devices).values()),
            default=0.0,
        ),
    ),
)
