"""The events of a run's folder as they are written, or again at a chosen pace."""

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
"""Seconds between two looks at the file, and between two batches."""
HISTORY = 60.0
"""Seconds before the newest event of which the page still draws what devices did."""
BARS = {"compute": "compute", "send": "send", "receive": "receive", "cast": "send"}
"""Events that are drawn as bars, and as what."""
BLOCK = 1 << 20
"""Bytes that are read at a time, about: a run's events may be more than memory holds."""
_UNSHOWN = {"begin", "memory", "host", "objects"}
"""Events that the page has no use for: most of them all, and large."""


class Tail:
    """Reads a growing file of JSON lines: whole lines only, and a block of them at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self.more = False
        """Whether there may be more lines by now than the last block had."""

    def news(self) -> list[Any]:
        """Return the lines since the last call, or the first block of them; nothing of a file that is not there yet."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                lines = file.readlines(BLOCK)
        except FileNotFoundError:
            return []
        size = sum(map(len, lines))
        self.more = size >= BLOCK
        if lines and not lines[-1].endswith(b"\n"):
            size -= len(lines.pop())
        self._read += size
        return [json.loads(line) for line in lines]

    def newest(self) -> float:
        """Return the time of the last whole line; 0 where there is none, or it is longer than a block."""
        try:
            with self._path.open("rb") as file:
                file.seek(max(0, file.seek(0, SEEK_END) - BLOCK))
                text = file.read()
        except FileNotFoundError:
            return 0.0
        _, begun, last = text[: text.rfind(b"\n")].rpartition(b"\n")
        return float(json.loads(last)["time"]) if begun else 0.0


def batches(folder: Path, drawn: Collection[str], pace: float | None = None) -> Iterator[dict[str, Any]]:
    """Yield what happened, in batches: ``events`` (as `shown` has them), ``now`` (seconds of the run), ``over``.

    The run may be finished or not. ``pace`` is in seconds of the run in a second of the reader's, from the run's start;
    None: all there is, then as it comes.
    """
    tail = Tail(folder / "events.jsonl")
    began = time.monotonic()
    waiting: deque[dict[str, Any]] = deque()
    now = 0.0
    while True:
        facts = json.loads((folder / "manifest.json").read_text())
        due = tail.newest() if pace is None else pace * (time.monotonic() - began)
        if not waiting or waiting[-1]["time"] <= due:
            waiting.extend(tail.news())
        ready = _take(waiting, math.inf if pace is None else due)
        behind = tail.more and not waiting
        latest = max((event["time"] for event in ready), default=0.0)
        now = max(now, latest) if pace is None or behind else due
        over = None
        if facts["status"] != RUNNING and not waiting and not behind:
            over = {"status": facts["status"], "error": facts["error"]}
        yield {"events": shown(ready, drawn, due), "now": now, "over": over}
        if over:
            return
        if not behind:
            time.sleep(INTERVAL)


def _take(waiting: deque[dict[str, Any]], due: float) -> list[dict[str, Any]]:
    """Remove and return the events up to a time; a few that are out of order come late."""
    ready = []
    while waiting and waiting[0]["time"] <= due:
        ready.append(waiting.popleft())
    return ready


def shown(events: list[dict[str, Any]], drawn: Collection[str], now: float) -> list[dict[str, Any]]:
    """Return the events that the page shows: bars of ``drawn`` devices in the last `HISTORY` seconds, and all else."""
    found = []
    for event in events:
        kind = event["event"]
        if kind in BARS:
            if event["device"] in drawn and event["time"] >= now - HISTORY:
                found.append(_bar(event))
        elif kind not in _UNSHOWN:
            found.append(event)
    return found


def _bar(event: dict[str, Any]) -> dict[str, Any]:
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
