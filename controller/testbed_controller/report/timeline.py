"""The Gantt chart of a run as compact data for the script ``gantt.js`` of the report.

A bar is one computation, transmission or outage of a device. A window is a shaded time span, such as that of a fault. A
view is a time span that a button of the chart shows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from testbed.trace.gantt import CHARTED, Bar, bars, spans
from testbed.trace.intervals import Interval, Intervals, join_close, union
from testbed.trace.log import EventLog
from testbed_controller.report.thinning import MAX_SHOWN, notable_devices
from testbed_controller.results.run import Run

KINDS = ("compute", "send", "receive", "down")
"""Kinds of bars; the script receives a kind by its number here."""
MOST_BARS = 40_000
"""Maximum number of bars embedded individually; of longer runs, bars outside the views are merged."""
MOST_DEVICES = 48
"""Maximum number of devices drawn; the others are omitted."""
VIEW_MARGIN = 1.0
"""Seconds that a view shows before and after a fault or pause."""
MOST_PAUSES = 3
"""Maximum number of pauses with a view of their own."""
MOST_FAULTS = 6
"""Maximum number of faults with a view of their own."""
MERGED_GAP = 1 / 3000
"""Share of the run's duration: bars with a smaller gap look like one bar when the screen shows the whole run."""


def timeline(run: Run) -> dict[str, Any]:
    """Return the data of the chart.

    ``bars`` are lists [device, kind, start, duration, label, batch, micro-batch, peer, bytes, interrupted] in the order
    of their starts, in seconds. Devices are given by their index in ``devices``, kinds in ``kinds``, labels and peers
    in ``words``. Missing values at the end of a list are omitted.

    ``windows`` are described at `shaded_windows`, ``views`` at `find_views`. ``end`` is the duration of the run in
    seconds, ``hidden`` the number of omitted devices, and ``joined`` states whether bars outside the views are merged.
    """
    metrics = run.metrics
    end = metrics["duration"]
    devices = list(notable_devices(metrics["devices"]))[:MOST_DEVICES]
    log = EventLog.made_of(run.outcome.events)
    views = find_views(run)
    must_merge = len(log.of(*CHARTED)) > MOST_BARS
    drawn_devices = set(devices)
    all_bars: Iterator[Bar] = bars(log, end)
    if must_merge:
        # The first view is the whole run, and has no details.
        detailed_spans = [(view["start"], view["end"]) for view in views[1:]]
        all_bars = _merged_bars(log, end, detailed_spans, drawn_devices)
    charted = []
    # Bars refer to words by number, since a page has up to 40,000 bars.
    used_words = set()
    for bar in all_bars:
        if bar.device not in drawn_devices or bar.start > end:
            continue
        charted.append(bar)
        used_words.add(bar.label)
        if bar.peer:
            used_words.add(bar.peer)
    charted.sort(key=lambda bar: (bar.start, bar.end))
    words = sorted(used_words)
    word_index = {word: index for index, word in enumerate(words)}
    return {
        "end": end,
        "devices": devices,
        "hidden": len(metrics["devices"]) - len(devices),
        "joined": must_merge,
        "kinds": KINDS,
        "words": words,
        "bars": [_compact_bar(bar, devices, word_index) for bar in charted],
        "windows": shaded_windows(run),
        "views": views,
    }


def shaded_windows(run: Run) -> list[dict[str, Any]]:
    """Return the time spans to be shaded: ``start``, ``end``, ``label`` and ``style`` (``fault`` or ``recovery``)."""
    metrics = run.metrics
    end = metrics["duration"]
    windows = []
    for fault in metrics["fault_list"]:
        # A repair has no duration to be shaded.
        if fault["mends"]:
            continue
        undone = end if fault["undone"] is None else min(fault["undone"], end)
        label = f"{fault['action']} {fault['target']}"
        windows.append(_make_window(fault["struck"], undone, label, "fault"))
    for recovery in metrics["recovery_list"]:
        resumed = end if recovery["resumed"] is None else recovery["resumed"]
        label = "recovering"
        windows.append(_make_window(recovery["detected"], resumed, label, "recovery"))
    for pause in run.pauses:
        windows.append(_make_window(pause.start, pause.end, pause.name, "recovery"))
    return windows if len(windows) <= MAX_SHOWN else list(_merge_windows(windows))


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


def find_views(run: Run) -> list[dict[str, Any]]:
    """Return the views, each with ``name``, ``start`` and ``end``.

    They are the whole run, two undisturbed steps, a request, and the surroundings of pauses and faults. In the view of
    the whole run, single steps are too short to be distinguished.
    """
    metrics = run.metrics
    end = metrics["duration"]
    spans = [("whole run", 0.0, end)]
    spans += _work_spans(metrics["series"])
    for pause in run.pauses[:MOST_PAUSES]:
        spans.append((pause.name, pause.start - VIEW_MARGIN, pause.end + VIEW_MARGIN))
    for fault in metrics["fault_list"][:MOST_FAULTS]:
        if fault["mends"]:
            continue
        struck = fault["struck"]
        # Until the end of the fault or of the recovery, whichever is later; both may be missing.
        last = max(struck, fault["undone"] or struck, fault["recovered"] or struck)
        name = f"{fault['action']} {fault['target']}"
        spans.append((name, struck - VIEW_MARGIN, last + VIEW_MARGIN))
    views = []
    for name, start, stop in spans:
        start = max(0.0, start)
        stop = min(end, stop)
        if stop > start:
            views.append({"name": name, "start": start, "end": stop})
    return views


def _work_spans(series: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
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


def _merged_bars(
    log: EventLog,
    end: float,
    detailed_spans: Sequence[Interval],
    devices: Collection[str],
) -> Iterator[Bar]:
    """Yield all bars in the detailed time spans; elsewhere those of ``devices``, with equal neighbours merged.

    Outages are never merged.
    """
    if detailed_spans:
        yield from bars(log, end, detailed_spans)
    for device, kinds in spans(log, end).items():
        if device not in devices:
            continue
        for kind, labels in kinds.items():
            for label, intervals in labels.items():
                outside = _outside(intervals, end, detailed_spans)
                if kind != "down":
                    outside = join_close(outside, detailed_spans, end * MERGED_GAP)
                for start, stop in outside.tolist():
                    yield Bar(device, kind, start, stop, label)


def _outside(
    intervals: Intervals, end: float, excluded_spans: Sequence[Interval]
) -> Intervals:
    """Return the intervals (n, 2) beginning before ``end`` and overlapping none of the excluded spans."""
    starts, stops = intervals[:, 0], intervals[:, 1]
    is_excluded = starts > end
    for span_start, span_end in excluded_spans:
        is_excluded |= (starts < span_end) & (span_start < stops)
    return intervals[~is_excluded]


def _compact_bar(
    bar: Bar, devices: Sequence[str], word_index: Mapping[str, int]
) -> list[Any]:
    """Return a bar as the list described in `timeline`."""
    row: list[Any] = [
        devices.index(bar.device),
        KINDS.index(bar.kind),
        # Rounded to microseconds: more digits of up to 40,000 bars would only lengthen the page.
        round(bar.start, 6),
        round(bar.end - bar.start, 6),
        word_index[bar.label],
        bar.batch,
        bar.micro,
        word_index[bar.peer] if bar.peer else None,
        bar.size,
        1 if bar.interrupted else None,
    ]
    while row[-1] is None:
        row.pop()
    return row
