"""The Gantt chart of a run as compact data for the drawing script."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from testbed.trace.gantt import CHARTED, Bar, bars, spans
from testbed.trace.intervals import Interval, joined, union
from testbed.trace.log import EventLog
from testbed_controller.report.thinning import MOST, devices_shown
from testbed_controller.results.run import Run

KINDS = ("compute", "send", "receive", "down")
MOST_BARS = 40_000
"""Maximum number of bars embedded individually; longer runs keep only those of interesting windows and merge
the rest."""
MOST_DEVICES = 48
AROUND = 1.0
"""Seconds shown before and after a fault."""
MOST_PAUSES = 3
"""Maximum number of pauses with a view of their own."""
FINEST = 1 / 3000
"""Share of the duration: bars closer together look like one when the whole run is on the screen."""


def timeline(run: Run) -> dict[str, Any]:
    """Return ``devices``, ``bars``, ``windows``, ``views`` and ``end`` for the chart.

    A bar is [device, kind, start, duration, label, batch, micro, peer, bytes, interrupted], devices, kinds, labels and
    peers by number. ``views`` are the stretches worth a look, each with a name.
    """
    metrics = run.metrics
    end = metrics["duration"]
    devices = list(devices_shown(metrics["devices"]))[:MOST_DEVICES]
    log = EventLog.made_of(run.outcome.events)
    views = interesting(run)
    many = len(log.of(*CHARTED)) > MOST_BARS
    known = set(devices)
    all_bars = (
        _joined_bars(
            log, end, [(view["start"], view["end"]) for view in views[1:]], known
        )
        if many
        else bars(log, end)
    )
    shown = (bar for bar in all_bars if bar.device in known and bar.start <= end)
    charted = sorted(shown, key=lambda bar: (bar.start, bar.end))
    words = sorted(
        {bar.label for bar in charted} | {bar.peer for bar in charted if bar.peer}
    )
    number = {word: index for index, word in enumerate(words)}
    return {
        "end": end,
        "devices": devices,
        "hidden": len(metrics["devices"]) - len(devices),
        "joined": many,
        "kinds": KINDS,
        "words": words,
        "bars": [_compact_bar(bar, devices, number) for bar in charted],
        "windows": shaded(run),
        "views": views,
    }


def shaded(run: Run) -> list[dict[str, Any]]:
    """Return the stretches to be shaded: ``start``, ``end``, ``label`` and ``style`` (fault or recovery)."""
    metrics = run.metrics
    end = metrics["duration"]
    windows = []
    for fault in metrics["fault_list"]:
        if fault["mends"]:
            continue
        undone = fault["undone"] if fault["undone"] is not None else end
        label = f"{fault['action']} {fault['target']}"
        windows.append(
            {
                "start": fault["struck"],
                "end": min(undone, end),
                "label": label,
                "style": "fault",
            }
        )
    for item in metrics["recovery_list"]:
        resumed = end if item["resumed"] is None else item["resumed"]
        windows.append(
            {
                "start": item["detected"],
                "end": resumed,
                "label": "recovering",
                "style": "recovery",
            }
        )
    for pause in run.pauses:
        windows.append(
            {
                "start": pause.start,
                "end": pause.end,
                "label": pause.name,
                "style": "recovery",
            }
        )
    return windows if len(windows) <= MOST else list(_merge_windows(windows))


def _merge_windows(windows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Merge overlapping windows, hundreds of which would hide everything else."""
    for style in ("fault", "recovery"):
        own = [window for window in windows if window["style"] == style]
        for start, end in union(
            (window["start"], window["end"]) for window in own
        ).tolist():
            labels = [
                window["label"] for window in own if start <= window["start"] < end
            ]
            label = labels[0] if len(labels) == 1 else f"{len(labels)} times a {style}"
            yield {"start": start, "end": end, "label": label, "style": style}


def interesting(run: Run) -> list[dict[str, Any]]:
    """Return the views: the whole run, two steady steps or a few requests, and the surroundings of pauses and
    faults."""
    metrics = run.metrics
    end = metrics["duration"]
    steps, requests = metrics["series"]["steps"], metrics["series"]["requests"]
    windows = [("whole run", 0.0, end)]
    pairs = [
        (left, right)
        for left, right in pairwise(steps)
        if left["steady"] and right["steady"]
    ]
    if pairs:
        left, right = pairs[len(pairs) // 2]
        windows.append(("two steps", left["time"] - left["seconds"], right["time"]))
    if requests:
        middle = requests[len(requests) // 2]
        windows.append(
            ("a request", middle["time"] - middle["latency"], middle["time"])
        )
    for pause in run.pauses[:MOST_PAUSES]:
        windows.append((pause.name, pause.start - AROUND, min(end, pause.end + AROUND)))
    for fault in metrics["fault_list"][:6]:
        if not fault["mends"]:
            last = max(
                fault[key] or fault["struck"]
                for key in ("struck", "undone", "recovered")
            )
            name = f"{fault['action']} {fault['target']}"
            windows.append((name, fault["struck"] - AROUND, min(end, last + AROUND)))
    views = [
        {"name": name, "start": max(0.0, start), "end": until}
        for name, start, until in windows
    ]
    return [view for view in views if view["end"] > view["start"]]


def _joined_bars(
    log: EventLog, end: float, keep: Sequence[Interval], devices: Collection[str]
) -> Iterator[Bar]:
    """Yield the bars of given time spans and all outages, and merge equal neighbouring bars elsewhere.

    The bars in those stretches are of all devices, the others of ``devices`` alone.
    """
    yield from bars(log, end, keep) if keep else ()
    for device, kinds in spans(log, end).items():
        for kind, labels in kinds.items() if device in devices else ():
            for label, own in labels.items():
                near = [(own[:, 0] < to) & (since < own[:, 1]) for since, to in keep]
                rest = own[~np.logical_or.reduce([own[:, 0] > end, *near])]
                shown = rest if kind == "down" else joined(rest, keep, end * FINEST)
                yield from (
                    Bar(device, kind, start, stop, label)
                    for start, stop in shown.tolist()
                )


def _compact_bar(
    bar: Bar, devices: Sequence[str], number: Mapping[str, int]
) -> list[Any]:
    row: list[Any] = [
        devices.index(bar.device),
        KINDS.index(bar.kind),
        round(bar.start, 6),
        round(bar.end - bar.start, 6),
        number[bar.label],
        bar.batch,
        bar.micro,
        number[bar.peer] if bar.peer else None,
        bar.size,
        1 if bar.interrupted else None,
    ]
    while row[-1] is None:
        row.pop()
    return row
