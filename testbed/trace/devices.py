"""Metrics of each device: time by activity, bytes, memory and energy.

``compute``, ``send`` and ``receive`` are each a union of intervals and may overlap one another; ``communicate`` is
sending or receiving while not computing; ``idle`` is the rest without outages, so compute + communicate + down + idle
is the duration.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
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
"""Activities whose seconds and share are metrics of a device; see the module for their meaning."""
_COUNTED = (
    "messages_sent",
    "bytes_sent",
    "messages_received",
    "bytes_received",
    "flops",
    "busy",
    "deficit",
)
"""Metrics of a device that add up over its events; 0 for a device without any."""
_TOGETHER = 1 << 17
"""Approximate number of bars processed together: those of all devices of a long run would fill memory."""
KINDS: tuple[BarKind, ...] = ("compute", "send", "receive", "down")
"""Kinds of bars of the Gantt chart from which all activities follow."""


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
    late = deficits(record.log, record.phase)
    waiting = waited(record.log, record.phase)
    activity = _activity_by_device(record)
    for spec in record.experiment.devices:
        row: dict[str, Any] = {"profile": spec.profile, "speed": spec.speed}
        assignments = record.plan.assignments_of(spec.name)
        if assignments:
            ends = chain.from_iterable(
                (assignment.start, assignment.stop) for assignment in assignments
            )
            row["units"] = list(ends)
        row |= activity[spec.name]
        row |= work.get(spec.name, dict.fromkeys(_COUNTED, 0))
        energy = spec.joules(record.end - row["down"], row["compute"])
        if energy is not None:
            row["energy"] = energy
        # The mean over processors: one that is late delays a device no more than its part.
        deficit = late.get(spec.name, 0.0) / spec.processors
        row["deficit_share"] = _share_of(deficit, record.phase)
        row["waited_share"] = _share_of(waiting.get(spec.name, 0.0), record.phase)
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
        if bars >= _TOGETHER:
            activity |= _activity_of_group(group, record.end)
            group, bars = {}, 0
    if group:
        activity |= _activity_of_group(group, record.end)
    return activity


def _activity_of_group(
    charted: Mapping[str, Sequence[Intervals]], end: float
) -> dict[str, dict[str, float]]:
    """Return the same for a group of devices, given the intervals of each of `KINDS`.

    The devices lie one behind the other on one axis, which counts the instants at which an interval begins or ends.
    Thousands of devices then take a few array operations in all, instead of a few for each.
    """
    kinds = list(zip(*charted.values(), strict=True))
    stretches = [np.concatenate(each).clip(0.0, end) for each in kinds]
    instants = np.unique(
        np.concatenate([(0.0, end), *(each.ravel() for each in stretches)])
    )
    # Each device begins where the one before ends on the axis.
    devices = np.arange(len(charted))[:, None] * len(instants)

    def on_axis(times: Intervals, owners: Any) -> Intervals:
        return np.asarray(np.searchsorted(instants, times) + owners, dtype=float)

    def seconds(part: Intervals) -> list[float]:
        owners, places = np.divmod(part.astype(int), len(instants))
        lengths = instants[places[:, 1]] - instants[places[:, 0]]
        return np.bincount(owners[:, 0], lengths, len(charted)).astype(float).tolist()  # type: ignore[no-any-return]

    whole = on_axis(np.array([(0.0, end)]), devices)
    unions = []
    for times, own in zip(stretches, kinds, strict=True):
        owners = np.repeat(devices, list(map(len, own)), axis=0)
        unions.append(union(on_axis(times, owners)))
    *active, down = unions
    # A message that was retried while its sender was down is not activity of the sender.
    compute, send, receive = (subtract(part, down) for part in active)
    communicate = subtract(np.concatenate((send, receive)), compute)
    idle = subtract(whole, np.concatenate((compute, send, receive, down)))
    columns = map(seconds, (compute, send, receive, communicate, down, idle))
    rows = {}
    for name, *values in zip(charted, *columns, strict=True):
        rows[name] = _with_shares(dict(zip(_SPENT, values, strict=True)), end)
    return rows


def _with_shares(seconds: dict[str, float], end: float) -> dict[str, float]:
    row = dict(seconds)
    for name, value in seconds.items():
        row[f"{name}_share"] = value / end if end > 0 else 0.0
    return row


def _work_by_device(log: EventLog) -> dict[str, dict[str, Any]]:
    """Return, by device, sent and received bytes, computations, and peak memory in bytes."""
    work: defaultdict[str, dict[str, Any]] = defaultdict(
        lambda: dict.fromkeys(_COUNTED, 0)
    )
    messages = log.of("send", "cast", "receive")
    for event, (devices, sizes) in messages.columns("device", "bytes"):
        way = "received" if event == "receive" else "sent"
        # Equal messages are counted first: a run has millions of messages of few sizes.
        alike = Counter(zip(devices, sizes, strict=False))
        for (device, size), number in alike.items():
            work[device][f"messages_{way}"] += number
            work[device][f"bytes_{way}"] += number * (size or 0)
    computations = log.of("compute")
    for device, flops, busy, late, deficit in computations.rows(
        "device", "flops", "busy", "late", "deficit"
    ):
        own = work[device]
        own["flops"] += flops or 0.0
        own["busy"] += busy or 0.0
        own["deficit"] += lateness(late, deficit)
    memory = log.of("memory")
    for device, weights, activations in memory.rows("device", "weights", "activations"):
        # Each event reports a new maximum, so the last one holds.
        work[device] |= {"weights": weights, "activations": activations}
    return work


def _share_of(seconds: float, phase: Intervals) -> float:
    whole = total(phase)
    return seconds / whole if whole > 0 else 0.0


def _mean_of(key: str, record: RunView) -> float | None:
    planned = set(record.plan.devices)
    used = [row[key] for name, row in record.cached(devices).items() if name in planned]
    return fmean(used) if used else None


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
