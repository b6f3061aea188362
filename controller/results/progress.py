"""How far a run that is not over has come, from the last of its events."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from testbed.trace.events import Event

READ = 1 << 18
"""Bytes at the end of the events that are looked at."""


@dataclass
class Progress:
    """What the last events say."""

    time: float = 0.0
    """Seconds of the run, at its last event."""
    step: int | None = None
    """Last step or request that is done."""
    loss: float | None = None
    doing: dict[str, str] = field(default_factory=dict)
    """By device, what it does or did last."""

    def __str__(self) -> str:
        parts = [f"{self.time:.1f} s"]
        parts += [] if self.step is None else [f"step {self.step}"]
        parts += [] if self.loss is None else [f"loss {self.loss:.4g}"]
        return ", ".join(parts)


def progress(folder: Path) -> Progress:
    """Return how far the run in a folder has come; nothing done where there are no events yet."""
    found = Progress()
    try:
        with (folder / "events.jsonl").open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - READ))
            text = file.read()
    except FileNotFoundError:
        return found
    # Neither the first nor the last line need be whole.
    first = 0 if size <= READ else text.find(b"\n") + 1
    for line in text[first : text.rfind(b"\n") + 1].splitlines():
        event = Event.from_json(line.decode())
        found.time = max(found.time, event.time)
        if event.event in ("step", "request"):
            found.step = event.fields.get(event.event)
            found.loss = event.fields.get("loss", found.loss)
        elif event.event in ("begin", "compute"):
            found.doing[event.device] = str(event.fields.get("span"))
    return found
