"""Metrics of each device: time by activity, bytes, memory and energy.

``compute``, ``send`` and ``receive`` are each a union of intervals and may overlap one another; ``communicate`` is
sending or receiving while not computing; ``idle`` is the rest without outages, so compute + communicate + down + idle
is the duration.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from testbed.common.formats import MetricKind
from testbed.common.lazy import np
from testbed.trace.gantt import BarKind
from testbed.trace.host import deficits, lateness, waited
from testbed.trace.intervals import Intervals, subtract, total, union
from testbed.trace.log import EventLog
from testbed.trace.metrics_spec import Metric
from testbed.trace.record import RunView

_SPENT = ("compute", "send", "receive", "communicate", "down", "idle")
_COUNTED = (
    "messages_sent",
    "bytes_sent",
    "messages_received",
    "bytes_received",
    "flops",
    "busy",
    "deficit",
)
_TOGETHER = 1 << 17
"""Approximate number of bars processed together: those of all devices of a long run would fill memory."""
KINDS: tuple[BarKind, ...] = ("compute", "send", "receive", "down")
OF_DEVICES: dict[str, MetricKind] = {
    **dict.fromkeys([*_SPENT, "busy", "deficit"], "seconds"),
    **dict.fromkeys(
        [*(f"{name}_share" for name in _SPENT), "deficit_share", "waited_share"],
        "share",
    ),
    **dict.fromkeys(
        ["bytes_sent", "bytes_received", "weights", "activations"], "bytes"
    ),
    **dict.fromkeys(["messages_sent", "messages_received", "flops"], "number"),
    "energy": "joules",
}
"""The figures of one device, named as ``devices.<device>.<figure>``."""


def devices(record: RunView) -> dict[str, dict[str, Any]]:
    """Return one row per device of the experiment, by name.

    ``<activity>`` in seconds and ``<activity>_share`` of the duration, traffic, ``flops``, ``busy`` and ``deficit`` of
    the host; ``deficit_share`` and ``waited_share`` of the steady phase; bytes of ``weights`` and most ``activations``
    where the method says.
    """
    table = {}
    done, late = _work_by_device(record.log), deficits(record.log, record.phase)
    waiting = waited(record.log, record.phase)
    spent = _activity_by_device(record)
    for spec in record.experiment.devices:
        row: dict[str, Any] = {"profile": spec.profile, "speed": spec.speed}
        if held := record.plan.of(spec.name):
            row["units"] = [end for piece in held for end in (piece.first, piece.last)]
        row |= spent[spec.name]
        row |= done.get(spec.name, dict.fromkeys(_COUNTED, 0))
        if (
            energy := spec.joules(record.end - row["down"], row["compute"])
        ) is not None:
            row["energy"] = energy
        # A processor that is late is so beside others that are not.
        row["deficit_share"] = _share_of(
            late.get(spec.name, 0.0) / spec.processors, record.phase
        )
        row["waited_share"] = _share_of(waiting.get(spec.name, 0.0), record.phase)
        table[spec.name] = row
    return table


def _activity_by_device(record: RunView) -> dict[str, dict[str, float]]:
    """Return by device the seconds and the shares of each of `_SPENT`."""
    activity: dict[str, dict[str, float]] = {}
    some: dict[str, list[Intervals]] = {}
    bars = 0
    for number, spec in enumerate(record.experiment.devices, 1):
        some[spec.name] = [record.spans(spec.name, kind) for kind in KINDS]
        bars += sum(map(len, some[spec.name]))
        if bars >= _TOGETHER or number == len(record.experiment.devices):
            activity |= _activity_of(some, record.end)
            some, bars = {}, 0
    return activity


def _activity_of(
    charted: Mapping[str, Sequence[Intervals]], end: float
) -> dict[str, dict[str, float]]:
    """Return the same of some devices, of which the stretches of each of `KINDS` are given.

    They lie one behind the other on one axis, which counts the instants at which something begins or ends: thousands of
    devices take a few operations on all of their stretches, in place of as many on a few stretches of each.
    """
    kinds = list(zip(*charted.values(), strict=True))
    stretches = [np.concatenate(each).clip(0.0, end) for each in kinds]
    instants = np.unique(
        np.concatenate([(0.0, end), *(each.ravel() for each in stretches)])
    )
    devices = np.arange(len(charted))[:, None] * len(instants)

    def on_axis(times: Intervals, owners: Any) -> Intervals:
        return np.asarray(np.searchsorted(instants, times) + owners, dtype=float)

    def seconds(part: Intervals) -> list[float]:
        owners, places = np.divmod(part.astype(int), len(instants))
        lengths = instants[places[:, 1]] - instants[places[:, 0]]
        return np.bincount(owners[:, 0], lengths, len(charted)).astype(float).tolist()  # type: ignore[no-any-return]

    whole = on_axis(np.array([(0.0, end)]), devices)
    compute, send, receive, down = (
        union(on_axis(times, np.repeat(devices, list(map(len, own)), axis=0)))
        for times, own in zip(stretches, kinds, strict=True)
    )
    # What a dead device was said to do (a send that was retried meanwhile, say) is not activity.
    compute, send, receive = (subtract(part, down) for part in (compute, send, receive))
    communicate = subtract(np.concatenate((send, receive)), compute)
    idle = subtract(whole, np.concatenate((compute, send, receive, down)))
    spent = zip(
        *map(seconds, (compute, send, receive, communicate, down, idle)), strict=True
    )
    return {
        name: _with_shares(dict(zip(_SPENT, each, strict=True)), end)
        for name, each in zip(charted, spent, strict=True)
    }


def _with_shares(seconds: dict[str, float], end: float) -> dict[str, float]:
    return seconds | {
        f"{name}_share": value / end if end > 0 else 0.0
        for name, value in seconds.items()
    }


def _work_by_device(log: EventLog) -> dict[str, dict[str, Any]]:
    """Return, by device, sent and received bytes, computations, and peak memory in bytes."""
    work: defaultdict[str, dict[str, Any]] = defaultdict(
        lambda: dict.fromkeys(_COUNTED, 0)
    )
    for event, (devices, sizes) in log.of("send", "cast", "receive").columns(
        "device", "bytes"
    ):
        way = "received" if event == "receive" else "sent"
        for (device, size), number in Counter(
            zip(devices, sizes, strict=False)
        ).items():
            work[device][f"messages_{way}"] += number
            work[device][f"bytes_{way}"] += number * (size or 0)
    for device, flops, busy, late, deficit in log.of("compute").rows(
        "device", "flops", "busy", "late", "deficit"
    ):
        own = work[device]
        own["flops"] += flops or 0.0
        own["busy"] += busy or 0.0
        own["deficit"] += lateness(late, deficit)
    for device, weights, activations in log.of("memory").rows(
        "device", "weights", "activations"
    ):
        work[device] |= {"weights": weights, "activations": activations}
    return work


def _share_of(seconds: float, phase: Intervals) -> float:
    return seconds / total(phase) if total(phase) > 0 else 0.0


def _mean_of(key: str, record: RunView) -> float | None:
    planned = set(record.plan.devices)
    used = [row[key] for name, row in record.cached(devices).items() if name in planned]
    return fmean(used) if used else None


def _total_energy(record: RunView) -> float | None:
    rows = record.cached(devices).values()
    energies = [row["energy"] for row in rows if "energy" in row]
    return sum(energies) if len(energies) == len(rows) else None


FIGURES = (
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
