"""The events of a run for its page: from ``events.jsonl`` in the results folder, live or replayed at a chosen pace.

The page has a Gantt chart: an event with a duration, such as a computation, becomes a bar.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Collection, Iterator
from io import SEEK_END
from pathlib import Path
from typing import Any

from testbed_controller.results.recorder import RUNNING

INTERVAL = 0.25
"""Polling interval of the file and interval of batches, in seconds."""
BAR_AGE = 60.0
"""Age in seconds up to which bars are sent; the Gantt chart of the page shows less."""
BAR_KINDS = {"compute": "compute", "send": "send", "receive": "receive", "cast": "send"}
"""Event types drawn as bars, with the kind of bar."""
BLOCK = 1 << 20
"""Approximate size of a read, in bytes: the events of a run may exceed the memory."""
_OMITTED_TYPES = {"begin", "memory", "host", "objects"}
"""Event types that the page does not need; they are frequent and large."""


class EventFile:
    """A reader of ``events.jsonl`` while the run still writes lines, in blocks of complete lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.has_more = False
        """Whether the file may have lines beyond the last block."""

    def read_events(self) -> list[dict[str, Any]]:
        """Return the events since the last call, at most one block; empty if the file does not exist yet."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                lines = file.readlines(BLOCK)
        except FileNotFoundError:
            return []
        size = sum(map(len, lines))
        self.has_more = size >= BLOCK
        # A last line without a line break is still being written; the next call reads it again.
        if lines and not lines[-1].endswith(b"\n"):
            incomplete = lines.pop()
            size -= len(incomplete)
        self._offset += size
        return [json.loads(line) for line in lines]

    def latest_time(self) -> float:
        """Return the time of the last event in the file, in seconds; 0 if the last block has no complete line."""
        try:
            with self._path.open("rb") as file:
                start = max(0, file.seek(0, SEEK_END) - BLOCK)
                file.seek(start)
                text = file.read()
        except FileNotFoundError:
            return 0.0
        # The text after the last line break is a line that is still being written.
        complete_lines, line_break, _ = text.rpartition(b"\n")
        if not line_break:
            return 0.0
        _, line_break_before, last_line = complete_lines.rpartition(b"\n")
        # The block may begin in the middle of its first line.
        if start and not line_break_before:
            return 0.0
        return float(json.loads(last_line)["time"])


def batches(
    folder: Path, devices: Collection[str], pace: float | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the messages for the page of a run, every `INTERVAL` seconds until the run has ended.

    A message has ``events`` (see `select_events`), ``now`` (seconds of the run) and ``over`` (None, or status and error
    in the last message). ``devices`` are those that the page draws.

    Without ``pace``, all existing events are yielded at once, and new ones as they are written. With ``pace``, the run
    is replayed from its start at this multiple of real time.
    """
    file = EventFile(folder / "events.jsonl")
    start = time.monotonic()
    # Events read from the file whose time has not come yet in a replay.
    pending: deque[dict[str, Any]] = deque()
    now = 0.0
    while True:
        # Read before the events: the status changes after the last event has been written.
        end_status = _end_status(folder)
        if pace is None:
            replay_time = math.inf
            latest_time = file.latest_time()
        else:
            replay_time = latest_time = pace * (time.monotonic() - start)
        # In a slow replay, later events stay in the file rather than in memory.
        if not pending or pending[-1]["time"] <= latest_time:
            pending.extend(file.read_events())
        ready = _pop_until(pending, replay_time)
        # Further blocks of the file are read without a pause.
        is_behind = file.has_more and not pending
        if pace is None or is_behind:
            # Also in a replay that is too fast for this machine, the page shows the time of the last event read.
            newest = max((event["time"] for event in ready), default=0.0)
            now = max(now, newest)
        else:
            now = replay_time
        over = None if pending or is_behind else end_status
        events = select_events(ready, devices, latest_time)
        yield {"events": events, "now": now, "over": over}
        if over:
            return
        if not is_behind:
            time.sleep(INTERVAL)


def _end_status(folder: Path) -> dict[str, Any] | None:
    """Return status and error of an ended run; None while the run is in progress."""
    manifest = json.loads((folder / "manifest.json").read_text())
    if manifest["status"] == RUNNING:
        return None
    return {"status": manifest["status"], "error": manifest["error"]}


def _pop_until(events: deque[dict[str, Any]], end: float) -> list[dict[str, Any]]:
    """Remove and return the first events, up to the first one after ``end``.

    Events of several devices may be out of order: an earlier event behind a later one stays as well.
    """
    popped = []
    while events and events[0]["time"] <= end:
        popped.append(events.popleft())
    return popped


def select_events(
    events: list[dict[str, Any]], devices: Collection[str], latest_time: float
) -> list[dict[str, Any]]:
    """Return the events needed by the page: recent bars of ``devices``, and most other events of all devices.

    Bars are recent up to `BAR_AGE` seconds before ``latest_time``.
    """
    selected = []
    for event in events:
        event_type = event["event"]
        if event_type in BAR_KINDS:
            is_recent = event["time"] >= latest_time - BAR_AGE
            if is_recent and event["device"] in devices:
                selected.append(_make_bar(event))
        elif event_type not in _OMITTED_TYPES:
            selected.append(event)
    return selected


def _make_bar(event: dict[str, Any]) -> dict[str, Any]:
    return {
        "event": "bar",
        "kind": BAR_KINDS[event["event"]],
        "device": event["device"],
        "start": event.get("start", event["time"] - event.get("duration", 0.0)),
        "time": event["time"],
        "peer": event.get("peer"),
        "bytes": event.get("bytes"),
        "label": event.get("span") or event.get("message"),
    }
