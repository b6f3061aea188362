"""The Gantt chart of a run as compact data for the drawing script."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from testbed.trace.gantt import CHARTED, Bar, bars, spans
from testbed.trace.intervals import Interval, Intervals, join_close, union
from testbed.trace.log import EventLog
from testbed_controller.report.thinning import MOST, devices_shown
from testbed_controller.results.run import Run

KINDS = ("compute", "send", "receive", "down")
MOST_BARS = 40_000
"""Maximum number of bars embedded individually; longer runs keep only those of interesting windows and merge
the rest."""
MOST_DEVICES = 48
"""Maximum number of devices drawn; the others are omitted."""
AROUND = 1.0
"""Seconds shown before and after a fault."""
MOST_PAUSES = 3
"""Maximum number of pauses with a view of their own."""
MOST_FAULTS = 6
"""Maximum number of faults with a view of their own."""
FINEST = 1 / 3000
"""Share of the duration: bars closer together look like one when the whole run is on the screen."""


def timeline(run: Run) -> dict[str, Any]:
    """Return ``devices``, ``bars``, ``windows``, ``views`` and ``end`` for the chart.

    A bar is [device, kind, start, duration, label, batch, micro, peer, bytes, interrupted]; devices, kinds, labels and
    peers are given by number. ``views`` are the time spans of interest, each with a name.
    """
    metrics = run.metrics
    end = metrics["duration"]
    devices = list(devices_shown(metrics["devices"]))[:MOST_DEVICES]
    log = EventLog.made_of(run.outcome.events)
    views = interesting(run)
    has_many = len(log.of(*CHARTED)) > MOST_BARS
    drawn = set(devices)
    all_bars: Iterator[Bar] = bars(log, end)
    if has_many:
        # The first view is the whole run.
        details = [(view["start"], view["end"]) for view in views[1:]]
        all_bars = _joined_bars(log, end, details, drawn)
    charted = []
    # Each word once and by its number in the bars: a page has up to 40,000 bars.
    used_words = set()
    for bar in all_bars:
        if bar.device not in drawn or bar.start > end:
            continue
        charted.append(bar)
        used_words.add(bar.label)
        if bar.peer:
            used_words.add(bar.peer)
    charted.sort(key=lambda bar: (bar.start, bar.end))
    words = sorted(used_words)
    number = {word: index for index, word in enumerate(words)}
    return {
        "end": end,
        "devices": devices,
        "hidden": len(metrics["devices"]) - len(devices),
        "joined": has_many,
        "kinds": KINDS,
        "words": words,
        "bars": [_compact_bar(bar, devices, number) for bar in charted],
        "windows": shaded(run),
        "views": views,
    }


def shaded(run: Run) -> list[dict[str, Any]]:
    """Return the time spans to be shaded: ``start``, ``end``, ``label`` and ``style`` (fault or recovery)."""
    metrics = run.metrics
    end = metrics["duration"]
    windows = []
    for fault in metrics["fault_list"]:
        # A repair is a moment, and has no duration to be shaded.
        if fault["mends"]:
            continue
        undone = end if fault["undone"] is None else min(fault["undone"], end)
        label = f"{fault['action']} {fault['target']}"
        windows.append(_make_window(fault["struck"], undone, label, "fault"))
    for item in metrics["recovery_list"]:
        resumed = end if item["resumed"] is None else item["resumed"]
        label = "recovering"
        windows.append(_make_window(item["detected"], resumed, label, "recovery"))
    for pause in run.pauses:
        windows.append(_make_window(pause.start, pause.end, pause.name, "recovery"))
    return windows if len(windows) <= MOST else list(_merge_windows(windows))


def _make_window(start: float, end: float, label: str, style: str) -> dict[str, Any]:
    return {"start": start, "end": end, "label": label, "style": style}


def _merge_windows(windows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Merge overlapping windows, hundreds of which would hide everything else."""
    for style in ("fault", "recovery"):
        same_style = [window for window in windows if window["style"] == style]
        intervals = [(window["start"], window["end"]) for window in same_style]
        for start, end in union(intervals).tolist():
            merged = [each for each in same_style if start <= each["start"] < end]
            label = f"{len(merged)} times a {style}"
            if len(merged) == 1:
                label = merged[0]["label"]
            yield _make_window(start, end, label, style)


def interesting(run: Run) -> list[dict[str, Any]]:
    """Return the views: the whole run, two undisturbed steps, a request, and the surroundings of pauses and faults.

    Each is a button of the chart; in the view of the whole run, single steps are too short to be distinguished.
    """
    metrics = run.metrics
    end = metrics["duration"]
    windows = [("whole run", 0.0, end)]
    windows += _work_views(metrics["series"])
    for pause in run.pauses[:MOST_PAUSES]:
        windows.append((pause.name, pause.start - AROUND, pause.end + AROUND))
    for fault in metrics["fault_list"][:MOST_FAULTS]:
        if fault["mends"]:
            continue
        struck = fault["struck"]
        # Until the end of the fault or of the recovery, whichever is later; a fault may have neither.
        last = max(struck, fault["undone"] or struck, fault["recovered"] or struck)
        name = f"{fault['action']} {fault['target']}"
        windows.append((name, struck - AROUND, last + AROUND))
    views = []
    for name, start, stop in windows:
        start = max(0.0, start)
        stop = min(end, stop)
        if stop > start:
            views.append({"name": name, "start": start, "end": stop})
    return views


def _work_views(series: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Yield name, start and end of two undisturbed steps and of a request, from the middle of the run."""
    pairs = []
    for left, right in pairwise(series["steps"]):
        if left["steady"] and right["steady"]:
            pairs.append((left, right))
    if pairs:
        left, right = pairs[len(pairs) // 2]
        yield "two steps", left["time"] - left["seconds"], right["time"]
    requests = series["requests"]
    if requests:
        middle = requests[len(requests) // 2]
        yield "a request", middle["time"] - middle["latency"], middle["time"]


def _joined_bars(
    log: EventLog, end: float, keep: Sequence[Interval], devices: Collection[str]
) -> Iterator[Bar]:
    """Yield all bars in the time spans ``keep``; elsewhere those of ``devices``, with equal neighbours merged.

    Outages are never merged.
    """
    if keep:
        yield from bars(log, end, keep)
    for device, kinds in spans(log, end).items():
        if device not in devices:
            continue
        for kind, labels in kinds.items():
            for label, own in labels.items():
                outside = _outside(own, end, keep)
                if kind != "down":
                    outside = join_close(outside, keep, end * FINEST)
                for start, stop in outside.tolist():
                    yield Bar(device, kind, start, stop, label)


def _outside(own: Intervals, end: float, keep: Sequence[Interval]) -> Intervals:
    """Return the intervals (n, 2) that begin before ``end`` and overlap none of ``keep``."""
    excluded = own[:, 0] > end
    for since, until in keep:
        excluded |= (own[:, 0] < until) & (since < own[:, 1])
    return own[~excluded]


def _compact_bar(
    bar: Bar, devices: Sequence[str], number: Mapping[str, int]
) -> list[Any]:
    """Return a bar as the list that `timeline` describes, without the unknown values at its end."""
    row: list[Any] = [
        devices.index(bar.device),
        KINDS.index(bar.kind),
        # Rounded to microseconds: more digits of up to 40,000 bars would only lengthen the page.
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
