"""The event stream of a run's folder, live or replayed at a chosen pace."""

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
HISTORY = 60.0
"""Length of the time line on the page, in seconds."""
BARS = {"compute": "compute", "send": "send", "receive": "receive", "cast": "send"}
"""Event types drawn as bars, with the kind of bar."""
BLOCK = 1 << 20
"""Approximate size of a read, in bytes: the events of a run may exceed the memory."""
_UNSHOWN = {"begin", "memory", "host", "objects"}
"""Event types that the page ignores; they are frequent and large."""


class Tail:
    """A reader of a growing file of JSON lines, in blocks of complete lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.more = False
        """Whether the file may have lines beyond the last block."""

    def read_lines(self) -> list[Any]:
        """Return the lines since the last call, at most one block; empty if the file does not exist yet."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                lines = file.readlines(BLOCK)
        except FileNotFoundError:
            return []
        size = sum(map(len, lines))
        self.more = size >= BLOCK
        # The run is writing the last line, which is read again when complete.
        if lines and not lines[-1].endswith(b"\n"):
            size -= len(lines.pop())
        self._offset += size
        return [json.loads(line) for line in lines]

    def newest(self) -> float:
        """Return the time of the last complete line in seconds; 0 without one, or if it exceeds a block."""
        try:
            with self._path.open("rb") as file:
                start = max(0, file.seek(0, SEEK_END) - BLOCK)
                file.seek(start)
                text = file.read()
        except FileNotFoundError:
            return 0.0
        # A line without a line break is still being written.
        complete, line_break, _ = text.rpartition(b"\n")
        if not line_break:
            return 0.0
        _, earlier_break, last = complete.rpartition(b"\n")
        # In the middle of the file, the first line of a block may lack its beginning.
        if start and not earlier_break:
            return 0.0
        return float(json.loads(last)["time"])


def batches(
    folder: Path, drawn: Collection[str], pace: float | None = None
) -> Iterator[dict[str, Any]]:
    """Yield batches of ``events`` (see `select_shown`), ``now`` (seconds of the run) and ``over`` (status at the end).

    ``pace`` replays the run from its start at this multiple of real time. Without ``pace``, all existing events are
    yielded at once, and new ones as they are written.
    """
    tail = Tail(folder / "events.jsonl")
    began = time.monotonic()
    waiting: deque[dict[str, Any]] = deque()
    now = 0.0
    while True:
        # Read before the events: the status changes after the last event has been written.
        status = _end_status(folder)
        # Live, all events are due, and bars are recent up to the last event of the file.
        if pace is None:
            horizon = tail.newest()
            due = math.inf
        else:
            horizon = due = pace * (time.monotonic() - began)
        # At a slow pace, events that are due later are left in the file rather than in memory.
        if not waiting or waiting[-1]["time"] <= horizon:
            waiting.extend(tail.read_lines())
        ready = _pop_due(waiting, due)
        is_behind = tail.more and not waiting
        # A replay that cannot keep pace shows the time of the last event read.
        if pace is None or is_behind:
            latest = max((event["time"] for event in ready), default=0.0)
            now = max(now, latest)
        else:
            now = due
        over = None if waiting or is_behind else status
        yield {"events": select_shown(ready, drawn, horizon), "now": now, "over": over}
        if over:
            return
        if not is_behind:
            time.sleep(INTERVAL)


def _end_status(folder: Path) -> dict[str, Any] | None:
    """Return status and error of a run that has ended; None while in progress."""
    facts = json.loads((folder / "manifest.json").read_text())
    if facts["status"] == RUNNING:
        return None
    return {"status": facts["status"], "error": facts["error"]}


def _pop_due(waiting: deque[dict[str, Any]], due: float) -> list[dict[str, Any]]:
    """Remove and return the events up to a time; an event behind a later one waits for it."""
    ready = []
    while waiting and waiting[0]["time"] <= due:
        ready.append(waiting.popleft())
    return ready


def select_shown(
    events: list[dict[str, Any]], drawn: Collection[str], now: float
) -> list[dict[str, Any]]:
    """Return the events for the page: recent bars of the ``drawn`` devices, and all other relevant events."""
    selected = []
    for event in events:
        kind = event["event"]
        if kind in BARS:
            if event["device"] in drawn and event["time"] >= now - HISTORY:
                selected.append(_make_bar(event))
        elif kind not in _UNSHOWN:
            selected.append(event)
    return selected


def _make_bar(event: dict[str, Any]) -> dict[str, Any]:
    return {
        "event": "bar",
        "kind": BARS[event["event"]],
        "device": event["device"],
        "start": event.get("start", event["time"] - event.get("duration", 0.0)),
        "time": event["time"],
        "peer": event.get("peer"),
        "bytes": event.get("bytes"),
        "label": event.get("span") or event.get("message"),
    }
